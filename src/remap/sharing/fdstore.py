"""What a broker leaves with the service manager, so that a restart keeps everything: systemd's file descriptor store.

A service that systemd started with `FileDescriptorStoreMax=` can hand it descriptors, which it holds while the service
is down and passes to its next start (sd_notify(3), `FDSTORE=1`; sd_listen_fds(3)). Each named buffer leaves its own,
and last a small sealed memory file with its name and descriptor: without that the rest is not taken up again, so a
broker that died in between leaves nothing half.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from remap.errors import RemapError
from remap.sharing.channel import MOST_FDS, Fds
from remap.sharing.descriptor import Descriptor
from remap.sharing.wire import check_name

_FIRST = 3  # SD_LISTEN_FDS_START
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, SHRINK, GROW, WRITE
_ADD_SEALS = 1033
_PATIENCE = 2.0
_RECORD = struct.Struct("<8sH")
_MAGIC = b"remapfds"


@dataclass(frozen=True, slots=True)
class Kept:
    """A named buffer that was left in the store: its key there, and what the broker knew of it."""

    key: str
    name: str
    descriptor: Descriptor
    fds: Fds


class FdStore:
    """The service manager's store; without one (`NOTIFY_SOCKET` is not set) every call does nothing."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]

    @property
    def present(self) -> bool:
        """Whether there is a service manager that listens."""
        return bool(self._address)

    def tell(self, *lines: str, fds: Sequence[int] = ()) -> None:
        """Send assignments such as `READY=1`; raises `OSError` if the manager does not take them."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
            link.settimeout(_PATIENCE)
            link.connect(self._address)
            message = "\n".join(lines).encode()
            if fds:
                socket.send_fds(link, [message], list(fds))
            else:
                link.send(message)

    def keep(self, key: str, name: str, descriptor: Descriptor, fds: Fds) -> None:
        """Leave a buffer in the store; raises `OSError`, and then nothing of it is taken up again."""
        if not self._address:
            return
        try:
            for index, number in enumerate(fds.numbers):
                self.tell("FDSTORE=1", f"FDNAME={key}.{index}", "FDPOLL=0", fds=[number])
            with Fds([_record(name, descriptor)]) as record:
                self.tell("FDSTORE=1", f"FDNAME={key}.record", "FDPOLL=0", fds=record.numbers)
        except OSError:
            with suppress(OSError):  # or the memory would stay until the next start
                self.forget(key, len(fds))
            raise

    def forget(self, key: str, count: int) -> None:
        """Take a buffer of `count` descriptors out of the store, its record first."""
        for part in ("record", *range(count)):
            self.tell("FDSTOREREMOVE=1", f"FDNAME={key}.{part}")


def restore(environment: Mapping[str, str]) -> tuple[list[Kept], list[str]]:
    """Return the buffers that an earlier run left in the store, and the names of descriptors that belong to none.

    Reads `LISTEN_FDS`, `LISTEN_FDNAMES` and `LISTEN_PID`, as systemd sets them. Call it once,
    before anything else opens descriptors.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return [], []
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    count = int(environment.get("LISTEN_FDS", "0"))
    given = dict(zip(names, range(_FIRST, _FIRST + count), strict=False))
    for number in range(_FIRST, _FIRST + count):
        with suppress(OSError):
            os.set_inheritable(number, False)
    kept: list[Kept] = []
    for record_name in [name for name in given if name.endswith(".record")]:
        key = record_name.removesuffix(".record")
        with Fds([given.pop(record_name)]) as record, suppress(RemapError, OSError, ValueError):
            name, descriptor = _read(record.numbers[0])
            parts = [f"{key}.{index}" for index in range(len(descriptor.chunks))]
            if all(part in given for part in parts):
                kept.append(Kept(key, name, descriptor, Fds([given.pop(part) for part in parts])))
    Fds(given.values()).close()
    return kept, sorted(given)


def _record(name: str, descriptor: Descriptor) -> int:
    """Return a sealed memory file with a buffer's name and descriptor."""
    number = os.memfd_create("remap record", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    encoded = name.encode()
    os.write(number, _RECORD.pack(_MAGIC, len(encoded)) + encoded + descriptor.to_bytes())
    import fcntl  # not on Windows

    fcntl.fcntl(number, _ADD_SEALS, _SEALS)
    return number


def _read(number: int) -> tuple[str, Descriptor]:
    data = os.pread(number, _RECORD.size + (1 << 16) + MOST_FDS * 16, 0)
    if len(data) < _RECORD.size:
        raise ValueError("the record is cut off")
    magic, length = _RECORD.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("this is no record")
    end = _RECORD.size + length
    return check_name(data[_RECORD.size : end].decode()), Descriptor.from_bytes(data[end:])
