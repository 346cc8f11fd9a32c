"""Double-buffered copies: while the device works on one half, the other half is filled, copied and read.

    python double_buffer.py

The recommendation of `remap.advise(…, alternating=True)`: CPU and GPU work on the same data in turns, and neither waits
for page faults. Each of two sides has a stream, pinned host memory and device memory of its own; a side is used again
when its stream has passed. Runs on both drivers.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

import remap

PARTS, COUNT = 8, 1 << 18


@remap.kernel
def scale(x: remap.Slice, out: remap.DisjointSlice, factor: np.float32) -> None:
    """Multiply each element."""
    i = remap.index_1d()
    out[i] = x[i] * factor


class Side:
    """One of the two halves: its stream, and memory on both ends."""

    def __init__(self, stack: ExitStack) -> None:
        self.stream = stack.enter_context(remap.Stream())
        self.sent = stack.enter_context(remap.pinned(COUNT, "float32"))
        self.received = stack.enter_context(remap.pinned(COUNT, "float32"))
        self.x = stack.enter_context(remap.DeviceBuffer.empty(COUNT, "float32"))
        self.y = stack.enter_context(remap.DeviceBuffer.empty(COUNT, "float32"))

    def begin(self, part: np.ndarray, factor: float) -> None:
        """Fill the pinned memory, and queue a copy there, the kernel, and a copy back."""
        self.sent.numpy()[:] = part
        self.x.copy_from(self.sent, stream=self.stream)
        scale.launch(self.x, self.y, np.float32(factor), grid=COUNT // 256, block=256, stream=self.stream)
        self.received.copy_from(self.y, stream=self.stream)

    def end(self) -> np.ndarray:
        """Wait for this side alone, and return what came back."""
        self.stream.synchronize()
        return self.received.numpy().copy()


def main() -> int:
    """Send all parts through, two at a time, and check the results."""
    parts = np.random.default_rng(0).random((PARTS, COUNT), np.float32)
    results: list[np.ndarray] = []
    with ExitStack() as stack:
        sides = [Side(stack), Side(stack)]
        for turn, part in enumerate(parts):
            side = sides[turn % 2]
            if turn >= 2:
                results.append(side.end())  # the other side is at work meanwhile
            side.begin(part, 3)
        results += [sides[turn % 2].end() for turn in range(PARTS, PARTS + 2)]
    right = all((found == part * np.float32(3)).all() for found, part in zip(results, parts, strict=True))
    print(f"{PARTS} parts of {remap.sizes.format_size(parts[0].nbytes)} on the {remap.driver().name} driver")
    print("PASS" if right else "FAIL")
    return not right


if __name__ == "__main__":
    raise SystemExit(main())
