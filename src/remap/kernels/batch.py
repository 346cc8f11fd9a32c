# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false
# (what NumPy gives for values of any type has no type that a checker could know)
"""A batch of blocks that the host runs together: who its threads are, what orders them, and arrays as they see them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from remap.errors import KernelError
from remap.kernels.ir import WIDEST
from remap.kernels.lanes import Own, Run, Selection, pick
from remap.kernels.shadows import BlockShadow, GridShadow, Who
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

    def __post_init__(self) -> None:
        self.holds_truth = self.data.dtype.kind == "b"

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
        # A width that row × width does not fit with would give one element to two threads.
        owns = np.broadcast_to((col < stride) & (stride <= WIDEST), self.count)
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
        block, thread = divmod(number, self.threads)
        return f"block {_coordinates(block, self.grid)}, thread {_coordinates(thread, self.block)}"

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


def _full(value: Any, count: int) -> Any:
    return np.broadcast_to(np.asarray(value), count)


def _coordinates(number: int, extents: Dim3) -> str:
    x, y, z = extents
    if y == z == 1:
        return str(number)
    parts = (number % x, number // x % y, number // (x * y))
    return f"({', '.join(map(str, parts[: 2 if z == 1 else 3]))})"
