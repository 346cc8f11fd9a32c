"""`ElasticTensor`: a tensor whose first dimension grows and shrinks in place."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from remap import drivers
from remap.buffers.elastic import ElasticBuffer
from remap.buffers.growth import Change
from remap.chunks.pool import ChunkPool
from remap.chunks.sizes import ChunkLike
from remap.errors import ClosedError, InUseError, InvalidValueError
from remap.integrations.tensors import (
    Bytes,
    Tensor,
    device_number,
    shaped,
    size_of,
    tensor_at,
    torch,
    type_of,
    whole_number,
)
from remap.lifetime import end_block, epoch, undo
from remap.locations import DeviceLike
from remap.locations import device as device_called
from remap.sizes import Size
from remap.types import Host
from remap.uses import After, Known


class ElasticTensor:
    """A tensor of up to `capacity` rows of one shape, backed as far as it has rows, at one address for ever.

    `resize(rows)` maps or unmaps memory at the end and copies nothing; `tensor` is an ordinary tensor of the rows there
    are now, and `view(n)` one of the first n. All of them have one data pointer, so kernels and captured graphs go on
    using it as it grows, and each has a storage of just its rows, so it can be saved, pickled and deep-copied. A view
    must not be used beyond the rows there are, nor while the tensor sleeps; one that was taken before it shrank has
    more, and whatever copies its storage would read them: take a new one.

    Made inside of a pool or group, it sleeps and wakes with that. `capacity` costs addresses only. `chunk`, `ahead` and
    `pool` are those of `remap.ElasticBuffer`; with `ahead=` bytes mapped in front, growing by a row takes microseconds.
    Contents of new rows are undefined. It lies on `device`, by default torch's current one; on the host driver, remap's
    default. Raises what `remap.ElasticBuffer` raises.
    """

    def __init__(
        self,
        capacity: int,
        *row: int,
        dtype: Any = None,
        device: DeviceLike | None = None,
        rows: int = 0,
        chunk: ChunkLike | None = None,
        ahead: Size = 0,
        pool: ChunkPool | None = None,
        poison: bool = False,
    ) -> None:
        self.dtype = type_of(dtype)
        self.row = tuple(whole_number(extent, "extent") for extent in row)
        self.capacity = capacity = whole_number(capacity, "capacity")
        self.row_bytes = size_of(self.dtype, self.row)
        whole, rows = size_of(self.dtype, (capacity, *self.row)), whole_number(rows, "rows")
        if not whole:
            raise InvalidValueError(
                f"an ElasticTensor of shape {(capacity, *self.row)}",
                rule="its rows have no bytes",
                next_step="Name at least one",
            )
        driver = drivers.current()
        at = device_called(device_number(device))
        accessing: Sequence[Any] = [at]
        if driver.name != "cuda":
            if not at.capabilities["coherent"]:
                raise InvalidValueError(
                    "an ElasticTensor on the CPU",
                    rule="the CPU may not look at memory of this simulated device, and CPU torch knows no other",
                    next_step='Begin with remap.use("host", coherent=True, integrated=False)',
                )
            accessing = [at, Host()]
        self.buffer = ElasticBuffer(
            whole, device=at, accessing=accessing, chunk=chunk, ahead=ahead, pool=pool, poison=poison
        )
        """The memory, for what tensors cannot do: `remap.pause`, statistics, sharing."""
        _buffers[self.buffer.serial] = self.buffer
        self._bytes: NDArray[np.uint8] | None = self._all()
        self.buffer._uses.escaped = True
        self._rows = 0
        if rows:
            try:
                self.resize(rows)
            except BaseException:
                self.close()
                raise

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `tensor`."""
        return (self._rows, *self.row)

    @property
    def tensor(self) -> Tensor:
        """The rows there are, as an ordinary tensor."""
        return self.view(self._rows)

    @property
    def whole(self) -> Tensor:
        """A tensor of all rows there can be, for captures and indexing: only the rows there are may be touched.

        What reads or writes others faults, as it would in memory that is not there. That is also what happens where
        torch copies a tensor's storage, which here is the whole capacity: do not save, pickle, deep-copy or
        `share_memory_()` it or a part of it, but `tensor`, or a clone of the part.
        """
        return self._first(self.capacity)

    @property
    def data_ptr(self) -> int:
        """The address of the first row, the same for ever."""
        return self.buffer._address

    @property
    def asleep(self) -> bool:
        """Whether it sleeps: no memory stands behind it."""
        return self.buffer.paused

    def view(self, rows: int) -> Tensor:
        """Return the first `rows` rows, as far as there are so many; raises `InvalidValueError` and `PausedError`."""
        if type(rows) is not int:
            rows = whole_number(rows, "rows")
        if not 0 <= rows <= self._rows:
            raise InvalidValueError(
                f"a view of {rows} rows",
                rule=f"there are {self._rows}",
                next_step=f"Call resize({rows}) first" if 0 <= rows <= self.capacity else "",
            )
        if self.buffer._paused:
            self.buffer._check()
            self.buffer._check_backed("a view")
        return self._first(rows)

    def _first(self, rows: int) -> Tensor:
        """Return the first rows, whether they are there or not, as a tensor with a storage of its own."""
        self.buffer._check()
        held = self._bytes
        if held is None:
            raise ClosedError("use of an ElasticTensor that is being closed")
        driver, at = self.buffer._driver, self.buffer.properties.location.index
        part = held[: rows * self.row_bytes]
        if torch.is_inference_mode_enabled():  # what is made there could never be written to outside
            with torch.inference_mode(mode=False):
                return shaped(tensor_at(driver, at, part), self.dtype, (rows, *self.row))
        return shaped(tensor_at(driver, at, part), self.dtype, (rows, *self.row))

    def _all(self) -> NDArray[np.uint8]:
        """Return the bytes of all rows there can be: every tensor keeps them alive, and they keep the buffer."""
        return np.asarray(Bytes(self.buffer._address, self.capacity * self.row_bytes, self.buffer))

    def resize(self, rows: int, *, after: After = Known.STREAMS) -> Change:
        """Let there be `rows` rows, and say how many bytes were mapped and given back; nothing is copied.

        Growing waits for nothing. Shrinking waits, as `ElasticBuffer.resize` does. Raises `InvalidValueError` beyond
        the capacity, and what `ElasticBuffer.resize` raises; the rows are as they were then.
        """
        if type(rows) is not int:
            rows = whole_number(rows, "rows")
        if not 0 <= rows <= self.capacity:  # the buffer's own limit is rounded up to whole granules
            raise InvalidValueError(
                f"resize of an ElasticTensor to {rows} rows",
                rule=f"it may have 0 to {self.capacity}, its capacity",
                next_step="Where more may be needed, make it with a larger capacity: that costs addresses only",
            )
        change = self.buffer.resize(rows * self.row_bytes, after=after)
        self._rows = rows
        return change

    def append(self, tensor: Tensor) -> Tensor:
        """Grow by the rows of a tensor, copy them there, and return them as they are here.

        Values alone are copied: autograd does not follow. Raises what `resize` and torch's copy raise; there are as
        many rows as before then.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{type(tensor)} to be appended: rows come as a tensor. Pass torch.as_tensor(rows)"
            )
        if tensor.dim() != len(self.row) + 1 or tensor.shape[1:] != self.row:
            raise InvalidValueError(
                f"a tensor of shape {tuple(tensor.shape)} to be appended",
                rule=f"it is to have rows of shape {self.row}, and their number in front",
            )
        before = self._rows
        self.resize(before + tensor.shape[0])
        added: Tensor = None
        try:
            added = self.view(self._rows)[before:]
            with torch.no_grad():
                added.copy_(tensor)
        except BaseException as error:
            added = None  # or the traceback keeps it, and closing is refused
            self._rows = before  # whatever becomes of the memory
            undo(error, self.buffer.resize, before * self.row_bytes)
            raise
        return added

    def close(self, *, after: After = Known.STREAMS) -> None:
        """Give the memory back. Closing again does nothing.

        Waits for the device. Raises `InUseError`, and stays open, while a tensor taken from it lives.
        """
        if self.buffer.closed:
            return
        taken = None if self._bytes is None else weakref.ref(self._bytes)
        self._bytes = None
        try:
            if taken is not None and taken() is not None and self.buffer._epoch == epoch():
                raise InUseError(
                    f"closing an ElasticTensor of shape {self.shape}",
                    rule="tensors that were taken from it live, and would show memory that is gone",
                    next_step="Delete them first",
                )
            self.buffer.close(after=after)
        finally:
            if not self.buffer.closed:
                held = None if taken is None else taken()
                self._bytes = self._all() if held is None else held

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close it; if the block failed, what closing raises is a note on its error."""
        end_block(error, self.close)
        if error is not None:
            self.buffer._warns = False  # as `Resource` does

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied and pickled: two would count the rows of one memory."""
        raise TypeError(
            f"a copy of an ElasticTensor of shape {self.shape}: two objects would own one memory. "
            "Copy or save its rows: tensor.clone()"
        )

    def __len__(self) -> int:
        """Return how many rows there are."""
        return self._rows

    def __repr__(self) -> str:
        """Return shape, type and capacity."""
        return f"<remap.torch.ElasticTensor {self.shape} of {self.dtype}, up to {self.capacity} rows>"


_buffers: weakref.WeakValueDictionary[int, ElasticBuffer] = weakref.WeakValueDictionary()
"""The memory of all `ElasticTensor`s, by number; in a forked child that of its parent's, too."""


def elastic_at(address: int) -> ElasticBuffer | None:
    """Return the memory of the `ElasticTensor` that an address lies in; in a forked child it may be the parent's."""
    found: ElasticBuffer | None = None
    for reference in _buffers.valuerefs():
        one = reference()
        if one is not None and one._open and 0 <= address - one._address < one._reserved:
            if one._epoch == epoch():
                return one
            found = one  # unless this process has memory of its own there by now
    return found
