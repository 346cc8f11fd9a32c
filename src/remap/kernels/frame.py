# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (what NumPy gives for values of any type has no type that a checker could know)
"""What the threads of a batch do: generated code calls a `Frame` with values for a selection of lanes (see `lanes`).

Everything that a GPU would do wrongly in silence is an error here, which names kernel, line, block, thread and element.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from remap.errors import KernelError
from remap.kernels import numbers
from remap.kernels.batch import Batch, Memory
from remap.kernels.lanes import NONE, Own, Run, Selection, inner, pick, size
from remap.kernels.shadows import BlockShadow, Found


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
        if isinstance(number, Run) and own.owns is None and 0 <= number.start <= memory.count - number.count:
            return np.True_  # one for all, as in every block but the last
        found = (number >= np.int64(0)) & (number < np.int64(memory.count))
        return found if own.owns is None else found & own.owns

    def fitting(self, value: Any, kind: Any, selection: Selection, line: int) -> Any:
        """Return Python numbers in the integer type of what they meet; as in NumPy, they have to fit."""
        limits = np.iinfo(kind)
        if isinstance(value, Run):
            inside = limits.min <= value.start and value.start + value.count - 1 <= limits.max
        elif value.ndim == 0:
            inside = limits.min <= int(value) <= limits.max
        else:
            inside = len(value) == 0 or (limits.min <= int(value.min()) and int(value.max()) <= limits.max)
        if inside:
            return value.astype(kind)
        every = np.broadcast_to(np.asarray(value), size(selection, self.count)).tolist()
        lane = next(at for at, one in enumerate(every) if not limits.min <= one <= limits.max)
        name = np.dtype(kind)
        raise self.batch.error(
            line,
            f"{self._who(selection, lane)}: {every[lane]} meets {name}",
            f"a Python number takes the type of what it meets, and this one does not fit into {name}",
            f"Convert the other one first, or this one with numpy.{name}(…), which keeps the lowest bits",
        )

    # -- reads --

    def load(self, memory: Memory, indices: tuple[Any, ...], selection: Selection, line: int) -> Any:
        """Return elements; an index outside of the array is an error."""
        at = self._place(memory, indices, selection, line)
        if memory.shadow is None and not memory.per_block:
            if isinstance(at, Run):
                return _read(memory, memory.data[at.start : at.start + at.count])
            return _read(memory, memory.data.take(at) if at.ndim else memory.data[int(at)])
        return self._tracked(memory, at, selection, line)

    def own(self, memory: Memory, own: Own, default: Any, selection: Selection, line: int) -> Any:
        """Return each lane's own element; the default (None: zero) where the array has none."""
        number, total = own.number, size(selection, self.count)
        if isinstance(number, Run) and memory.shadow is None:
            stop = min(number.start + number.count, memory.count)
            values = _read(memory, memory.data[number.start : max(stop, number.start)])
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
                found[lanes] = _read(memory, memory.data.take(at))
            else:
                chosen = inner(selection, lanes)
                found[lanes] = self._tracked(memory, at, chosen, line)
        return found

    def _tracked(self, memory: Memory, at: Any, selection: Selection, line: int) -> Any:
        position, lanes = self._positions(memory, at, selection)
        self._note(memory, "read", position, lanes, line)
        return _read(memory, memory.data.take(position))

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
        chosen = np.flatnonzero(np.broadcast_to(self.has(memory, own), size(selection, self.count)))
        if len(chosen) == 0:
            return
        at = np.asarray(number)[chosen]
        if memory.shadow is not None:
            position, lanes = self._positions(memory, at, inner(selection, chosen))
            self._note(memory, "write", position, lanes, line)
        target[at] = pick(value, chosen)

    def store_result(
        self,
        memory: Memory,
        own: Own,
        operation: Any,
        operands: tuple[Any, ...],
        selection: Selection,
        line: int,
    ) -> None:
        """Write what an operation gives to each lane's own element: straight there, if the elements are neighbours."""
        number = own.number
        if not isinstance(number, Run) or memory.shadow is not None:
            self.store_own(memory, own, operation(*operands), selection, line)
            return
        room = memory.data[number.start : min(number.start + number.count, memory.count)]
        operation(*(one if one.ndim == 0 else one[: len(room)] for one in operands), out=room)

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
        self._note(memory, "exchange" if name == "exchange" else "atomic", position, lanes, line)
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
        only_read = (
            not memory.writable and not memory.per_block
        )  # of the others a number reads without a default
        return self.batch.error(
            line,
            f"{self._who(selection, lane)}: {memory.name}[{place}]",
            f"the array has {shape} elements, and nothing lies there",
            "Check the index first" + ", or use .get(index, default)" * only_read,
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


def _read(memory: Memory, values: Any) -> Any:
    return numbers.truth(values) if memory.holds_truth else values


_ATOMICS: dict[str, Any] = {
    "add": lambda old, value: old + value,
    "min": min,
    "max": max,
    "exchange": lambda _old, value: value,
    # By their bits, as the hardware does.
    "cas": lambda old, expected, value: value if old.tobytes() == expected.tobytes() else old,
}
