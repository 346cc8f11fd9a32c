"""`connect`: named buffers that a broker keeps alive, created, opened and dropped."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from remap.buffers.base import allocate
from remap.errors import ClosedError, ForkedError, InUseError, RemapError, RemapWarning, ShareError
from remap.lifetime import end_block, epoch
from remap.locations import LocationLike, RightLike, highest_right
from remap.sharing.channel import Channel, Fds, deadline_in
from remap.sharing.descriptor import Descriptor
from remap.sharing.export import export
from remap.sharing.exported import PATIENCE
from remap.sharing.importing import ImportedBuffer, import_memory
from remap.sharing.quiet import QuietAddresses
from remap.sharing.sockets import broker_path
from remap.sharing.sockets import connect as connect_channel
from remap.sharing.wire import (
    LONGEST_PATIENCE,
    LONGEST_WAIT,
    VERSION,
    BrokerStatus,
    Fields,
    NamedBuffer,
    check_name,
    encode,
)
from remap.sizes import Size
from remap.spans import Span
from remap.types import Access, HandleType


class _Lease:
    """That this process has a buffer open; the number changes when the broker is another one."""

    __slots__ = ("access", "identity", "name", "number")

    def __init__(self, name: str, identity: bytes, access: Access, number: int) -> None:
        self.name = name
        self.identity = identity
        self.access = access
        self.number = number


class BrokerClient:
    """A connection with a broker. Made by `remap.connect`; safe to use from several threads.

    What it opens is mapped in this process and does not need the broker any more. If the broker is started anew, the
    next call connects again and claims what is still open here. `timeout` is in seconds, for each answer and for
    connecting again.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self.path = path
        self.timeout = timeout
        self._lock = threading.RLock()
        self._leases: set[_Lease] = set()
        self._quiet = QuietAddresses()
        self._epoch = epoch()
        self._closed = False
        self._channel: Channel | None = self._connect(deadline_in(timeout))

    # -- buffers --

    def create(self, name: str, size: Size, **options: Any) -> ImportedBuffer:
        """Create a buffer of at least `size` bytes, keep it in the broker as `name`, and open it for writing.

        `options` are those of `remap.allocate`; it is shareable by descriptors. Readers can open it when it is closed
        here. A process that is killed meanwhile leaves it half written; `put` keeps what is complete. Raises
        `InUseError` if there is one of that name. A failure leaves nothing behind.
        """
        check_name(name)
        options["shareable"] = HandleType.POSIX_FD
        with allocate(size, **options) as made, export(made) as exported:
            handles = exported.handles()
            lease = _Lease(name, made._identity, Access.READ_WRITE, 0)
            buffer = import_memory(
                exported.descriptor,
                handles,
                access=options.get("access", Access.READ_WRITE),
                accessing=options.get("accessing"),
                hint=self._quiet.next(made.size),
                on_close=((self._release, (lease,)),),
                write_step=_write_step(name),
            )
        try:
            # Where it is now is where others can have it again.
            descriptor = dataclasses.replace(
                buffer.descriptor, address=buffer._address, access=Access.READ_WRITE
            )
            fds = buffer._handles
            numbers = fds.numbers if isinstance(fds, Fds) else ()
            answer, _ = self._request(
                {"op": "create", "name": name, "hold": True}, descriptor.to_bytes(), numbers
            )
            self._hold(lease, answer)
        except BaseException:
            buffer.close()
            raise
        return buffer

    def put(self, name: str, memory: Span, *, offset: int = 0, size: int | None = None) -> None:
        """Keep a buffer, or a part of one, in the broker as `name`. It stays usable here, which the broker knows not.

        Others see all of it or nothing, whatever dies; of several that bring a name at once, one succeeds. Who opens it
        with `same_address` has it where it is now: keep several open here until the last is put, or they may all come
        from one address, where nobody can have them together. Raises `InUseError` if there is one of that name, which
        can be opened instead, and what `remap.export` raises.
        """
        check_name(name)
        with export(memory, offset=offset, size=size, handle=HandleType.POSIX_FD) as exported:
            handles = exported.handles()
            if not isinstance(handles, Fds):
                handles = Fds()
            with handles:
                fields = {"op": "create", "name": name}
                self._request(fields, exported.descriptor.to_bytes(), handles.numbers)

    def open(
        self,
        name: str,
        *,
        access: RightLike = Access.READ,
        accessing: LocationLike | Iterable[LocationLike] | None = None,
        same_address: bool = False,
        wait: float = 0.0,
    ) -> ImportedBuffer:
        """Open a buffer for reading ("r") or writing ("rw"): one writer or many readers have it open at a time.

        Waits up to `wait` seconds until it exists and can be opened so. With `same_address` it is mapped where it was
        created. Closing it lets others have it. Raises `BufferNotFoundError` if the broker has no such buffer,
        `InUseError` if others have it open, and what `remap.open` raises.
        """
        check_name(name)
        right = highest_right(access)
        deadline = deadline_in(wait)
        while True:
            # For a moment the broker waits itself: others that were just killed are gone then, and no time is lost.
            patience = min(max(deadline - time.monotonic(), 0.0), LONGEST_PATIENCE)
            fields = {"op": "open", "name": name, "access": str(right), "patience": patience}
            try:
                answer, fds = self._request(fields)
                break
            except (InUseError, ShareError):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                self.wait(name, access=right, timeout=left)
        lease = _Lease(name, b"", right, 0)
        self._hold(lease, answer)
        try:
            descriptor = Descriptor.from_bytes(answer.blob)
            lease.identity = descriptor.identity
            step = (self._release, (lease,))
            return import_memory(
                descriptor,
                fds,
                access=access,
                accessing=accessing,
                same_address=same_address,
                on_close=(step,),
                write_step=_write_step(name),
            )
        except BaseException:
            fds.close()
            self._release(lease)
            raise

    def wait(self, name: str, *, access: Access | str = Access.NONE, timeout: float = PATIENCE) -> None:
        """Wait until a buffer exists and, if `access` is "r" or "rw", can be opened so.

        Another process may be faster at opening it then; `open(wait=…)` tries again. After `timeout` seconds it raises
        `BufferNotFoundError` if there is none, and `InUseError` if others have it open.
        """
        right = str(Access.parse(access))
        fields: dict[str, Any] = {"op": "wait", "name": check_name(name), "access": right}
        deadline = deadline_in(timeout)
        self._check()
        # On a connection of its own, so that other threads need not wait for this one.
        with self._connect(deadline_in(self.timeout)) as channel:
            fields["timeout"] = min(max(deadline - time.monotonic(), 0.0), LONGEST_WAIT)
            answer, fds = _exchange(
                channel, encode(fields), (), min(deadline + self.timeout, deadline_in(math.inf))
            )
            fds.close()
            answer.raise_error()

    def drop(self, name: str, *, force: bool = False) -> None:
        """Take a buffer out of the broker: nobody can open it any more, and its name is free.

        What is mapped stays until it is closed; the memory goes with the last. Raises `InUseError` while anyone has
        it open, unless `force` is given: they keep what they have mapped, and lose nothing but the name. Raises
        `BufferNotFoundError` if there is no such buffer.
        """
        self._request({"op": "drop", "name": check_name(name), "force": force})

    def list(self) -> tuple[NamedBuffer, ...]:
        """Return what the broker keeps, by name."""
        found: list[NamedBuffer] = []
        while True:
            after = found[-1].name if found else ""
            answer, _ = self._request({"op": "list", "after": after})
            for one in answer.items("buffers"):
                one |= {"locations": tuple(one["locations"]), "readers": tuple(one["readers"])}
                one["identity"] = bytes.fromhex(one["identity"])
                found.append(NamedBuffer(**one))
            if not answer.flag("more"):
                return tuple(found)

    def status(self) -> BrokerStatus:
        """Return what the broker says of itself."""
        answer, _ = self._request({"op": "status"})
        return BrokerStatus(
            **{one.name: answer.value(one.name) for one in dataclasses.fields(BrokerStatus)},
        )

    def close(self) -> None:
        """Disconnect. Closing again does nothing. Raises `InUseError` while buffers of this connection are open."""
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
            self._closed = True
            if self._channel is not None:
                self._channel.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Disconnect; what is still open after an error stays connected until it is closed."""
        end_block(error, self.close)

    # -- messages --

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"use of a closed connection with {self.path}")
        if self._epoch != epoch():
            raise ForkedError(
                f"use of a connection with {self.path} made before a fork",
                rule="it is the parent's",
                next_step="Call remap.connect in the child",
            )

    def _request(
        self, fields: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] | Any = ()
    ) -> tuple[Fields, Fds]:
        """Send a request and return its answer; connect again, and send it again, if the broker has gone.

        Every request may be made twice: creating the same buffer again is no error, and a lease ends with its
        connection.
        """
        self._check()
        with self._lock:
            deadline = deadline_in(self.timeout)
            message = encode(fields, blob)
            pause = 0.001
            while True:
                try:
                    if self._channel is None:
                        self._channel = self._connect_again(deadline)
                    answer, got = _exchange(self._channel, message, fds, deadline)
                    break
                except BaseException as error:
                    if self._channel is not None:
                        # What came later, or is left of this answer, would be taken for that of another request.
                        self._channel.close()
                        self._channel = None
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

    def _connect(self, deadline: float) -> Channel:
        channel = connect_channel(self.path, deadline=deadline)
        try:
            answer, fds = _exchange(channel, encode({"op": "hello", "version": VERSION}), (), deadline)
            fds.close()
            answer.raise_error()
        except (OSError, EOFError) as error:
            channel.close()
            raise self._silent(str(error)) from error
        except BaseException:
            channel.close()
            raise
        return channel

    def _connect_again(self, deadline: float) -> Channel:
        """Connect with a broker that may be on its way up, and claim what is open here."""
        pause = 0.001
        while True:
            try:
                channel = self._connect(deadline)
                break
            except ShareError:
                if time.monotonic() + pause >= deadline:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        try:
            for lease in list(self._leases):
                self._claim(channel, lease, deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def _claim(self, channel: Channel, lease: _Lease, deadline: float) -> None:
        fields = {"name": lease.name, "identity": lease.identity.hex(), "access": str(lease.access)}
        answer, fds = _exchange(channel, encode({"op": "claim", **fields}), (), deadline)
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
            next_step="Start one with remap serve",
        )

    def _hold(self, lease: _Lease, answer: Fields) -> None:
        lease.number = int(answer.number("lease", 1 << 53))
        with self._lock:
            self._leases.add(lease)

    def _release(self, lease: _Lease) -> None:
        """Tell the broker that a buffer was closed; a broker that has gone need not know."""
        if self._epoch != epoch():
            return
        with self._lock:
            if lease not in self._leases or self._closed:
                return
            self._leases.discard(lease)
            channel = self._channel
            if channel is None:
                return
            try:
                message = encode({"op": "release", "lease": lease.number})
                _, fds = _exchange(channel, message, (), deadline_in(self.timeout))
                fds.close()
            except (OSError, EOFError, ShareError):
                channel.close()  # which ends all leases of this connection; the next request claims the others again
                self._channel = None


def _write_step(name: str) -> str:
    return (
        f'Close it, and open it for writing, as one process at a time can: client.open("{name}", access="rw")'
    )


def _exchange(channel: Channel, message: bytes, fds: Any, deadline: float) -> tuple[Fields, Fds]:
    channel.send(message, fds, deadline=deadline)
    answer, got = channel.receive(deadline=deadline)
    try:
        return Fields.decode(answer), got
    except ShareError:
        got.close()
        raise


def connect(path: str | os.PathLike[str] | None = None, *, timeout: float = PATIENCE) -> BrokerClient:
    """Connect with the broker at `path`, by default that of this user (`remap serve`).

    Raises `ShareError` if there is none, or it belongs to another user.
    """
    where = broker_path() if path is None else Path(path)
    try:
        return BrokerClient(where, timeout)
    except ShareError as error:
        if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            raise error.explain(
                f"a connection with a broker at {where}",
                rule="there is none",
                next_step="Start it with remap serve",
            ) from None
        raise
