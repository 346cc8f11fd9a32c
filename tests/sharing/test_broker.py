"""The broker: named buffers that outlive their users, one writer or many readers, and restarts that keep everything."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import remap
from remap import MiB
from remap.sharing.channel import Channel, Fds
from remap.sharing.descriptor import Descriptor, SharedChunk
from remap.sharing.fdstore import FdStore
from remap.sharing.sockets import connect as connect_channel
from remap.sharing.wire import Fields, encode
from remap.testing.bench import wait_until
from remap.types import Access, HandleType, Location, LocationKind

from . import roles
from .support import COMMAND, LIMIT, BrokerProcess, Child, ServiceManager
from .test_channel import soon

SIZE = 4 * MiB


def test_create_and_open(broker: BrokerProcess, nothing_left: None) -> None:
    """What is created under a name is opened by it, with the right asked for, and dropped."""
    del nothing_left
    with remap.connect(broker.path) as client:
        with client.create("weights", SIZE - 100, resident=0) as made:
            assert made.size == SIZE
            made.fill(7)
        with client.open("weights") as first, client.open("weights") as second:
            assert (first.to_host() == 7).all()
            assert first.identity == second.identity == made.identity
            with pytest.raises(remap.AccessError, match=r'client\.open\("weights", access="rw"\)'):
                first.fill(1)
        with client.open("weights", access="rw") as writer:
            writer.fill(8)
        client.drop("weights")
        with pytest.raises(remap.BufferNotFoundError, match="none of that name"):
            client.open("weights")
        with pytest.raises(LookupError, match="none of that name"):
            client.drop("weights")


@pytest.mark.two_devices
def test_a_right_for_each_location(broker: BrokerProcess, nothing_left: None) -> None:
    """A client takes a right for each location as allocations do; whoever gets "rw" for one of them is a writer."""
    del nothing_left
    both = (remap.device(0), remap.device(1))
    with remap.connect(broker.path) as client:
        with client.create("weights", SIZE, resident=0, access={0: "rw", 1: "r"}) as made:
            assert [made.get_access(at) for at in both] == ["rw", "r"]
        with client.open("weights", access={1: "r"}) as reader, client.open("weights"):
            assert [reader.get_access(at) for at in both] == ["none", "r"]
            with pytest.raises(remap.InUseError, match="for reading"):
                client.open("weights", access={0: "r", 1: "rw"})
        client.drop("weights")


def test_it_outlives_its_users(broker: BrokerProcess, nothing_left: None) -> None:
    """Weights live on when every worker that used them was killed, and are mapped again where they were (T14)."""
    del nothing_left
    with remap.connect(broker.path) as client:
        with client.create("weights", SIZE, resident=0) as made:
            made.fill(9)
            address = made.address
        workers = [Child(roles.worker, str(broker.path), "weights", "r", True) for _ in range(3)]
        for worker in workers:
            assert worker.hear() == (9, 9, address)
        assert client.list()[0].open == 3
        for worker in workers:
            worker.kill()
            worker.link.close()
        # The kernel closes the connections of the dead; the broker notices without being asked.
        with client.open("weights", access="rw", same_address=True, wait=LIMIT) as successor:
            assert successor.address == address
            assert (successor.to_host() == 9).all()
        client.drop("weights")


def test_one_writer_or_many_readers(broker: BrokerProcess) -> None:
    """A writer keeps readers out, readers keep a writer out, and each is told who is there."""
    with remap.connect(broker.path) as client, remap.connect(broker.path) as other:
        made = client.create("a", SIZE, resident=0)
        for access in ("r", "rw"):
            with pytest.raises(remap.InUseError, match=f"process {os.getpid()} has it open for writing"):
                other.open("a", access=access)
        made.close()
        first, second = other.open("a"), client.open("a")
        with pytest.raises(remap.InUseError, match=f"process {os.getpid()} has it open for reading"):
            other.open("a", access="rw")
        first.close()
        second.close()
        other.open("a", access="rw").close()
        (entry,) = client.list()
        assert (entry.name, entry.size, entry.chunks, entry.open, entry.writer) == ("a", SIZE, 1, 0, None)
        assert entry.identity == made.identity


def test_a_dead_writer_counts_no_longer(broker: BrokerProcess) -> None:
    """When a client is killed, what it had open is free at once for those who wait."""
    with remap.connect(broker.path) as client:
        client.create("a", SIZE, resident=0, poison=True).close()
        with Child(roles.worker, str(broker.path), "a", "rw", False) as worker:
            worker.hear()
            worker.tell(5)
            assert worker.hear() == "written"
            with pytest.raises(remap.InUseError):
                client.open("a")
            worker.kill()
            with client.open("a", wait=LIMIT) as reader:
                assert (reader.to_host() == 5).all()


def test_waiting(broker: BrokerProcess) -> None:
    """A client waits for a name that does not exist yet, and for a writer to leave; other threads go on meanwhile."""
    with remap.connect(broker.path) as client:
        seen: list[int] = []

        def read() -> None:
            with client.open("later", wait=LIMIT) as buffer:
                seen.append(int(buffer.to_host()[0]))

        thread = threading.Thread(target=read)
        thread.start()
        assert wait_until(lambda: client.status().waiting == 1)
        with client.create("later", SIZE, resident=0) as made:
            assert wait_until(lambda: client.status().waiting == 1), "for the writer, now"
            made.fill(4)
        thread.join(LIMIT)
        assert seen == [4]
        for limit in (0.05, 0.15):  # the broker waits by itself, or the client asks it to
            with pytest.raises(remap.BufferNotFoundError, match="nobody has created it"):
                client.open("never", wait=limit)
        with pytest.raises(remap.BufferNotFoundError, match="nobody has created it"):
            client.wait("never", timeout=0.05)
        with (
            client.create("held", SIZE, resident=0),
            pytest.raises(remap.InUseError, match=r"others had it open|open for writing"),
        ):
            client.open("held", wait=0.05)
        client.wait("held")
        client.wait("held", access="rw")


def test_the_name_is_taken(broker: BrokerProcess, nothing_left: None) -> None:
    """A second buffer of a name is refused, and leaves nothing; a dropped name is free while others still map it."""
    del nothing_left
    with remap.connect(broker.path) as client:
        made = client.create("a", SIZE, resident=0)
        with pytest.raises(remap.InUseError, match=r"one of that name.*Open it"):
            client.create("a", SIZE, resident=0)
        said = rf'drop of buffer "a": process {os.getpid()} has it open for writing.*force=True'
        with pytest.raises(remap.InUseError, match=said):
            client.drop("a")
        client.drop("a", force=True)
        made.fill(2)
        with client.create("a", SIZE, resident=0) as again:
            assert again.identity != made.identity
            assert (made.to_host() == 2).all()
        made.close()
        client.drop("a")


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\ud800"])
def test_names_that_are_none(broker: BrokerProcess, name: str) -> None:
    """Empty, long and unprintable names are refused on both sides."""
    with remap.connect(broker.path) as client:
        for act in (client.open, client.drop, client.wait, lambda name: client.create(name, SIZE)):
            with pytest.raises(remap.InvalidValueError):
                act(name)
    with connect_channel(broker.path, deadline=soon()) as channel:
        assert "error" in ask(channel, {"op": "wait", "name": name, "timeout": 0})


def test_put(broker: BrokerProcess) -> None:
    """A buffer that exists, or a part of it, is put into the broker and stays usable here."""
    with (
        remap.connect(broker.path) as client,
        remap.allocate(SIZE, resident=0, shareable="posix_fd") as buffer,
    ):
        buffer.copy_from_host(np.arange(SIZE // 4, dtype=np.uint32))
        client.put("part", buffer, offset=400, size=40)
        with client.open("part") as part:
            assert part.to_host("uint32").tolist() == list(range(100, 110))
        client.put("part", buffer, offset=400, size=40)  # as one does who did not hear the answer
        with pytest.raises(remap.InUseError, match="one of that name"):
            client.put("part", buffer, offset=440, size=40)
        with pytest.raises(remap.InUseError, match="detach"):
            remap.pause(buffer)
        said = r'it has no shareable handle.*shareable="posix_fd"'
        with remap.allocate(SIZE, resident=0) as private, pytest.raises(remap.ShareError, match=said):
            client.put("private", private)
        client.put("nothing", buffer, size=0)
        with client.open("nothing") as nothing:
            assert nothing.size == 0


def test_a_failing_open_leaves_no_lease(broker: BrokerProcess) -> None:
    """If the memory cannot be mapped, the broker has it free again."""
    with remap.connect(broker.path) as client:
        made = client.create("a", SIZE, resident=0)
        address = made.address
        made.close()
        with remap.reserve(SIZE, hint=address) as taken:
            assert taken.address == address
            with pytest.raises(
                remap.ShareError, match=f"something else.*: {taken.describe().kind} {taken.serial} "
            ) as caught:
                client.open("a", access="rw", same_address=True)
            assert not isinstance(caught.value, LookupError)
        client.open("a", access="rw", same_address=True).close()


def test_closing_the_connection(broker: BrokerProcess) -> None:
    """A connection with open buffers refuses to close and names them; closed, it says so when used."""
    client = remap.connect(broker.path)
    made = client.create("a", SIZE, resident=0)
    with pytest.raises(remap.InUseError, match='"a"'):
        client.close()
    made.close()
    client.close()
    client.close()
    with pytest.raises(remap.ClosedError):
        client.list()
    with pytest.raises(remap.ShareError, match="remap serve"):
        remap.connect(broker.path.with_name("nowhere"))


def test_many_names(broker: BrokerProcess) -> None:
    """A list of more buffers than one answer holds is whole and in order, also of the longest names there are."""
    with (
        remap.connect(broker.path) as client,
        remap.allocate(SIZE, resident=0, shareable="posix_fd") as buffer,
    ):
        names = sorted(f"{index:03}" + "\N{FLOPPY DISK}" * (index % 2 * 197) for index in range(250))
        for name in names:
            client.put(name, buffer, size=1)
        assert [one.name for one in client.list()] == names
        assert client.status().buffers == 250


def test_an_address_that_others_have_free(broker: BrokerProcess) -> None:
    """What is created lies where no system puts libraries or stacks, so that successors can have it there, too."""
    if remap.driver().name != "host" or platform.machine() != "x86_64":
        pytest.skip("where addresses are free is known of Linux on x86-64 alone")
    with (
        remap.connect(broker.path) as client,
        client.create("a", SIZE, resident=0) as first,
        client.create("b", SIZE, resident=0) as second,
    ):
        assert first.address != second.address
        for one in (first, second):
            assert 0x2000_0000_0000 <= one.address < 0x4000_0000_0000


def test_what_is_created_in_turn_can_be_open_together(broker: BrokerProcess) -> None:
    """Buffers that a client creates and closes one after the other have addresses of their own."""
    names = [str(number) for number in range(5)]
    with remap.connect(broker.path) as client, ExitStack() as stack:
        made: list[int] = []
        for name in names:
            with client.create(name, SIZE, resident=0) as buffer:
                made.append(buffer.address)
        found = [stack.enter_context(client.open(name, same_address=True)) for name in names]
        assert [one.address for one in found] == made


def test_what_was_put_from_one_address(broker: BrokerProcess) -> None:
    """Two buffers that lay at one address cannot be open there together: the error names the one, and the cause."""
    with remap.connect(broker.path) as client:
        with remap.reserve(SIZE, hint=0x3000_0000_0000) as place:
            for name in "ab":
                with (
                    remap.create(SIZE, at=0, shareable="posix_fd") as memory,
                    place.map(memory, access={0: "rw"}) as mapping,
                ):
                    client.put(name, mapping)
        with (
            client.open("a", same_address=True) as first,
            pytest.raises(remap.ShareError, match=f"{first.describe().kind}.*Both were made at that address"),
        ):
            client.open("b", same_address=True)


SHORT = """
import os, resource, sys
import remap
client = remap.connect(sys.argv[1])
client.open("a").close()
whole = resource.getrlimit(resource.RLIMIT_NOFILE)
highest = max(int(name) for name in os.listdir("/proc/self/fd"))
fillers = []
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, whole[1]))
try:
    while True:
        fillers.append(os.dup(0))
except OSError:
    pass
try:
    client.open("a", access="rw")
except remap.ShareError as error:
    print("ulimit -n" in str(error))
for number in fillers:
    os.close(number)
print(client.list()[0].open, client.status().clients)
client.open("a", access="rw").close()
client.close()
"""


def test_a_client_out_of_descriptors(broker: BrokerProcess) -> None:
    """A client that can open no more files is told so, has nothing open then, and goes on when it can again."""
    with remap.connect(broker.path) as client, client.create("a", SIZE, resident=0):
        pass
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SHORT, str(broker.path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env=os.environ,
    )
    assert (done.stdout, done.stderr) == ("True\n0 1\n", "")


# -- hostile clients --


def ask(channel: Channel, fields: dict[str, object], blob: bytes = b"", fds: tuple[int, ...] = ()) -> str:
    """Send a request that a client of ours would not, and return the answer as text."""
    channel.send(encode(fields, blob), fds, deadline=soon())
    answer, got = channel.receive(deadline=soon())
    got.close()
    return answer.decode()


MALFORMED: tuple[bytes, ...] = (
    b"",
    b"\0",
    b"{}",
    b"[]\0",
    b"null\0",
    b'{"op": 5}\0',
    b'{"op": "open"}\0',
    b'{"op": "open", "name": ["a"], "access": "r"}\0',
    b'{"op": "open", "name": "a", "access": "x"}\0',
    b'{"op": "wait", "name": "a", "timeout": NaN}\0',
    b'{"op": "wait", "name": "a", "timeout": 1e999}\0',
    b'{"op": "wait", "name": "a", "timeout": -1}\0',
    b'{"op": "release", "lease": true}\0',
    b'{"op": "release", "lease": 1}\0',
    b'{"op": "list", "after": 1}\0',
    b'{"op": "create", "name": "b"}\0',
    b'{"op": "create", "name": "b"}\0remapmem',
    b'{"op": "hello", "version": 99}\0',
    b'{"op": "' + b"x" * 2000 + b'"}\0',
    b"[" * 50_000,
    b'{"a":' * 10_000,
    b"\xff\xfe\0",
    b'{"op": "unknown"}\0' + b"x" * 100_000,
)


def test_malformed_requests(broker: BrokerProcess) -> None:
    """Whatever a client sends, it gets an error or is cut off, and everybody else is served (invariant 11, trap 31)."""
    with remap.connect(broker.path) as client:
        client.create("a", SIZE, resident=0).close()
        idle = broker.fds()
        for message in MALFORMED:
            with connect_channel(broker.path, deadline=soon()) as channel, Fds([os.memfd_create("x")]) as fds:
                channel.send(message, fds.numbers, deadline=soon())
                try:
                    answer, got = channel.receive(deadline=soon())
                    got.close()
                    assert "error" in Fields.decode(answer)._values, message[:60]
                except (EOFError, ConnectionError):
                    pass
            client.open("a").close()
        assert wait_until(lambda: broker.fds() == idle)


@pytest.mark.parametrize("what", ["directory", "pipe", "socket", "small", "too many", "none"])
def test_descriptors_that_are_no_memory(broker: BrokerProcess, what: str) -> None:
    """The broker keeps nothing that could not be memory of the size that is claimed."""
    with (
        remap.connect(broker.path) as client,
        remap.allocate(SIZE, resident=0, shareable="posix_fd") as buffer,
    ):
        idle = broker.fds()
        with remap.export(buffer) as exported:
            descriptor = exported.descriptor.to_bytes()
            handles = exported.handles()
        assert isinstance(handles, Fds)
        with handles, Fds() as wrong:
            if what == "directory":
                wrong.add(os.open("/", os.O_RDONLY))
            elif what == "pipe":
                for number in os.pipe():
                    wrong.add(number)
            elif what == "socket":
                wrong.take(Fds([os.dup(client._link._channel.fileno() if client._link._channel else -1)]))
            elif what == "small":
                wrong.add(os.memfd_create("small"))
            elif what == "too many":
                wrong.take(handles.duplicate())
                wrong.take(handles.duplicate())
            numbers = wrong.numbers[: 2 if what == "too many" else 1]
            if what == "small" and remap.driver().name == "cuda":
                pytest.skip("descriptors of CUDA memory do not tell its size")
            with connect_channel(broker.path, deadline=soon()) as channel:
                answer = ask(channel, {"op": "create", "name": "b"}, descriptor, tuple(numbers))
            assert "DescriptorError" in answer
        assert client.list() == ()
        assert wait_until(lambda: broker.fds() == idle)


def test_a_slow_client_stops_nobody(broker: BrokerProcess) -> None:
    """Clients that send half a message, never read, or only connect, hold up nobody else."""
    with remap.connect(broker.path) as client:
        client.create("a", SIZE, resident=0).close()
        half = connect_channel(broker.path, deadline=soon())
        half.send_packet((4).to_bytes(4, "big") + encode({"op": "create"}), (), deadline=soon())
        silent = [connect_channel(broker.path, deadline=soon()) for _ in range(20)]
        deaf = connect_channel(broker.path, deadline=soon())
        try:
            while True:  # never reads: its answers fill the socket, and the broker lets it go
                deaf.send(encode({"op": "status"}), deadline=soon())
        except OSError:
            pass
        for _ in range(20):
            client.open("a").close()
        assert client.status().clients == 1 + 1 + len(silent)
        for channel in (half, deaf, *silent):
            channel.close()
        assert wait_until(lambda: client.status().clients == 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_client_of_another_user() -> None:
    """A client of another user id is refused, even where every mode lets it in (trap 29)."""
    script = """
import os, sys
import remap
from remap.sharing.client import connect  # loaded while it can be read
os.setgid(65534); os.setuid(65534)
assert os.access(sys.argv[1], os.W_OK)
try:
    connect(sys.argv[1], timeout=20)
except remap.ShareError as error:
    print("refused")
"""
    # Not below tmp_path, which pytest closes to others again whenever another of its runs begins.
    with tempfile.TemporaryDirectory() as directory, BrokerProcess(Path(directory) / "broker") as broker:
        Path(directory).chmod(0o711)
        broker.path.chmod(0o777)
        done = subprocess.run(
            [*COMMAND[:3], "-c", script, str(broker.path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
        )
        assert (done.stdout, done.stderr) == ("refused\n", "")
        with remap.connect(broker.path) as client:
            assert client.status().clients == 1


# -- stopping and starting --


def test_an_orderly_end(broker: BrokerProcess) -> None:
    """SIGTERM ends the broker with status 0, its socket goes, and what is mapped lives on (B5)."""
    with remap.connect(broker.path) as client:
        buffer = client.create("a", SIZE, resident=0)
        assert broker.stop() == (0, "")
        assert not broker.path.exists()
        buffer.fill(3)
        assert (buffer.to_host() == 3).all()
        buffer.close()
    with pytest.raises(remap.ShareError, match="remap serve"):
        remap.connect(broker.path)


def test_a_second_broker_is_refused(broker: BrokerProcess) -> None:
    """Two brokers cannot share a path; the first goes on."""
    done = subprocess.run(
        [*COMMAND, "serve", "--path", str(broker.path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert done.returncode == 1
    assert "live process listens" in done.stderr
    remap.connect(broker.path).close()


def test_killed_and_started_anew(broker: BrokerProcess) -> None:
    """A broker that was killed is started at the same path; clients connect again, and keep what they have open."""
    with remap.connect(broker.path) as client:
        buffer = client.create("a", SIZE, resident=0)
        buffer.fill(6)
        broker.kill()
        assert (buffer.to_host() == 6).all()
        broker.start()
        with pytest.warns(remap.RemapWarning, match='"a" is open here'):
            assert client.list() == ()
        client.put("a", buffer)
        with client.open("a") as other:
            assert (other.to_host() == 6).all()
        buffer.close()


def test_a_restart_while_somebody_waits(broker: BrokerProcess) -> None:
    """Who waits for a buffer goes on waiting at the broker that is started anew; with none it ends with an error."""
    with (
        remap.connect(broker.path) as client,
        remap.connect(broker.path, timeout=0.3) as hasty,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(client.open, "later", wait=LIMIT)
        assert wait_until(lambda: hasty.status().waiting == 1)
        broker.kill()
        broker.start()
        assert wait_until(lambda: hasty.status().waiting == 1)
        hasty.create("later", SIZE, resident=0).close()
        waiting.result(LIMIT).close()
        lost = pool.submit(hasty.wait, "never", timeout=LIMIT)
        assert wait_until(lambda: client.status().waiting == 1)
        broker.kill()
        with pytest.raises(remap.ShareError, match="remap serve"):
            lost.result(LIMIT)


def test_no_broker_any_more(broker: BrokerProcess) -> None:
    """Without a broker a request ends in its time with an error; what is open can still be closed."""
    client = remap.connect(broker.path, timeout=0.3)
    buffer = client.create("a", SIZE, resident=0)
    broker.kill()
    with pytest.raises(remap.ShareError):
        client.list()
    buffer.close()
    client.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_under_a_service_manager(tmp_path: Path, nothing_left: None, how: signal.Signals) -> None:
    """Under a service manager a restart, however the broker ended, keeps every buffer and what clients have open."""
    del nothing_left
    with ServiceManager(tmp_path / "notify") as manager, manager.run(tmp_path / "broker") as first:
        assert wait_until(lambda: any("READY=1" in one for one in manager.said))
        client = remap.connect(first.path)
        client.create("a", SIZE, resident=0, poison=True).close()
        with client.create("dropped", SIZE, resident=0):
            pass
        client.drop("dropped")
        assert client.status().survives_restart
        held = client.open("a", same_address=True)
        address, identity = held.address, held.identity
        assert wait_until(lambda: len(manager.store) == 2), manager.store
        first.process.send_signal(how)
        first.process.wait(LIMIT)
        with manager.run(tmp_path / "broker") as second:
            assert second.path == first.path
            (entry,) = client.list()
            assert (entry.name, entry.identity, entry.open) == ("a", identity, 1)
            with pytest.raises(remap.InUseError):
                client.open("a", access="rw")
            held.close()
            with client.open("a", access="rw", same_address=True) as again:
                assert again.address == address
                assert (again.to_host() == 0xCB).all()
            client.drop("a")
            assert wait_until(lambda: not manager.store), manager.store
            client.close()


class Deaf(FdStore):
    """A store whose manager takes the first `takes` messages, and then one that says what to forget."""

    def __init__(self, takes: int) -> None:
        super().__init__({"NOTIFY_SOCKET": "somewhere"})
        self.takes = takes
        self.said: list[str] = []

    def tell(self, *lines: str, fds: Sequence[int] = ()) -> None:
        if fds and len(self.said) >= self.takes:
            raise TimeoutError("the manager takes nothing")
        self.said.append(lines[0] + " " + lines[1])


@pytest.mark.parametrize("takes", [0, 1, 2])
def test_a_store_that_takes_half(takes: int) -> None:
    """What the service manager has of a buffer that it did not take whole, it is told to forget."""
    chunk = SharedChunk(SIZE, Location(LocationKind.DEVICE))
    descriptor = Descriptor("host", HandleType.POSIX_FD, (chunk, chunk), 0, SIZE + 1, Access.READ, bytes(16))
    store = Deaf(takes)
    with Fds([os.memfd_create("a"), os.memfd_create("b")]) as fds, pytest.raises(TimeoutError):
        store.keep("key", "name", descriptor, fds)
    forgotten = [f"FDSTOREREMOVE=1 FDNAME=key.{part}" for part in ("record", 0, 1)]
    assert store.said == [*(f"FDSTORE=1 FDNAME=key.{part}" for part in range(takes)), *forgotten]


def test_what_the_store_has_of_no_buffer(tmp_path: Path) -> None:
    """Descriptors in the store that make no whole buffer are given up, and the broker serves."""
    with ServiceManager(tmp_path / "notify") as manager:
        record = os.memfd_create("record")
        os.write(record, b"remapfds\x01\x00anonsense")
        manager.store = {"x.0": os.memfd_create("x"), "y.record": record, "z": os.open("/", os.O_RDONLY)}
        with manager.run(tmp_path / "broker") as broker, remap.connect(broker.path) as client:
            assert client.list() == ()
            assert wait_until(lambda: "x.0" not in manager.store)


def test_status_on_the_command_line(broker: BrokerProcess) -> None:
    """`remap serve --status` shows what is kept and who has it open; without a broker it is an error."""
    command = [*COMMAND, "serve", "--status", "--path", str(broker.path)]
    with remap.connect(broker.path) as client, client.create("weights", SIZE, resident=0):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"weights: 4 MiB on device 0; written by {os.getpid()}" in done.stdout
        assert "1 buffer, 4 MiB" in done.stdout
    broker.kill()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 1
    assert "remap serve" in done.stderr
