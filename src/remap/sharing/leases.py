"""Leases: exported memory waiting to be fetched, and the thread that hands it over.

`export` duplicates its descriptors at once, since a `multiprocessing.Queue` pickles later, on another thread, when the
buffer may be closed already. From then on they belong to a lease: so many receipts or a time limit, whichever comes
first, and they are closed. What is pickled is a ticket: the path of a socket and a token. The importer shows the token
there and is handed the descriptors, so it needs no way to look into the exporter, only that it is alive at that moment.

Rejected: `multiprocessing.reduction.DupFd`, whose server keeps a descriptor that nobody fetches for ever, and sends
whatever was asked for by anybody who knows the process's key.
"""

from __future__ import annotations

import os
import secrets
import selectors
import struct
import threading
import time
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn, Self, cast

from remap.errors import ClosedError, DescriptorError, ForkedError, InvalidValueError, ShareError
from remap.lifetime import epoch
from remap.sharing.channel import (
    Channel,
    Fds,
    Listener,
    connect,
    parse_first,
    private_directory,
    remove_stale,
)
from remap.sharing.descriptor import FABRIC_BYTES, Descriptor
from remap.types import HandleType

LIMIT = 60.0
"""How many seconds exported memory waits to be fetched where nobody says otherwise."""

PATIENCE = 30.0
"""How many seconds an importer waits for the exporter to answer."""

_MAGIC = b"remaptkt"
_TOKEN = 32
_TICKET = struct.Struct(
    f"<8sH{_TOKEN}s"
)  # magic, bytes of the path, token; then path, descriptor, fabric handles
_IDLE = 10.0
_MOST_PEERS = 256


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
            token, path = lease.token, os.fsencode(_serving().path)
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
        self._closed = True
        if self._lease is not None:
            self._lease.end("the exporter has closed it")
        if isinstance(self._handles, Fds):
            self._handles.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

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


class Lease:
    """Descriptors that wait to be fetched; closed after the last receipt, or at the time limit."""

    def __init__(self, fds: Fds, receipts: int, limit: float) -> None:
        self.token = secrets.token_bytes(_TOKEN)
        self.ends = time.monotonic() + limit
        self._fds = fds
        self._receipts = receipts
        self._ended = ""
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise `ShareError` if there is nothing left to fetch."""
        with self._lock:
            self._check()

    def _check(self) -> None:
        if self._ended:
            raise ShareError(
                "exported memory",
                rule=f"there is nothing left to fetch: {self._ended}",
                next_step="Export it again, with receipts= for several importers and timeout= for slow ones",
            )

    def duplicate(self) -> Fds:
        """Return copies of the descriptors."""
        with self._lock:
            self._check()
            return self._fds.duplicate()

    def received(self) -> None:
        """Count a receipt."""
        with self._lock:
            self._receipts -= 1
            if self._receipts <= 0:
                self._end("it has been received")

    def end(self, why: str) -> None:
        """Close the descriptors; ending again does nothing."""
        with self._lock:
            self._end(why)

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._fds.close()

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to fetch."""
        return bool(self._ended)


class _Server:
    """The thread that hands leased descriptors over. One for each process, begun with its first lease."""

    def __init__(self) -> None:
        directory = private_directory()
        remove_stale(directory)
        self.path = directory / f"lease-{os.getpid()}-{secrets.token_hex(4)}"
        self._listener = Listener(self.path)
        self._leases: dict[bytes, Lease] = {}
        self._wake = Fds([os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)])
        self._selector = selectors.DefaultSelector()
        self._peers: dict[Channel, tuple[float, Lease | None]] = {}
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake.numbers[0], selectors.EVENT_READ)
        threading.Thread(target=self._run, name="remap-leases", daemon=True).start()

    def add(self, lease: Lease) -> None:
        self._leases[lease.token] = lease
        os.eventfd_write(self._wake.numbers[0], 1)

    def close(self) -> None:
        """Remove the socket; what was not fetched cannot be any more."""
        self._listener.close()

    def abandon(self) -> None:
        """Close what a forked child has of it; descriptors of `Fds` are closed there already."""
        self._selector.close()
        for channel in list(self._peers):
            channel.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._sweep()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, Channel):
                    self._serve(key.fileobj)
                else:
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._wake.numbers[0])

    def _sweep(self) -> float | None:
        """End what is over, and return how many seconds later to look again."""
        now = time.monotonic()
        for lease in list(self._leases.values()):
            if lease.ends <= now:
                lease.end("its time limit has passed")
            if lease.ended:
                self._leases.pop(lease.token, None)
        for channel, (limit, _) in list(self._peers.items()):
            if limit <= now:
                self._drop(channel)
        limits = [lease.ends for lease in list(self._leases.values())]
        limits += [limit for limit, _ in self._peers.values()]
        return max(min(limits) - now, 0) if limits else None

    def _accept(self) -> None:
        with suppress(OSError):  # out of descriptors: the peer's own time limit tells it
            channel = self._listener.accept()
            if channel is None:
                return
            if len(self._peers) >= _MOST_PEERS:
                channel.close()
                return
            self._peers[channel] = (time.monotonic() + _IDLE, None)
            self._selector.register(channel, selectors.EVENT_READ)

    def _serve(self, channel: Channel) -> None:
        """Take a peer's token and send what it stands for, or take its receipt. Nothing here waits."""
        _, lease = self._peers[channel]
        try:
            request, _ = parse_first(*channel.receive_packet(deadline=None), most_fds=0)
            if lease is not None:
                lease.received()
                self._drop(channel)
                return
            found = self._leases.get(request)
            try:
                if found is None:
                    raise ShareError("a ticket", rule="it was received already, or its time limit has passed")
                with found.duplicate() as fds:
                    channel.send(b"+", fds.numbers, deadline=None)
            except ShareError as error:
                channel.send(str(error.rule).encode(), deadline=None)
                self._drop(channel)
            else:
                self._peers[channel] = (time.monotonic() + _IDLE, found)
        except (OSError, EOFError, ShareError):
            self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        del self._peers[channel]
        self._selector.unregister(channel)
        channel.close()


class _Process:
    """The server of this process, made on first use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.server: _Server | None = None


_process = _Process()


def _forked() -> None:
    _process.lock = threading.Lock()
    if _process.server is not None:  # its thread is the parent's
        _process.server.abandon()
        _process.server = None


os.register_at_fork(after_in_child=_forked)


def _serving() -> _Server:
    with _process.lock:
        if _process.server is None:
            server = _process.server = _Server()
            # Not atexit, which children of multiprocessing pass over.
            Finalize(None, server.close, exitpriority=0)
        return _process.server


def lend(fds: Fds, *, receipts: int, limit: float) -> Lease:
    """Take ownership of descriptors and return the lease by which others can fetch them."""
    try:
        if receipts < 1 or limit <= 0:
            raise InvalidValueError(
                f"{receipts} receipts within {limit} s", rule="at least one receipt, and more than no time"
            )
        lease = Lease(fds, receipts, limit)
        _serving().add(lease)
    except BaseException:
        fds.close()
        raise
    return lease


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
    fds = _fetch(Path(os.fsdecode(path)), token, len(descriptor.chunks), time.monotonic() + timeout)
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
