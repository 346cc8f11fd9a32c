"""Channels and sockets: descriptors arrive whole, close-on-exec, from this user, and nothing else does."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import remap
from remap.sharing.channel import FDS_PER_PACKET, LARGEST_MESSAGE, MOST_FDS, Channel, Fds
from remap.sharing.exchange import host_identity
from remap.sharing.sockets import Listener, connect, private_directory, remove_stale

from .support import LIMIT


def soon() -> float:
    """Return a deadline that no test reaches."""
    return time.monotonic() + LIMIT


@pytest.fixture(name="pair")
def _pair() -> Generator[tuple[Channel, Channel]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Channel(one) as first, Channel(other) as second:
        yield first, second


def raw(channel: Channel) -> socket.socket:
    """Return the socket of a channel, for what no channel would send."""
    return channel._socket


@pytest.mark.parametrize("count", [0, 1, FDS_PER_PACKET, FDS_PER_PACKET + 1, 600])
def test_descriptors_arrive(pair: tuple[Channel, Channel], count: int) -> None:
    """Any number arrives, also more than one message of the kernel carries, in order and close-on-exec (trap 30)."""
    with Fds() as sent:
        for index in range(count):
            number = os.memfd_create("test")
            os.write(number, b"%d" % index)
            sent.add(number)
        pair[0].send(b"hello", sent.numbers, deadline=soon())
        message, got = pair[1].receive(deadline=soon())
        with got:
            assert (message, len(got)) == (b"hello", count)
            assert not set(got.numbers) & set(sent.numbers), "they are new ones, not numbers (trap 27)"
            for index, number in enumerate(got.numbers):
                assert not os.get_inheritable(number)
                assert os.pread(number, 10, 0) == b"%d" % index


def test_a_child_inherits_nothing(pair: tuple[Channel, Channel]) -> None:
    """A program that is started while received descriptors are open has none of them (trap 30)."""
    number = os.memfd_create("remap test inheritance")
    pair[0].send(b"", [number], deadline=soon())
    os.close(number)
    _, got = pair[1].receive(deadline=soon())
    look = "import os; print([os.readlink('/proc/self/fd/%s' % n) for n in ('0', *map(str, range(3, 60))) " \
        "if os.path.exists('/proc/self/fd/%s' % n) or os.path.islink('/proc/self/fd/%s' % n)])"  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", look], close_fds=False, capture_output=True, text=True, check=True
    )
    got.close()
    assert "remap test inheritance" not in done.stdout


def test_too_much_is_not_sent(pair: tuple[Channel, Channel]) -> None:
    """More than a message may have is refused before anything is sent."""
    for message, fds in ((bytes(LARGEST_MESSAGE + 1), []), (b"", [0] * (MOST_FDS + 1))):
        with pytest.raises(remap.InvalidValueError, match="at most"):
            pair[0].send(message, fds, deadline=soon())
    pair[0].send(bytes(LARGEST_MESSAGE), deadline=soon())
    assert len(pair[1].receive(deadline=soon())[0]) == LARGEST_MESSAGE


@pytest.mark.parametrize(
    ("packets", "rule"),
    [
        ([(b"", 0)], "gone"),
        ([(b"ab", 0)], "does not begin"),
        ([(struct.pack("!I", 0) + b"x", 2)], "does not begin"),
        ([(struct.pack("!I", 2**32 - 1), 0)], "descriptors"),
        ([(struct.pack("!I", 3), 0), (b"+", 0)], "descriptors"),
        ([(struct.pack("!I", 3), 0), (b"+", 2), (b"+", 2)], "descriptors"),
        ([(bytes(LARGEST_MESSAGE + 100), 0)], "cut off"),
    ],
)
def test_hostile_packets(
    pair: tuple[Channel, Channel], nothing_left: None, packets: list[tuple[bytes, int]], rule: str
) -> None:
    """Packets that no channel sends are refused, and the descriptors in them are closed (invariant 11, trap 31)."""
    del nothing_left
    for data, count in packets:
        with Fds([os.memfd_create("test") for _ in range(count)]) as fds:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.numbers))] if count else []
            raw(pair[0]).sendmsg([data], beside)
    raw(pair[0]).shutdown(socket.SHUT_WR)
    with pytest.raises((remap.ShareError, EOFError), match=rule):
        pair[1].receive(deadline=soon())


@given(st.lists(st.tuples(st.binary(max_size=12), st.integers(0, 3)), max_size=6))
def test_random_packets(packets: list[tuple[bytes, int]]) -> None:
    """Whatever arrives, a reader gets messages or an error, in time, and no descriptor stays open."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = len(os.listdir("/proc/self/fd"))
    with Channel(one) as sender, Channel(other) as receiver:
        for data, count in packets:
            with Fds([os.memfd_create("test") for _ in range(count)]) as fds:
                beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.numbers))] * bool(count)
                raw(sender).sendmsg([data], beside)
        raw(sender).shutdown(socket.SHUT_WR)
        with suppress(remap.ShareError, EOFError):
            while True:
                receiver.receive(deadline=soon())[1].close()
        raw(sender).setblocking(False)
        while True:  # what was sent and not read holds its descriptors in the socket, not here
            with suppress(remap.ShareError):
                try:
                    receiver.receive_packet(deadline=None)[1].close()
                except (EOFError, OSError):
                    break
        assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_has_a_limit(pair: tuple[Channel, Channel]) -> None:
    """Nobody waits longer than was said: for a message, or for room to send one."""
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        pair[0].receive(deadline=start + 0.05)
    with pytest.raises(TimeoutError):
        while True:
            pair[0].send(bytes(LARGEST_MESSAGE), deadline=start + 0.2)
    with pytest.raises(BlockingIOError):
        pair[0].receive(deadline=None)
    assert time.monotonic() - start < LIMIT


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_last_word(pair: tuple[Channel, Channel], first: bool) -> None:
    """Who hangs up can say why, and is heard: whether the peer has said something by then, or says it later."""
    with Fds([os.memfd_create("x")]) as fds:
        if first:
            for _ in range(3):
                pair[0].send(b"question", fds.numbers, deadline=soon())
        pair[1].hang_up(b"no time")
        if not first:
            with pytest.raises(BrokenPipeError):
                pair[0].send(b"question", fds.numbers, deadline=soon())
    message, none = pair[0].receive(deadline=soon())
    assert (message, len(none)) == (b"no time", 0)
    with pytest.raises(EOFError):
        pair[0].receive(deadline=soon())
    pair[0].hang_up(b"nobody hears this")


def test_the_socket_is_private(tmp_path: Path) -> None:
    """The directory has mode 0700, the socket and its lock 0600, under whatever umask (trap 29)."""
    before = os.umask(0)
    try:
        listener = Listener(tmp_path / "s")
    finally:
        os.umask(before)
    for path in (tmp_path / "s", tmp_path / "s.lock"):
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    listener.close()
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(private_directory().lstat().st_mode) == 0o700


def test_a_directory_of_others_is_not_used(tmp_path: Path) -> None:
    """A private directory that is open to others, or is a link, is refused with what to do (trap 28)."""
    saved = tempfile.tempdir
    tempfile.tempdir = str(tmp_path)
    try:
        name = tmp_path / f"remap-{os.geteuid()}"
        name.mkdir()
        name.chmod(0o755)
        with pytest.raises(remap.ShareError, match="TMPDIR"):
            private_directory()
        name.rmdir()
        name.symlink_to(tmp_path)
        with pytest.raises(remap.ShareError, match="TMPDIR"):
            host_identity()
    finally:
        tempfile.tempdir = saved


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    """A path that no socket can have is refused with the limit, before anything is made (trap 28)."""
    path = tmp_path / ("x" * 100)
    for act in (Listener, lambda path: connect(path, deadline=soon())):
        with pytest.raises(remap.InvalidValueError, match="107 bytes"):
            act(path)
    assert list(tmp_path.iterdir()) == []


LISTEN = """
import sys, time
from pathlib import Path
from types import FrameType
from remap.sharing.sockets import Listener
listener = Listener(Path(sys.argv[1]))
print("listening", flush=True)
sys.stdin.read()
"""


def test_what_the_dead_left_is_removed(tmp_path: Path) -> None:
    """A socket of a killed process blocks nobody and is cleaned up; one of a live process is left alone (trap 28)."""
    path, live = tmp_path / "dead", Listener(tmp_path / "live")
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", LISTEN, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listening\n"
            with pytest.raises(remap.InUseError, match="live process"):
                Listener(path)
            assert remove_stale(tmp_path) == 0
            process.kill()
        assert path.exists()
        with pytest.raises(remap.ShareError, match="nobody listens"):
            connect(path, deadline=soon())
    with Listener(path) as again, connect(path, deadline=soon()):
        accepted = again.accept()
        assert accepted is not None
        accepted.close()
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    assert remove_stale(tmp_path) == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["live", "live.lock"]
    live.close()


def test_what_cannot_be_removed_is_left_alone(tmp_path: Path) -> None:
    """Where a dead owner's socket was replaced by something else, looking at it keeps neither its lock nor a file."""
    (tmp_path / "socket").mkdir()
    (tmp_path / "socket.lock").touch()
    before = os.listdir("/proc/self/fd")
    assert remove_stale(tmp_path) == 0
    assert os.listdir("/proc/self/fd") == before
    (tmp_path / "socket").rmdir()
    Listener(tmp_path / "socket").close()


def test_a_look_for_the_dead_takes_no_place(tmp_path: Path) -> None:
    """One who looks just then whether a socket's owner has died makes nobody fail who is about to listen there."""
    path = tmp_path / "socket"
    held = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    tries: list[str] = []

    def look_on(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name == "_take_lock":
            tries.append(event)
            if len(tries) == 3:
                os.close(held)

    sys.setprofile(look_on)
    try:
        listener = Listener(path)
    finally:
        sys.setprofile(None)
    assert len(tries) == 3
    with pytest.raises(remap.InUseError, match="live process"):
        Listener(path)
    listener.close()


def test_a_file_that_is_no_socket_is_kept(tmp_path: Path) -> None:
    """A file of another kind at the path is not removed, and the lock is given back."""
    path = tmp_path / "notes"
    path.write_text("important")
    for _ in range(2):
        with pytest.raises(remap.InvalidValueError, match="another kind"):
            Listener(path)
    assert path.read_text() == "important"


AS_ANOTHER_USER = """
import os, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.setuid(65534)
try:
    link.connect(sys.argv[1])
    link.settimeout(30)
    link.send(b"\\0\\0\\0\\0hello")
    print(repr(link.recv(100)))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("open_to_all", [False, True])
def test_another_user_is_refused(tmp_path: Path, open_to_all: bool) -> None:
    """Another user cannot connect; and where the modes were opened up, is cut off by its user id (trap 29)."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "s"
        with Listener(path) as listener:
            if open_to_all:
                Path(directory).chmod(0o777)
                path.chmod(0o777)
            with subprocess.Popen(
                [sys.executable, "-c", AS_ANOTHER_USER, str(path)], stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout is not None
                found: list[object] = []
                while process.poll() is None:
                    found.append(listener.accept())
                said = process.stdout.read().strip()
            assert not any(found), "no connection of another user is given out"
    assert said in (
        {"b''", "ConnectionResetError", "BrokenPipeError"} if open_to_all else {"PermissionError"}
    )
    del tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_server_is_not_trusted() -> None:
    """A client hands nothing to a socket that another user's process listens at."""
    listen = """
import os, socket, sys
os.setuid(65534)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(sys.argv[1]); server.listen(); print("listening", flush=True); sys.stdin.read()
"""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        path = Path(directory) / "s"
        with subprocess.Popen(
            [sys.executable, "-c", listen, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(remap.ShareError, match="user 65534"):
                connect(path, deadline=soon())


def test_a_fork_closes_its_copies(tmp_path: Path) -> None:
    """A forked child holds no descriptor, connection or lock of its parent (invariant 10, trap 44)."""
    listener = Listener(tmp_path / "s")
    with Fds([os.memfd_create("forked")]) as fds, connect(tmp_path / "s", deadline=soon()) as channel:
        theirs = listener.accept()
        assert theirs is not None
        numbers = [*fds.numbers, channel.fileno(), theirs.fileno(), listener.fileno()]
        child = os.fork()
        if not child:
            open_still = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]
            os._exit(len(open_still))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert all(os.path.exists(f"/proc/self/fd/{number}") for number in numbers)
        theirs.close()
    listener.close()


OUTLIVES_ITS_MODULE = """
import abc, os
from remap.sharing.channel import Fds
abc.kept = Fds([os.open("/dev/null", os.O_RDONLY)])  # a module that loses its names later than those of remap do
"""


def test_the_end_of_the_interpreter_is_silent() -> None:
    """Descriptors collected when modules have lost their names say nothing: they end with the process."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OUTLIVES_ITS_MODULE],
        check=True,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.stdout, done.stderr) == ("", "")
