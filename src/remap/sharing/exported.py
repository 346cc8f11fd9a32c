"""`Exported`: memory on its way to other processes, and how it is fetched there."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn, Self, cast

from remap.errors import ClosedError, DescriptorError, ForkedError, ShareError
from remap.lifetime import epoch
from remap.sharing.channel import Fds, deadline_in
from remap.sharing.descriptor import FABRIC_BYTES, Descriptor
from remap.sharing.leases import LIMIT, TOKEN_BYTES, Lease, lease_path, lend
from remap.sharing.sockets import connect
from remap.types import HandleType

PATIENCE = 30.0
"""How many seconds an importer waits for the exporter to answer."""

_MAGIC = b"remaptkt"
# Magic, bytes of the path, token; then path, descriptor, fabric handles.
_TICKET = struct.Struct(f"<8sH{TOKEN_BYTES}s")


class Exported:
    """Memory on its way to other processes: what `export` returns, and what arrives there.

    It travels through everything that `multiprocessing` pickles (arguments of a process, queues, pipes, pools), with
    every start method. `to_bytes()` is for other channels, such as MPI. On the exporter's side it is a lease: after as
    many receipts as were asked for, or at its time limit, there is nothing left to fetch. What has arrived stays, and
    can be opened again and again, until it is closed or dropped.
    """

    def __init__(
        self, descriptor: Descriptor, *, lease: Lease | None = None, handles: Fds | tuple[bytes, ...] = ()
    ) -> None:
        self.descriptor = descriptor
        self._lease = lease
        self._handles = handles
        self._closed = False
        self._told = False  # whether anybody can know the token of the lease
        self._epoch = epoch()

    @property
    def size(self) -> int:
        """The size in bytes of what is shared."""
        return self.descriptor.size

    def to_bytes(self) -> bytes:
        """Return it as bytes, for `remap.open` in another process.

        With file descriptors they are a ticket: good on this host, as often as `receipts=` said, for as long as the
        lease lasts and this process lives. With fabric handles they are all that is needed. Whoever has the bytes (and,
        for a ticket, this user's id) has the memory.
        """
        self._check()
        token, path = b"", b""
        lease = self._lease
        if lease is None and isinstance(self._handles, Fds):  # it arrived here, and is handed on
            lease = lend(self._handles.duplicate(), receipts=1, limit=LIMIT)
        if lease is not None:
            lease.check()
            self._told = True
            token, path = lease.token, os.fsencode(lease_path())
        handles = b"".join(self._handles) if isinstance(self._handles, tuple) else b""
        head = _TICKET.pack(_MAGIC, len(path), token)
        return b"".join((head, path, self.descriptor.to_bytes(), handles))

    def handles(self) -> Fds | tuple[bytes, ...]:
        """Return the handles, one for each chunk: descriptors that are the caller's now, or fabric handles."""
        self._check()
        if self._lease is not None:
            return self._lease.duplicate()
        return self._handles if isinstance(self._handles, tuple) else self._handles.duplicate()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("use of exported memory that was closed")
        if self._epoch != epoch():
            raise ForkedError(
                "use of memory that was exported before a fork",
                rule="its handles were closed in this child",
                next_step="Send it to the child through a Queue or Pipe, or start the child with spawn",
            )

    def close(self) -> None:
        """End the lease, or drop what has arrived. Buffers opened from it live on. Closing again does nothing."""
        if self._closed or self._epoch != epoch():
            return
        if self._lease is not None:
            self._lease.end("the exporter has closed it")
        if isinstance(self._handles, Fds):
            self._handles.close()
        self._closed = True  # last: after an interrupt, closing again goes on

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close the descriptors of a lease that nobody can fetch, as its token was never told."""
        lease: Lease | None = getattr(self, "_lease", None)  # an interrupt may have come into the constructor
        if lease is not None and not self._told and not ending():
            lease.abandon()

    def __reduce__(self) -> NoReturn:
        """Refuse plain pickling: bytes in a file outlive both the lease and the memory."""
        raise ShareError(
            "pickling exported memory",
            rule="its handles live in processes and cannot be written down; only multiprocessing can pass them on",
            next_step="Send it through a Queue, Pipe, Pool or Process of multiprocessing, or send to_bytes()",
        )

    def __repr__(self) -> str:
        """Return what is shared."""
        return f"<remap.Exported {self.descriptor.size} bytes of {self.descriptor.identity.hex()}>"


def offer(descriptor: Descriptor, fds: Fds, *, receipts: int, limit: float) -> Exported:
    """Return memory that can be fetched so often, within so many seconds; takes ownership of the descriptors."""
    lease = lend(fds, receipts=receipts, limit=limit)
    try:
        return Exported(descriptor, lease=lease)
    except BaseException:  # an interrupt: nobody would ever fetch it
        lease.end("it was never exported")
        raise


def receive(data: bytes, *, timeout: float = PATIENCE) -> Exported:
    """Fetch what `Exported.to_bytes` stands for, and return it with its handles.

    Raises `DescriptorError` for bytes that are none of ours, `ShareError` if the exporter has gone, has no more
    receipts to give, or does not answer within `timeout` seconds.
    """
    if len(data) < _TICKET.size or not data.startswith(_MAGIC):
        raise DescriptorError(
            f"{len(data)} bytes as shared memory",
            rule="they do not begin as those of Exported.to_bytes do",
            next_step=_LEGACY if len(data) == 64 else "Pass on what to_bytes() gave, unchanged",
        )
    _, length, token = _TICKET.unpack_from(data)
    path, rest = data[_TICKET.size : _TICKET.size + length], data[_TICKET.size + length :]
    if len(path) < length or b"\0" in path:
        raise DescriptorError("a ticket for shared memory", rule="it is cut off")
    if not length:
        return _without_fds(rest)
    descriptor = Descriptor.from_bytes(rest)
    if descriptor.kind is not HandleType.POSIX_FD:
        raise DescriptorError("a ticket for shared memory", rule="fabric handles are not fetched")
    fds = _fetch(Path(os.fsdecode(path)), token, len(descriptor.chunks), deadline_in(timeout))
    return Exported(descriptor, handles=fds)


def _without_fds(rest: bytes) -> Exported:
    """Return what carries all its handles: fabric memory, or memory of no bytes."""
    # The descriptor's own length check needs the handles off its end, and only it knows how many they are.
    count = Descriptor.count_chunks(rest)
    at = len(rest) - count * FABRIC_BYTES
    descriptor = Descriptor.from_bytes(rest[: max(at, 0)])
    if descriptor.kind is not HandleType.FABRIC and count:
        raise DescriptorError("a ticket for shared memory", rule="it does not say where to fetch descriptors")
    handles = tuple(rest[i : i + FABRIC_BYTES] for i in range(at, len(rest), FABRIC_BYTES))
    return Exported(descriptor, handles=handles)


def _fetch(path: Path, token: bytes, count: int, deadline: float) -> Fds:
    try:
        with connect(path, deadline=deadline) as channel:
            channel.send(token, deadline=deadline)
            answer, fds = channel.receive(deadline=deadline, most_fds=count)
            if answer != b"+":
                fds.close()
                why = answer[:200].decode(errors="replace")
                raise ShareError(
                    "receiving shared memory",
                    rule=f"the exporter refuses: {why}",
                    next_step="Export it again, with receipts= for several importers and timeout= for slow ones",
                )
            if len(fds) != count:
                found = len(fds)
                fds.close()
                raise DescriptorError(
                    f"{found} descriptors for {count} chunks", rule="each chunk has one of its own"
                )
            with suppress(OSError):  # it has all been received, whether the exporter hears so or not
                channel.send(b"received", deadline=deadline)
            return fds
    except (OSError, EOFError) as error:
        raise ShareError(
            "receiving shared memory", rule=f"the exporter does not answer: {error}", next_step=_ALIVE
        ) from error
    except ShareError as error:
        if isinstance(error.__cause__, OSError):
            raise ShareError(
                "receiving shared memory", rule="the exporter has ended", next_step=_ALIVE
            ) from error
        raise


_ALIVE = (
    "Keep the exporter alive until its memory has been received; to keep memory alive whatever dies, put it "
    "into a broker (remap serve)"
)
_LEGACY = "Legacy IPC handles (cuIpcGetMemHandle) refuse such memory: use remap.export and remap.open"


def _reduce(exported: Exported) -> tuple[Any, ...]:
    return receive, (exported.to_bytes(),)


# multiprocessing's own pickler finds this before __reduce__, which refuses everybody else's.
cast("Any", ForkingPickler).register(Exported, _reduce)
