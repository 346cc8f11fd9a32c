"""The client's end of the connection with a broker: requests, answers, and what is open over it.

The two ends may lose each other at any moment, and an interrupt (Ctrl-C) may come at any. Whatever went wrong, the
connection is closed, which ends all that the broker knows to be open over it; the next request makes another one, and
claims what is still open here.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from remap.errors import ClosedError, ForkedError, InUseError, RemapError, RemapWarning, ShareError
from remap.lifetime import epoch, repeatable
from remap.sharing.channel import Channel, Fds, deadline_in
from remap.sharing.descriptor import Descriptor
from remap.sharing.sockets import connect as connect_channel
from remap.sharing.wire import LONGEST_WAIT, VERSION, Fields, encode
from remap.types import Access


class Link:
    """A connection with a broker, for several threads; connects again by itself. `timeout` is for each answer."""

    def __init__(self, path: Path, timeout: float) -> None:
        self.path = path
        self.timeout = timeout
        self._lock = threading.RLock()
        self._leases: set[Lease] = set()
        self._epoch = epoch()
        self._closed = False
        self._channel: Channel | None = self._connect(deadline_in(timeout))

    def close(self) -> None:
        """Disconnect. Closing again does nothing. Raises `InUseError` while buffers are open."""
        if self._closed or self._epoch != epoch():
            return
        with self._lock:
            if self._leases:
                listed = ", ".join(sorted(f'"{lease.name}"' for lease in self._leases)[:5])
                raise InUseError(
                    f"closing a connection with {self.path}",
                    rule=f"buffers opened over it are still open: {listed}",
                    next_step="Close them first",
                )
            if self._channel is not None:
                self._channel.close()
            self._closed = True

    def check(self) -> None:
        """Raise `ClosedError` or `ForkedError` if it cannot be used."""
        if self._closed:
            raise ClosedError(f"use of a closed connection with {self.path}")
        if self._epoch != epoch():
            raise ForkedError(
                f"use of a connection with {self.path} made before a fork",
                rule="it is the parent's",
                next_step="Call remap.connect in the child",
            )

    def request(
        self,
        fields: dict[str, Any],
        blob: bytes = b"",
        fds: tuple[int, ...] | Any = (),
        lease: Lease | None = None,
    ) -> tuple[Fields, Fds]:
        """Send a request and return its answer; connect again, and send it again, if the broker has gone.

        Every request may be made twice: creating the same buffer again is no error, and a lease ends with its
        connection. `lease` is what the answer gives, unless it is an error.
        """
        self.check()
        with self._lock:
            deadline = deadline_in(self.timeout)
            message = encode(fields, blob)
            pause = 0.001
            while True:
                try:
                    if self._channel is None:
                        self._channel = self._connect_again(deadline)
                    answer, got = exchange(self._channel, message, fds, deadline)
                    if lease is not None and not answer.failed:
                        _note(lease, answer)
                        self._leases.add(lease)
                    break
                except BaseException as error:
                    # What came later, or is left of this answer, would be taken for that of another request.
                    broken, self._channel = self._channel, None
                    if broken is not None:
                        broken.close()
                    if not isinstance(error, OSError | EOFError):
                        raise
                    if isinstance(error, TimeoutError) or time.monotonic() + pause >= deadline:
                        raise self._silent(str(error)) from error
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
            try:
                answer.raise_error()
            except RemapError:
                got.close()
                raise
            return answer, got

    def wait(self, fields: dict[str, Any], deadline: float) -> None:
        """Send a request that is answered when something has happened, or at the deadline.

        It has a connection of its own, so that other threads need not wait for this one. If the broker goes meanwhile,
        the next one is asked, while there is time.
        """
        self.check()
        while True:
            with self._reach(deadline_in(self.timeout)) as channel:
                message = encode(
                    {**fields, "timeout": min(max(deadline - time.monotonic(), 0.0), LONGEST_WAIT)}
                )
                try:
                    latest = min(deadline + self.timeout, deadline_in(math.inf))
                    answer, fds = exchange(channel, message, (), latest)
                except (OSError, EOFError) as error:
                    if time.monotonic() < deadline:
                        continue
                    raise self._silent(str(error)) from error
            fds.close()
            answer.raise_error()
            return

    def _connect(self, deadline: float) -> Channel:
        """Return another connection with the broker, over which nothing is open."""
        try:
            channel = connect_channel(self.path, deadline=deadline)
        except ShareError as error:
            error.next_step = error.next_step or _START
            raise
        try:
            answer, fds = exchange(channel, encode({"op": "hello", "version": VERSION}), (), deadline)
            fds.close()
            answer.raise_error()
        except (OSError, EOFError) as error:
            channel.close()
            raise self._silent(str(error)) from error
        except BaseException:
            channel.close()
            raise
        return channel

    def _reach(self, deadline: float) -> Channel:
        """Connect with a broker that may be on its way up."""
        pause = 0.001
        while True:
            try:
                return self._connect(deadline)
            except ShareError:
                if time.monotonic() + pause >= deadline:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 0.1)

    def _connect_again(self, deadline: float) -> Channel:
        """Connect with a broker that may be on its way up, and claim what is open here."""
        channel = self._reach(deadline)
        try:
            for lease in list(self._leases):
                self._claim(channel, lease, deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def _claim(self, channel: Channel, lease: Lease, deadline: float) -> None:
        identity = lease.descriptor.identity.hex()
        fields = {"name": lease.name, "identity": identity, "access": str(lease.access)}
        answer, fds = exchange(channel, encode({"op": "claim", **fields}), (), deadline)
        fds.close()
        try:
            answer.raise_error()
            lease.number = int(answer.number("lease", 1 << 53))
        except RemapError as error:
            self._leases.discard(lease)
            warnings.warn(
                f'buffer "{lease.name}" is open here and the broker, started anew, does not know: {error}',
                RemapWarning,
                stacklevel=5,
            )

    def _silent(self, why: str) -> ShareError:
        return ShareError(
            f"a request to the broker at {self.path}",
            rule=f"it does not answer: {why}",
            next_step=_START,
        )

    def release(self, lease: Lease) -> None:
        """Tell the broker that a buffer was closed; a broker that has gone need not know."""
        if self._epoch != epoch():
            return
        with self._lock:
            if lease not in self._leases:
                return
            try:
                if self._channel is not None:
                    message = encode({"op": "release", "lease": lease.number})
                    _, fds = exchange(self._channel, message, (), deadline_in(self.timeout))
                    fds.close()
            except BaseException as error:
                # Which ends all leases of this connection; the next request claims the others again.
                broken, self._channel = self._channel, None
                if broken is not None:
                    broken.close()
                if not isinstance(error, OSError | EOFError | ShareError):
                    raise
            finally:
                self._leases.discard(lease)


_START = "Start one with remap serve"


class Lease:
    """That this process has a buffer open; the broker's `number` for it is another one on each connection.

    A client has those that its broker knows of, or that it is to claim on its next connection: they and its connection
    change together, under its lock.
    """

    __slots__ = ("access", "descriptor", "link", "name", "number")

    def __init__(self, link: Link, name: str, access: Access) -> None:
        self.link = link
        self.name = name
        self.access = access
        self.descriptor: Descriptor
        self.number = 0

    @repeatable
    def forget(self) -> None:
        """Tell the broker that the buffer was closed, if it was told that it is open. Doing so again does nothing."""
        self.link.release(self)


def _note(lease: Lease, answer: Fields) -> None:
    """Note what the broker says of a buffer that it has opened."""
    lease.number = int(answer.number("lease", 1 << 53))
    if answer.blob:
        lease.descriptor = Descriptor.from_bytes(answer.blob)


def exchange(channel: Channel, message: bytes, fds: Any, deadline: float) -> tuple[Fields, Fds]:
    """Send a message and return its answer; raises `OSError`, `EOFError` or `ShareError` where there is none."""
    with suppress(ConnectionError):  # who has hung up may have said why
        channel.send(message, fds, deadline=deadline)
    answer, got = channel.receive(deadline=deadline)
    try:
        return Fields.decode(answer), got
    except ShareError:
        got.close()
        raise
