"""Where things lie in each rank's memory: the same numbers as in `multimem.cu`, in bytes."""

from __future__ import annotations

ARRIVALS = 0
"""A counter, 32 bits: how many arrivals of ranks this rank's memory has seen."""

STATUS = 64
"""32 bits, written by this rank's kernels alone: whether one of them gave up waiting."""

RESULT = 128
"""This rank's norm, a float32."""

PARTIALS = 256
PARTIAL_STEP = 64
"""This rank's partial sums, float32: two, used by turns."""

DATA = 4096
"""Where what was gathered begins; everything before it is for the kernels."""
