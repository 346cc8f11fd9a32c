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
import threading
import time
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

from remap.errors import InvalidValueError, ShareError
from remap.forks import in_child
from remap.sharing.channel import LONGEST_LIMIT, Channel, Fds, parse_first
from remap.sharing.sockets import Listener, private_directory, remove_stale

LIMIT = 60.0
"""How many seconds exported memory waits to be fetched where nobody says otherwise."""

TOKEN_BYTES = 32
_IDLE = 10.0
_MOST_PEERS = 256
_BREATH = 0.05


class Lease:
    """Descriptors that wait to be fetched; closed after the last receipt, or at the time limit."""

    def __init__(self, fds: Fds, receipts: int, limit: float) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
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

    def abandon(self) -> None:
        """Close the descriptors, for a finaliser: takes no lock. Nobody fetches any more."""
        self._ended = self._ended or "nobody was told of it"
        self._fds.close()

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
        try:
            channel = self._listener.accept()
        except OSError:
            # Out of descriptors, with a peer that waits: asking the selector again would only say so again.
            time.sleep(_BREATH)
            return
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


in_child(_forked)


def _serving() -> _Server:
    with _process.lock:
        if _process.server is None:
            server = _process.server = _Server()
            # Not atexit, which children of multiprocessing pass over.
            Finalize(None, server.close, exitpriority=0)
        return _process.server


def lease_path() -> Path:
    """Return the path of the socket at which leases of this process are fetched."""
    return _serving().path


def lend(fds: Fds, *, receipts: int, limit: float) -> Lease:
    """Take ownership of descriptors and return the lease by which others can fetch them."""
    try:
        if receipts < 1 or not limit > 0:  # NaN, too
            raise InvalidValueError(
                f"{receipts} receipts within {limit} s", rule="at least one receipt, and more than no time"
            )
        lease = Lease(fds, receipts, min(limit, LONGEST_LIMIT))
        _serving().add(lease)
    except BaseException:
        fds.close()
        raise
    return lease
