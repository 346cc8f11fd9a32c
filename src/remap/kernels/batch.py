"""A batch of blocks that the host runs together, and what their threads do to memory.

Generated code calls a `Frame` with values for a selection of lanes (see `lanes`). Everything that a GPU would do
wrongly in silence is an error here, which names kernel, line, block, thread and element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from remap.errors import KernelError
from remap.kernels.lanes import NONE, Own, Run, Selection, inner, pick, size
from remap.kernels.shadows import BlockShadow, Found, GridShadow, Who
from remap.types import Dim3


@dataclass
class Memory:
    """An array as the batch sees it: `data` is flat; `per_block` elements of it belong to each block, 0 for all."""

    name: str
    data: Any
    extents: tuple[int, ...]
    count: int
    address: int = 0
    per_block: int = 0
    base: int = 0
    shadow: BlockShadow | GridShadow | None = None
    scale: int = 1  # units of the shadow to an element
    units: Any = 0  # the unit at which the array begins, or one for each element
    tag: int = 0
    writable: bool = False

    def extent(self, axis: int) -> Any:
        """Return the length along an axis, of the whole for axis -1."""
        return np.int64(self.count if axis < 0 else self.extents[axis])


class Batch:
    """Blocks `first` to `first + blocks` of a launch; lanes are numbered block by block, x fastest."""

    def __init__(self, kernel: str, file: str, grid: Dim3, block: Dim3, first: int, blocks: int) -> None:
        self.kernel = kernel
        self.file = file
        self.grid = grid
        self.block = block
        self.first = first
        self.blocks = blocks
        self.threads = math.prod(block)
        self.count = blocks * self.threads
        self.epoch: Any = 0  # barriers passed: one number, or one for each block
        self.fences: Any = np.int32(0)
        self._made: dict[tuple[str, int], Any] = {}
        self._stamps: tuple[Any, Any] | None = None

    # -- who a lane is --

    def builtin(self, name: str, axis: int) -> Any:
        """Return a number of the launch for all lanes."""
        key = (name, axis)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._make(name, axis)
        return found

    def _make(self, name: str, axis: int) -> Any:
        if name == "block_size":
            return np.int64(self.block[axis])
        if name == "grid_size":
            return np.int64(self.grid[axis])
        extents = self.block if name == "thread" else self.grid
        if extents[axis] == 1:
            return np.int64(0)
        numbers = (
            np.arange(self.threads) if name == "thread" else np.arange(self.first, self.first + self.blocks)
        )
        numbers = numbers // math.prod(extents[:axis]) % extents[axis]
        return np.tile(numbers, self.blocks) if name == "thread" else np.repeat(numbers, self.threads)

    @property
    def local_block(self) -> Any:
        """The block of each lane, counted from the first of the batch."""
        return self._cached("local block", lambda: np.repeat(np.arange(self.blocks), self.threads))

    @property
    def in_block(self) -> Any:
        """The number of each lane in its block."""
        return self._cached("in block", lambda: np.tile(np.arange(self.threads), self.blocks))

    def _cached(self, name: str, make: Any) -> Any:
        found = self._made.get((name, 0))
        if found is None:
            found = self._made[name, 0] = make()
        return found

    def index(self, space: str, stride: Any) -> Own:
        """Return each lane's own index."""
        if space == "1d":
            return Own(space, Run(self.first * self.threads, self.count))
        if space == "warp":
            in_block = self.in_block
            warps = -(-self.threads // 32)
            number = (self.first + self.local_block) * warps + in_block // 32
            return Own(space, number, in_block % 32 == 0)
        row = self.builtin("block", 1) * self.block[1] + self.builtin("thread", 1)
        col = self.builtin("block", 0) * self.block[0] + self.builtin("thread", 0)
        owns = np.broadcast_to(col < stride, self.count)
        return Own(
            space,
            np.where(owns, row * stride + col, -1),
            owns,
            _full(row, self.count),
            _full(col, self.count),
        )

    def who(self, lane: int) -> str:
        """Return block and thread of a lane in words."""
        return self.thread_name(self.first * self.threads + lane)

    def thread_name(self, number: int) -> str:
        """Return block and thread of a thread that is counted over the whole grid."""
        return f"block {_coordinates(number // self.threads, self.grid)}, thread {_coordinates(number % self.threads, self.block)}"

    # -- order --

    def stamps(self, selection: Selection) -> tuple[Any, Any]:
        """Return each lane's stamp for shared memory, and the stamp of its epoch."""
        if self._stamps is None:
            base = self.epoch << 32 if np.ndim(self.epoch) == 0 else np.repeat(self.epoch << 32, self.threads)
            self._stamps = (base | self.in_block, np.int64(base) if np.ndim(base) == 0 else base)
        mine, base = self._stamps
        return pick(mine, selection), pick(base, selection)

    def present(self, selection: Selection) -> Who:
        """Return who the lanes of a selection are, for memory of the device."""
        thread = self._cached(
            "in grid",
            lambda: np.arange(self.first * self.threads + 1, self.first * self.threads + 1 + self.count),
        )
        thread = pick(thread, selection)
        block = (thread - 1) // self.threads
        epoch = self.epoch if np.ndim(self.epoch) == 0 else self.epoch[block - self.first]
        return Who(thread, block, epoch, pick(self.fences, selection), self.threads)

    def barrier(self, selection: Selection, line: int) -> None:
        """Let the selected lanes pass a barrier; raises unless they are all threads of their blocks."""
        self._stamps = None
        if selection is None:
            self.epoch = self.epoch + 1
            return
        reached = np.bincount(pick(self.local_block, selection), minlength=self.blocks)
        missing = (reached != 0) & (reached != self.threads)
        if missing.any():
            block = int(missing.argmax())
            here = np.zeros(self.count, np.bool_)
            here[selection] = True
            lane = block * self.threads + int(
                (~here[block * self.threads : (block + 1) * self.threads]).argmax()
            )
            raise self.error(
                line,
                f"barrier reached by {reached[block]} of the {self.threads} threads of the block",
                f"{self.who(lane)} does not reach it; all threads of a block have to",
                "Move the barrier out of the condition, and let no thread return before it",
            )
        self.epoch = np.broadcast_to(np.int64(self.epoch), self.blocks) + (reached != 0)

    def fence(self, selection: Selection) -> None:
        """Let the selected lanes pass a fence between aliases."""
        self.fences = np.array(np.broadcast_to(self.fences, self.count))
        self.fences[slice(None) if selection is None else selection] += 1

    def error(self, line: int, what: str, rule: str, next_step: str = "") -> KernelError:
        """Return an error of the kernel at a line."""
        return KernelError(
            f"kernel {self.kernel}, {self.file}:{line}: {what}", rule=rule, next_step=next_step
        )


class Frame:
    """What the code of one function sees: its lanes are `lanes` of the batch (None: all)."""

    def __init__(self, batch: Batch, lanes: Selection = None) -> None:
        self.batch = batch
        self.lanes = lanes
        self.count = size(lanes, batch.count)

    def enter(self, selection: Selection) -> Frame:
        """Return the frame of a function that the selected lanes call."""
        return Frame(self.batch, inner(self.lanes, selection))

    def builtin(self, name: str, axis: int, selection: Selection) -> Any:
        """Return a number of the launch."""
        return pick(self.batch.builtin(name, axis), inner(self.lanes, selection))

    def index(self, space: str, stride: Any, selection: Selection) -> Own:
        """Return the threads' own indices."""
        return pick(self.batch.index(space, stride), inner(self.lanes, selection))  # type: ignore[no-any-return]

    def has(self, memory: Memory, own: Own) -> Any:
        """Tell which lanes have an element of their own."""
        number = own.number
        found = (number >= np.int64(0)) & (number < np.int64(memory.count))
        return found if own.owns is None else found & own.owns

    # -- reads --

    def load(self, memory: Memory, indices: tuple[Any, ...], selection: Selection, line: int) -> Any:
        """Return elements; an index outside of the array is an error."""
        at = self._place(memory, indices, selection, line)
        if memory.shadow is None and not memory.per_block:
            if isinstance(at, Run):
                return memory.data[at.start : at.start + at.count]
            return memory.data.take(at) if at.ndim else memory.data[int(at)]
        return self._tracked(memory, at, selection, line)

    def own(self, memory: Memory, own: Own, default: Any, selection: Selection, line: int) -> Any:
        """Return each lane's own element; the default (None: zero) where the array has none."""
        number, total = own.number, size(selection, self.count)
        if isinstance(number, Run) and memory.shadow is None:
            stop = min(number.start + number.count, memory.count)
            values = memory.data[number.start : max(stop, number.start)]
            if len(values) == total:  # a copy where a later write could change what was read
                return values.copy() if memory.writable else values
            found = np.zeros(total, memory.data.dtype)
            if default is not None:
                found[...] = default
            found[: len(values)] = values
            return found
        return self._within(memory, np.asarray(number), default, selection, line)

    def get(
        self, memory: Memory, indices: tuple[Any, ...], default: Any, selection: Selection, line: int
    ) -> Any:
        """Return elements; the default where an index lies outside."""
        inside: Any = np.bool_(True)
        for index, extent in zip(indices, memory.extents, strict=True):
            index = np.asarray(index)  # noqa: PLW2901
            inside = inside & (index >= 0) & (index < extent)
        flat = np.where(inside, self._flat(memory, tuple(np.asarray(index) for index in indices)), -1)
        return self._within(memory, flat, default, selection, line)

    def _within(self, memory: Memory, number: Any, default: Any, selection: Selection, line: int) -> Any:
        total = size(selection, self.count)
        number = np.broadcast_to(number, total)
        inside = (number >= 0) & (number < memory.count)
        found = np.zeros(total, memory.data.dtype)
        if default is not None:
            found[...] = default
        lanes = np.flatnonzero(inside)
        if len(lanes):
            at = number[lanes]
            if memory.shadow is None:
                found[lanes] = memory.data.take(at)
            else:
                chosen = inner(selection, lanes)
                found[lanes] = self._tracked(memory, at, chosen, line)
        return found

    def _tracked(self, memory: Memory, at: Any, selection: Selection, line: int) -> Any:
        position, lanes = self._positions(memory, at, selection)
        self._note(memory, "read", position, lanes, line)
        return memory.data.take(position)

    # -- writes --

    def store(
        self,
        memory: Memory,
        indices: tuple[Any, ...],
        value: Any,
        selection: Selection,
        line: int,
        field: str = "",
    ) -> None:
        """Write elements; an index outside of the array is an error."""
        at = self._place(memory, indices, selection, line)
        position, lanes = self._positions(memory, at, selection)
        self._note(memory, "write", position, lanes, line)
        self._target(memory, field)[position] = value

    def store_own(
        self, memory: Memory, own: Own, value: Any, selection: Selection, line: int, field: str = ""
    ) -> None:
        """Write each lane's own element; a lane without one writes nothing."""
        target, number = self._target(memory, field), own.number
        if isinstance(number, Run) and memory.shadow is None:
            stop = max(min(number.start + number.count, memory.count), number.start)
            target[number.start : stop] = value if value.ndim == 0 else value[: stop - number.start]
            return
        chosen = np.flatnonzero(self.has(memory, own))
        if len(chosen) == 0:
            return
        at = np.asarray(number)[chosen]
        if memory.shadow is not None:
            position, lanes = self._positions(memory, at, inner(selection, chosen))
            self._note(memory, "write", position, lanes, line)
        target[at] = pick(value, chosen)

    def atomic(
        self,
        name: str,
        memory: Memory,
        indices: tuple[Any, ...],
        operands: tuple[Any, ...],
        selection: Selection,
        line: int,
    ) -> Any:
        """Change elements one lane after the other, and return what each found there."""
        at = self._place(memory, indices, selection, line)
        position, lanes = self._positions(memory, at, selection)
        self._note(memory, "atomic", position, lanes, line)
        data, total = memory.data, len(position)
        values = [np.broadcast_to(value, total) for value in operands]
        found = np.empty(total, data.dtype)
        change = _ATOMICS[name]
        for lane, where in enumerate(position.tolist()):
            old = found[lane] = data[where]
            data[where] = change(old, *(value[lane] for value in values))
        return found

    def barrier(self, selection: Selection, line: int) -> None:
        """Let lanes pass a barrier."""
        self.batch.barrier(selection, line)

    def fence(self, selection: Selection) -> None:
        """Let lanes pass a fence."""
        self.batch.fence(inner(self.lanes, selection))

    # -- shared memory --

    def shared(self, name: str, dtype: Any, shape: tuple[int, ...]) -> Memory:
        """Return a static shared array for every block of the batch."""
        count = math.prod(shape)
        blocks = self.batch.blocks
        data = np.empty(blocks * count, dtype)
        return Memory(name, data, shape, count, per_block=count, shadow=BlockShadow(blocks * count))

    def dynamic(
        self, name: str, dtype: Any, offset: int, length: int | None, bytes_: int, unit: int
    ) -> Memory:
        """Return a view of the dynamic shared memory of every block of the batch."""
        blocks = self.batch.blocks
        whole = -(-bytes_ // 64) * 64
        made = self.batch._made.get(("dynamic", 0))
        if made is None:
            made = self.batch._made["dynamic", 0] = (
                np.empty(blocks * whole, np.uint8),
                BlockShadow(blocks * whole // unit),
            )
        data, shadow = made
        kind = np.dtype(dtype)
        count = (bytes_ - offset) // kind.itemsize if length is None else length
        return Memory(
            name,
            data.view(kind),
            (count,),
            count,
            per_block=whole // kind.itemsize,
            base=offset // kind.itemsize,
            shadow=shadow,
            scale=kind.itemsize // unit,
        )

    # -- inside --

    def _target(self, memory: Memory, field: str) -> Any:
        return memory.data[field] if field else memory.data

    def _flat(self, memory: Memory, indices: tuple[Any, ...]) -> Any:
        at = indices[0]
        for index, extent in zip(indices[1:], memory.extents[1:], strict=True):
            at = at * np.int64(extent) + index
        return at

    def _place(self, memory: Memory, indices: tuple[Any, ...], selection: Selection, line: int) -> Any:
        """Return which elements are meant, counted from the array's first; raises where there is none."""
        for index, extent in zip(indices, memory.extents, strict=True):
            if isinstance(index, Run):
                inside = index.start >= 0 and index.start + index.count <= extent
            elif index.ndim == 0:
                inside = 0 <= index < extent
            else:  # as unsigned numbers, negative ones are large
                inside = len(index) == 0 or int(index.view(np.uint64).max()) < extent
            if not inside:
                raise self._outside(memory, indices, selection, line)
        return self._flat(memory, indices)

    def _outside(
        self, memory: Memory, indices: tuple[Any, ...], selection: Selection, line: int
    ) -> KernelError:
        total = size(selection, self.count)
        every = [np.broadcast_to(np.asarray(index), total) for index in indices]
        bad = np.zeros(total, np.bool_)
        for index, extent in zip(every, memory.extents, strict=True):
            bad |= (index < 0) | (index >= extent)
        lane = int(bad.argmax())
        place = ", ".join(str(int(index[lane])) for index in every)
        shape = " × ".join(map(str, memory.extents))
        return self.batch.error(
            line,
            f"{self._who(selection, lane)}: {memory.name}[{place}]",
            f"the array has {shape} elements, and nothing lies there",
            "Check the index first, or use .get(index, default)",
        )

    def _who(self, selection: Selection, lane: int) -> str:
        chosen = inner(self.lanes, inner(selection, np.array([lane])))
        return self.batch.who(int(chosen[0]))

    def _positions(self, memory: Memory, at: Any, selection: Selection) -> tuple[Any, Selection]:
        """Return where the elements lie in `data`, one for each lane, and which lanes of the batch those are."""
        lanes = inner(self.lanes, selection)
        position = np.broadcast_to(np.asarray(at), size(selection, self.count))
        if memory.per_block:
            position = position + pick(self.batch.local_block, lanes) * memory.per_block + memory.base
        return position, lanes

    def _note(self, memory: Memory, verb: str, position: Any, lanes: Selection, line: int) -> None:
        """Tell the shadow of an access, and raise what it finds."""
        shadow, batch = memory.shadow, self.batch
        if shadow is None or lanes is NONE or len(position) == 0:
            return
        scaled = position if memory.scale == 1 else position * memory.scale
        if not isinstance(shadow, BlockShadow):
            scaled = memory.units[position] if np.ndim(memory.units) else scaled + memory.units
        for step in range(memory.scale):
            at = scaled + step if step else scaled
            found: Found | None
            if isinstance(shadow, BlockShadow):
                found = getattr(shadow, verb)(at, *batch.stamps(lanes))
            else:
                found = getattr(shadow, verb)(at, batch.present(lanes), memory.tag)
            if found is not None:
                raise self._race(memory, found, position, lanes, line)

    def _race(self, memory: Memory, found: Found, position: Any, lanes: Selection, line: int) -> KernelError:
        batch = self.batch
        lane = int(inner(lanes, np.array([found.lane]))[0])
        element = int(position[found.lane])
        if memory.per_block:
            element -= (lane // batch.threads) * memory.per_block + memory.base
            where = f"shared {memory.name}[{element}]"
            other = found.other + (batch.first + lane // batch.threads) * batch.threads
        else:
            where = f"{memory.name}[{element}] at {memory.address + element * memory.data.itemsize:#x}"
            other = found.other
        met = (
            f"; the other is {batch.thread_name(other)}"
            if found.other >= 0 and other != batch.first * batch.threads + lane
            else ""
        )
        shared = (
            "Put remap.barrier() between the two"
            if memory.per_block
            else "Let each element belong to one thread, or use an atomic operation"
        )
        if "alias_fence" in found.what:
            shared = "Put remap.alias_fence() between the two"
        if "nothing was written" in found.what:
            shared = "Write it first; the contents of shared memory are undefined"
        return batch.error(line, f"{batch.who(lane)}: {where}", found.what + met, shared)


def _full(value: Any, count: int) -> Any:
    return np.broadcast_to(np.asarray(value), count)


def _coordinates(number: int, extents: Dim3) -> str:
    x, y, z = extents
    if y == z == 1:
        return str(number)
    parts = (number % x, number // x % y, number // (x * y))
    return f"({', '.join(map(str, parts[: 2 if z == 1 else 3]))})"


_ATOMICS: dict[str, Any] = {
    "add": lambda old, value: old + value,
    "min": lambda old, value: min(old, value),
    "max": lambda old, value: max(old, value),
    "exchange": lambda _old, value: value,
    # By their bits, as the hardware does.
    "cas": lambda old, expected, value: value if old.tobytes() == expected.tobytes() else old,
}
