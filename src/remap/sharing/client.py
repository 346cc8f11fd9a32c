"""`connect`: named buffers that a broker keeps alive, created, opened and dropped."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from remap.buffers.base import allocate
from remap.errors import InUseError, ShareError
from remap.lifetime import end_block, undo
from remap.locations import LocationLike, RightLike, highest_right
from remap.sharing.channel import Fds, deadline_in
from remap.sharing.export import export
from remap.sharing.exported import PATIENCE
from remap.sharing.importing import ImportedBuffer, import_memory
from remap.sharing.link import Lease, Link
from remap.sharing.quiet import QuietAddresses
from remap.sharing.sockets import broker_path
from remap.sharing.wire import (
    LONGEST_PATIENCE,
    BrokerStatus,
    NamedBuffer,
    check_name,
)
from remap.sizes import Size
from remap.spans import Span
from remap.types import Access, HandleType


class BrokerClient:
    """A connection with a broker. Made by `remap.connect`; safe to use from several threads.

    What it opens is mapped in this process and does not need the broker any more. If the broker is started anew, the
    next call connects again and claims what is still open here. `timeout` is in seconds, for each answer and for
    connecting again.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._link = Link(path, timeout)
        self._quiet = QuietAddresses()

    @property
    def path(self) -> Path:
        """Where the broker's socket is."""
        return self._link.path

    @property
    def timeout(self) -> float:
        """How many seconds an answer may take."""
        return self._link.timeout

    # -- buffers --

    def create(self, name: str, size: Size, **options: Any) -> ImportedBuffer:
        """Create a buffer of at least `size` bytes, keep it in the broker as `name`, and open it for writing.

        `options` are those of `remap.allocate`; it is shareable by descriptors. Readers can open it when it is closed
        here. A process that is killed meanwhile leaves it half written; `put` keeps what is complete. Raises
        `InUseError` if there is one of that name. A failure leaves nothing behind, unless the broker has made it and
        an interrupt, or its silence, keeps this process from knowing: then the name is taken, and can be dropped.
        """
        check_name(name)
        options["shareable"] = HandleType.POSIX_FD
        with allocate(size, **options) as made, export(made) as exported:
            handles = exported.handles()
            lease = Lease(self._link, name, Access.READ_WRITE)
            buffer = import_memory(
                exported.descriptor,
                handles,
                access=options.get("access", Access.READ_WRITE),
                accessing=options.get("accessing"),
                hint=self._quiet.next(made.size),
                on_close=((lease.forget, ()),),
                write_step=_write_step(name),
            )
        try:
            # Where it is now is where others can have it again.
            descriptor = dataclasses.replace(
                buffer.descriptor, address=buffer._address, access=Access.READ_WRITE
            )
            fds = buffer._handles
            numbers = fds.numbers if isinstance(fds, Fds) else ()
            lease.descriptor = descriptor
            fields = {"op": "create", "name": name, "hold": True}
            self._link.request(fields, descriptor.to_bytes(), numbers, lease)
        except BaseException as error:
            undo(error, buffer.close)
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
                self._link.request(fields, exported.descriptor.to_bytes(), handles.numbers)

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
        lease = Lease(self._link, name, right)
        try:
            fds = self._opened(lease, deadline)
            return import_memory(
                lease.descriptor,
                fds,
                access=access,
                accessing=accessing,
                same_address=same_address,
                on_close=((lease.forget, ()),),
                write_step=_write_step(name),
            )
        except BaseException as error:
            undo(error, lease.forget)
            raise

    def _opened(self, lease: Lease, deadline: float) -> Fds:
        """Open a buffer as soon as that can be done, and return its handles."""
        while True:
            # For a moment the broker waits itself: others that were just killed are gone then, and no time is lost.
            patience = min(max(deadline - time.monotonic(), 0.0), LONGEST_PATIENCE)
            fields = {"op": "open", "name": lease.name, "access": str(lease.access), "patience": patience}
            try:
                return self._link.request(fields, lease=lease)[1]
            except (InUseError, ShareError):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                self.wait(lease.name, access=lease.access, timeout=left)

    def wait(self, name: str, *, access: Access | str = Access.NONE, timeout: float = PATIENCE) -> None:
        """Wait until a buffer exists and, if `access` is "r" or "rw", can be opened so, also while the broker restarts.

        Another process may be faster at opening it then; `open(wait=…)` tries again. After `timeout` seconds it raises
        `BufferNotFoundError` if there is none, and `InUseError` if others have it open.
        """
        right = str(Access.parse(access))
        fields: dict[str, Any] = {"op": "wait", "name": check_name(name), "access": right}
        self._link.wait(fields, deadline_in(timeout))

    def drop(self, name: str, *, force: bool = False) -> None:
        """Take a buffer out of the broker: nobody can open it any more, and its name is free.

        What is mapped stays until it is closed; the memory goes with the last. Raises `InUseError` while anyone has
        it open, unless `force` is given: they keep what they have mapped, and lose nothing but the name. Raises
        `BufferNotFoundError` if there is no such buffer.
        """
        self._link.request({"op": "drop", "name": check_name(name), "force": force})

    def list(self) -> tuple[NamedBuffer, ...]:
        """Return what the broker keeps, by name."""
        found: list[NamedBuffer] = []
        while True:
            after = found[-1].name if found else ""
            answer, _ = self._link.request({"op": "list", "after": after})
            for one in answer.items("buffers"):
                one |= {"locations": tuple(one["locations"]), "readers": tuple(one["readers"])}
                one["identity"] = bytes.fromhex(one["identity"])
                found.append(NamedBuffer(**one))
            if not answer.flag("more"):
                return tuple(found)

    def status(self) -> BrokerStatus:
        """Return what the broker says of itself."""
        answer, _ = self._link.request({"op": "status"})
        return BrokerStatus(
            **{one.name: answer.value(one.name) for one in dataclasses.fields(BrokerStatus)},
        )

    def close(self) -> None:
        """Disconnect. Closing again does nothing. Raises `InUseError` while buffers of this connection are open."""
        self._link.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Disconnect; what is still open after an error stays connected until it is closed."""
        end_block(error, self.close)


def _write_step(name: str) -> str:
    return (
        f'Close it, and open it for writing, as one process at a time can: client.open("{name}", access="rw")'
    )


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
