"""What leads out of remap: the memory that an array views, and the record of each view that was handed out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

from remap.errors import AccessError
from remap.locations import Device
from remap.sizes import Size
from remap.streams import Queue, StreamLike
from remap.types import Access, Held, Location
from remap.uses import Uses

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ExportError(AccessError, BufferError):
    """Memory cannot be handed to another library in the way that it asked for."""


class Memory(Protocol):
    """What an array views: a span. Spans stand above arrays, so this says what arrays need of them."""

    _address: int
    _driver: Any
    _exports: set[int] | None
    _size: int
    _views: set[int] | None

    @property
    def _rights(self) -> Mapping[Location, Access]: ...

    @property
    def _reach(self) -> int: ...

    @property
    def _uses(self) -> Uses: ...

    @property
    def accessing(self) -> tuple[Device, ...]:
        """The devices that may touch the memory."""
        ...

    @property
    def chunks(self) -> Sequence[Any]:
        """Every (address, size, location) behind it."""
        ...

    def copy_from(
        self,
        source: Any,
        *,
        offset: Size = 0,
        source_offset: Size = 0,
        size: Size | None = None,
        stream: StreamLike | None = None,
    ) -> None:
        """Copy bytes of another span into it."""
        ...

    def copy_from_host(self, array: Any, *, offset: Size = 0, stream: StreamLike | None = None) -> None:
        """Copy a host array into it."""
        ...

    def copy_to_host(self, out: Any, *, offset: Size = 0, stream: StreamLike | None = None) -> None:
        """Copy it into a host array."""
        ...

    def describe(self) -> Any:
        """Return what it is, for messages."""
        ...

    def _await_mapping(self) -> None: ...
    def _check(self) -> None: ...
    def _check_there(self, asked: str) -> None: ...
    def _check_part(self, asked: str, offset: int, size: int, needed: Access) -> None: ...
    def _grant_step(self, place: Location, needed: Access) -> str: ...
    def _held(self) -> Sequence[Held]: ...
    def _part_writable(self, offset: int, size: int, place: Location) -> bool: ...
    def _wait_for_work(self, asked: str) -> None: ...
    def _using(
        self,
        asked: str,
        needed: Access,
        stream: StreamLike | None,
        *,
        part: tuple[int, int] | None = None,
        keep: object = None,
        source: Any = None,
        source_part: tuple[int, int] | None = None,
    ) -> AbstractContextManager[Queue | None]: ...


class Export:
    """One view of memory that was handed out: holds the memory, and counts as an export of it while it lives.

    `read_only` is what a NumPy array over it will be; `cpu` says that the CPU looks through it.
    """

    __slots__ = ("__weakref__", "_exports", "_size", "_token", "_views", "address", "owner", "read_only")

    def __init__(
        self,
        owner: Memory,
        offset: int,
        size: int,
        asked: str,
        *,
        read_only: bool = False,
        cpu: bool = False,
    ) -> None:
        self.owner = owner
        self.address = owner._address + offset
        self.read_only = read_only
        self._size = size
        self._token = next(_tokens)
        with owner._driver.lock:  # against whoever would take the memory away
            owner._check_there(asked)
            owner._check_part(asked, offset, size, Access.READ)
            owner._uses.escaped = True
            if owner._exports is None:
                owner._exports = set()
            self._exports = owner._exports
            self._exports.add(self._token)
            self._views: set[int] | None = None
            if cpu:
                if owner._views is None:
                    owner._views = set()
                self._views = owner._views
                self._views.add(self._token)

    @property
    def __array_interface__(self) -> Mapping[str, Any]:
        """Show the memory as bytes: not every type can be spelled here."""
        return {
            "version": 3,
            "data": (self.address, self.read_only),
            "shape": (self._size,),
            "typestr": "|u1",
        }

    def numpy(self, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return a NumPy array over the memory, which holds this object. Nothing looks at the memory here."""
        import numpy as np

        if not self._size:
            return np.empty(shape, dtype)
        found: NDArray[Any] = np.asarray(self).view(dtype).reshape(shape)
        return found

    def __del__(self) -> None:
        """Count one export less; takes no lock and calls no driver, so it may run anywhere."""
        exports: set[int] | None = getattr(self, "_exports", None)
        if exports is not None:
            exports.discard(self._token)
        views: set[int] | None = getattr(self, "_views", None)
        if views is not None:
            views.discard(self._token)


def memory_behind(array: Any) -> Memory | None:
    """Return the memory of ours that a NumPy array is a view of, None for other arrays."""
    import numpy as np

    while isinstance(array, np.ndarray):
        array = cast("NDArray[Any]", array).base
    return array.owner if isinstance(array, Export) else None


_tokens = itertools.count(1)
