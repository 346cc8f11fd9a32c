"""Mailboxes: what other processes put there is checked before anything is believed (invariant 11)."""

from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Callable, Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remap.drivers.host import HostDriver
from remap.drivers.host.mailbox import LARGEST, Box, _send
from remap.drivers.host.team import State
from remap.drivers.multicast_power import MulticastProperties
from remap.errors import DriverError
from remap.sizes import MiB
from remap.types import HandleType

pytestmark = pytest.mark.skipif(
    os.environ["REMAP_DRIVER"] != "host",
    reason="these are the host driver's own objects, and multicast is off here",
)

UNIT = 4 * MiB


@pytest.fixture(name="driver")
def _driver() -> Generator[HostDriver]:
    driver = HostDriver()
    yield driver
    driver.shutdown()


def own_peer(*letters: tuple[bytes, tuple[int, ...]]) -> int:
    """Return a socket that is its own peer and holds letters, as a mailbox does."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.bind(b"")
    made.connect(made.getsockname())
    for letter, fds in letters:
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        made.sendmsg([letter], beside)
    return made.detach()


def one_end(kind: int) -> int:
    """Return one end of a pair of sockets; the other is gone."""
    left, right = socket.socketpair(socket.AF_UNIX, kind)
    right.close()
    return left.detach()


def unsealed() -> int:
    """Return a mailbox whose lock file could shrink."""
    made = os.memfd_create("lock")
    os.ftruncate(made, 4096)
    fd = own_peer((b"remapbox" + bytes(16), (made,)))
    os.close(made)
    return fd


IMPOSTORS: dict[str, Callable[[], int]] = {
    "stream": lambda: one_end(socket.SOCK_STREAM),
    "datagram": lambda: one_end(socket.SOCK_DGRAM),
    "network": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach(),
    "unconnected": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach(),
    "empty": own_peer,
    "garbage": lambda: own_peer((b"garbage", ())),
    "no lock": lambda: own_peer((b"remapbox" + bytes(50), ())),
    "lock is a pipe": lambda: own_peer((b"remapbox" + bytes(50), os.pipe())),
    "lock unsealed": unsealed,
    "too long": lambda: own_peer((b"remapbox" * (LARGEST // 4), ())),
}


@pytest.mark.parametrize("kind", IMPOSTORS)
def test_impostors(driver: HostDriver, kind: str) -> None:
    """A descriptor that is no mailbox of ours is refused as CUDA refuses a foreign one, and nothing stays open."""
    fd = IMPOSTORS[kind]()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DriverError) as caught:
        driver.import_handle(fd, HandleType.POSIX_FD)
    assert caught.value.name == "CUDA_ERROR_UNKNOWN"
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


@given(st.binary(max_size=300), st.integers(0, 3))
def test_letters_are_hostile(letter: bytes, fds: int) -> None:
    """Whatever a letter says, it is a state that adds up or a `ValueError`."""
    try:
        state = State.unpack(letter, fds, 4096)
    except ValueError:
        return
    assert State.unpack(state.pack(), fds, 4096) == state


@given(st.integers(0, 70), st.integers(0, 1 << 64), st.integers(0, 1 << 33), st.integers(0, 1 << 33))
def test_heads_are_bounded(devices: int, size: int, added: int, bound: int) -> None:
    """A head that claims more than can be is refused before anything is made of it."""
    head = b"".join(
        number.to_bytes(width, "little")
        for number, width in (
            (devices % (1 << 32), 4),
            (1, 1),
            (size % (1 << 64), 8),
            (added % (1 << 32), 4),
            (bound % (1 << 32), 4),
        )
    )
    try:
        state = State.unpack(head, 0, 4096)
    except ValueError:
        return
    assert 1 <= state.properties.devices <= 64
    assert (state.members, state.bindings) == ((), ())


def test_a_writer_that_was_killed(driver: HostDriver) -> None:
    """A process killed between sending a letter and taking the old one out leaves a box that works on."""
    properties = MulticastProperties(2, UNIT, frozenset({HandleType.POSIX_FD}))
    handle = driver.create_multicast(properties)
    fd = driver.export_handle(handle, HandleType.POSIX_FD)
    assert isinstance(fd, int)
    box = Box.adopt(fd)
    letter, _ = box.read()
    left_behind = State(properties, State.unpack(letter, 0, 4096).members, ()).pack()
    _send(box._socket, b"remapbox" + bytes(16) + left_behind, (box._lock,))
    driver.add_multicast_device(handle, 0)
    driver.add_multicast_device(handle, 1)
    letter, _ = box.read()
    assert len(State.unpack(letter, 0, 4096).members) == 2
    box.close()
    os.close(fd)


def test_the_lock_is_everybodys() -> None:
    """Two holders of a box, and two threads of one, exclude each other."""
    box = Box.create()
    other = Box.adopt(box.fd)
    inside: list[str] = []
    with box.locked():
        threads = [threading.Thread(target=enter, args=(one, inside)) for one in (other, box)]
        for thread in threads:
            thread.start()
        threads[0].join(0.05)
        assert inside == []
    for thread in threads:
        thread.join(10)
    assert inside == ["in", "out"] * 2
    box.close()
    other.close()


def enter(box: Box, inside: list[str]) -> None:
    """Enter a box, and say so."""
    with box.locked():
        inside.append("in")
        inside.append("out")


def test_a_letter_is_replaced() -> None:
    """All holders read the latest letter, and see that it changed."""
    box = Box.create()
    other = Box.adopt(box.fd)
    version = other.version
    made = os.memfd_create("beside")
    os.write(made, b"here")
    with box.locked():
        box.write(b"one", ())
        box.write(b"two", (made,))
    os.close(made)
    letter, fds = other.read()
    assert (letter, [os.pread(fd, 9, 0) for fd in fds]) == (b"two", [b"here"])
    assert other.version == version + 2
    for fd in fds:
        os.close(fd)
    box.close()
    assert other.read()[0] == b"two"
    other.close()
    other.close()
