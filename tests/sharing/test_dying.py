"""When a client that was killed counts no longer: at once on the host, on a device when its process has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import remap
from remap import MiB
from remap.sharing.channel import Fds
from remap.sharing.descriptor import Descriptor, SharedChunk
from remap.sharing.processes import descriptor_of_end, is_exiting
from remap.sharing.sockets import connect as connect_channel
from remap.sharing.wire import Fields, encode
from remap.testing.bench import wait_until
from remap.types import Access, HandleType, Location, LocationKind

from . import roles
from .support import LIMIT, BrokerProcess, Child
from .test_broker import ask
from .test_channel import soon

SIZE = 4 * MiB


@contextmanager
def program(text: str) -> Generator[subprocess.Popen[bytes]]:
    """Run a program that says when it is ready; it is not waited for before the block ends."""
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


WAITING = "import sys; print('ready', flush=True); sys.stdin.read()"
NAMED = "open('/proc/self/comm', 'w').write('a) Z (4 4');" + WAITING
MAIN_THREAD_ENDS = """
import ctypes, sys, threading
threading.Thread(target=lambda: (print('ready', flush=True), sys.stdin.read())).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("text", [WAITING, NAMED, MAIN_THREAD_ENDS])
def test_a_process_that_lives_is_not_exiting(text: str) -> None:
    """A process exits when all its threads do, whatever its name; killed, it does even before anybody waits for it."""
    with program(text) as process:
        if text is MAIN_THREAD_ENDS:
            stat = Path(f"/proc/{process.pid}/stat")
            assert wait_until(lambda: stat.read_bytes().rpartition(b") ")[2][:1] == b"Z")
        assert not is_exiting(process.pid)
        assert descriptor_of_end(process.pid) is None
        process.kill()
        assert wait_until(lambda: is_exiting(process.pid))
        end = descriptor_of_end(process.pid)
        assert end is not None
        with Fds([end]):
            assert os.waitid(os.P_PIDFD, end, os.WEXITED | os.WNOWAIT) is not None
    assert is_exiting(process.pid), "nobody has this number now"
    assert descriptor_of_end(process.pid) is None


@pytest.mark.parametrize("process", [0, -1, 1, os.getpid()], ids=["0", "-1", "1", "this"])
def test_what_cannot_be_told_is_no_end(process: int) -> None:
    """For a process of another container (its number is 0), and for one that lives, the connection has to end."""
    assert not is_exiting(process)


@pytest.mark.parametrize("access", ["r", "rw"])
def test_nobody_waits_for_what_the_dead_have_open(broker: BrokerProcess, access: str) -> None:
    """What a killed process had open is free while its connection is open still (it ends after all its memory went)."""
    if remap.driver().name != "host":
        pytest.skip("on a device the end of the process is waited for, as its work goes on until then")
    with remap.connect(broker.path) as client:
        client.create("a", SIZE, resident=0).close()
        with Child(roles.connected, str(broker.path), "a", access) as worker, Fds() as kept:
            kept.add(worker.hear().detach())  # so that its connection outlives it
            with pytest.raises(remap.InUseError):
                client.open("a", access="rw")
            waiting = Child(roles.worker, str(broker.path), "a", "rw", False)
            assert wait_until(lambda: client.status().waiting == 1)
            worker.kill()
            waiting.hear()
            waiting.tell("end")
            assert waiting.hear() == "closed"
            waiting.end()
        with Child(roles.connected, str(broker.path), "a", access) as worker, Fds() as kept:
            kept.add(worker.hear().detach())
            worker.kill()
            client.drop("a")


@pytest.mark.parametrize("last", ["create", "release"])
def test_who_waits_hears_of_the_last_words_of_a_client(broker: BrokerProcess, last: str) -> None:
    """A client that dies before the answer to its last request has made its change: whoever waits for it goes on."""
    with (
        remap.connect(broker.path) as client,
        remap.allocate(SIZE, resident=0, shareable="posix_fd") as buffer,
        connect_channel(broker.path, deadline=soon()) as dying,
        remap.export(buffer) as exported,
    ):
        request: dict[str, object] = {"op": "create", "name": "a"}
        if last == "release":
            client.put("a", buffer)
            dying.send(encode({"op": "open", "name": "a", "access": "rw"}), deadline=soon())
            answer, got = dying.receive(deadline=soon())
            got.close()
            request = {"op": "release", "lease": Fields.decode(answer).number("lease", 1 << 53)}
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(client.wait, "a", access="r", timeout=LIMIT / 2)
            assert wait_until(lambda: client.status().waiting == 1)
            handles = exported.handles()
            assert isinstance(handles, Fds)
            with broker.stopped(), handles:
                blob, fds = (
                    (exported.descriptor.to_bytes(), handles.numbers) if last == "create" else (b"", ())
                )
                dying.send(encode(request, blob), fds, deadline=soon())
                dying.close()
            waiting.result(LIMIT)


REPEATING = """
import sys, time
from pathlib import Path
from remap.sharing.sockets import connect
from remap.sharing.wire import encode
soon = time.monotonic() + 60
link = connect(Path(sys.argv[1]), deadline=soon)
request = encode({"op": "open", "name": "a", "access": "rw"})
link.send(request, deadline=soon)
link.receive(deadline=soon)
print("open", flush=True)
sys.stdin.readline()
link.send(request, deadline=soon)
print("asked again", flush=True)
sys.stdin.readline()
"""


def test_the_dead_are_given_nothing(broker: BrokerProcess) -> None:
    """A client that is killed as it asks for what it has open itself leaves the buffer free for others."""
    with remap.connect(broker.path) as client:
        client.create("a", SIZE, resident=0).close()
        command = [sys.executable, "-c", REPEATING, str(broker.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as dying:
            assert dying.stdin is not None
            assert dying.stdout is not None
            assert dying.stdout.readline() == b"open\n"
            with broker.stopped():
                dying.stdin.write(b"again\n")
                dying.stdin.flush()
                assert dying.stdout.readline() == b"asked again\n"
                dying.kill()
                assert wait_until(lambda: is_exiting(dying.pid))
        with client.open("a", wait=LIMIT / 2):
            assert client.list()[0].open == 1


MAKER = """
import os, sys, time
from pathlib import Path
from remap.sharing.sockets import connect
from remap.sharing.wire import encode
soon = time.monotonic() + 60
link = connect(Path(sys.argv[1]), deadline=soon)
memory = os.memfd_create("memory")
link.send(encode({"op": "create", "name": "a", "hold": True}, bytes.fromhex(sys.argv[2])), [memory], deadline=soon)
link.receive(deadline=soon)
print("ready", flush=True)
if sys.stdin.readline():
    link.close()
    print("closed", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_memory_of_a_device(broker: BrokerProcess, killed: bool) -> None:
    """A writer on a device counts until its process has ended, as its kernels may run so long; or until it closes."""
    descriptor = Descriptor(
        driver="cuda",
        kind=HandleType.POSIX_FD,
        chunks=(SharedChunk(SIZE, Location(LocationKind.DEVICE)),),
        offset=0,
        size=SIZE,
        access=Access.READ_WRITE,
        identity=bytes(16),
    )
    command = [sys.executable, "-c", MAKER, str(broker.path), descriptor.to_bytes().hex()]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        connect_channel(broker.path, deadline=soon()) as channel,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert "InUseError" in ask(channel, {"op": "open", "name": "a", "access": "r"})
        idle = broker.fds()
        if killed:
            os.kill(process.pid, signal.SIGKILL)
        else:
            process.stdin.write(b"close\n")
            process.stdin.flush()
        answer = ask(channel, {"op": "wait", "name": "a", "access": "rw", "timeout": LIMIT})
        assert "error" not in answer
        assert "error" not in ask(channel, {"op": "drop", "name": "a"})
        process.kill()
    assert wait_until(lambda: broker.fds() == idle - 3), "two connections and the memory"
