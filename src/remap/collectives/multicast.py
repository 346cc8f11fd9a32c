"""`MulticastCollectives`: ranks meet, reduce and gather through multicast memory, in kernels and in stream order.

A round is one meeting of all ranks. Its number tells which of two slots it uses, so that a rank which is a round ahead
writes into the other one; it cannot be two ahead, since it would have to pass a meeting that the slowest rank has not
come to. The counter of arrivals grows by one for each rank and round, and is compared by the sign of a difference, so
it may wrap around.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from remap.arrays import DeviceArray
from remap.collectives.layout import ARRIVALS, DATA, RESULT, STATUS
from remap.errors import InvalidValueError, ShareError, not_supported
from remap.kernels import Kernel, Module, load
from remap.lifetime import Rollback, end_block
from remap.locations import Device, DeviceLike, device
from remap.sharing.agreement import Agreement
from remap.sharing.exchange import Exchange
from remap.sharing.multicast import require_multicast
from remap.sharing.symmetric import SymmetricBuffer
from remap.sizes import KiB, Size, format_size, parse_size, round_up
from remap.spans import Span
from remap.streams import StreamLike, as_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

SOURCE = Path(__file__).parent / "multimem.cu"
"""The kernels, as CUDA C++."""

PARAMETERS: dict[str, Sequence[str]] = {
    "meet": ("pointer", "pointer", "uint32", "uint32", "uint64"),
    "add_squares": ("pointer", "uint64", "pointer", "uint32"),
    "reduce_norm": ("pointer", "pointer", "pointer", "uint32", "uint32", "uint64"),
    "store_all": ("pointer", "uint64", "pointer", "uint64"),
}
"""The kernels' names and the types of their parameters."""

_THREADS = 256
_MOST_BLOCKS = 1024


class MulticastCollectives:
    """What all ranks of an exchange compute together, in the network that links their devices.

    Every rank calls the same methods in the same order, on one stream or on streams that are ordered. Each call is one
    round; work is queued, and only what returns a number waits. A kernel that waits for other ranks gives up after
    `timeout` seconds: the collectives are broken then, and say so at the next wait.
    """

    NEEDS: ClassVar[tuple[int, int]] = (9, 0)
    """The lowest compute capability that has multimem instructions."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        capacity: Size = 64 * KiB,
        device: DeviceLike | None = None,
        timeout: float = 30.0,
        first_round: int = 0,
    ) -> None:
        """Make the shared memory and load the kernels; every rank calls this, and all succeed or none.

        `capacity` is how many bytes one call may gather, over all ranks. Rounds are counted from `first_round`, the
        same on every rank. Raises the same `ShareError` on every rank where one has no multicast or a device below
        sm_90.
        """
        self.exchange = exchange
        self.capacity = round_up(parse_size(capacity, "capacity"), 256)
        self._round = first_round
        self._limit = int(timeout * 1e9)
        self._broken = False
        agreement = Agreement(exchange, f"multicast collectives over {exchange.size} ranks", None)
        found: list[Device] = []
        loaded: list[Module] = []

        def look() -> None:
            found.append(_fitting(device))

        def prepare() -> None:
            loaded.append(load(SOURCE, device=found[0]))
            start = np.zeros(DATA // 4, np.uint32)
            start[ARRIVALS // 4] = first_round * exchange.size % (1 << 32)
            self.memory.local.copy_from_host(start)

        agreement.step("find what multicast needs", look)
        self.device = found[0]
        self.memory = SymmetricBuffer(
            exchange, DATA + 2 * self.capacity, device=self.device, multicast=True, timeout=None
        )
        with Rollback() as rollback:
            rollback.undo(self.memory.close)
            try:
                agreement.step("load its kernels", prepare)
            except BaseException:
                for module in loaded:
                    module.close()
                raise
        self._module = loaded[0]
        self._kernels = {name: self._kernel(name) for name in PARAMETERS}

    def _kernel(self, name: str) -> Kernel:
        from remap.collectives.twins import TWINS

        kernel = self._module.function(name, PARAMETERS[name])
        kernel.host(TWINS[name])
        return kernel

    @property
    def round(self) -> int:
        """The number of the next round."""
        return self._round

    def meet(self, *, stream: StreamLike | None = None) -> None:
        """Let later work of a stream wait until every rank has come here; does not wait on the host."""
        self._launch("meet", *self._meeting(), stream=stream)

    def norm(self, x: Span | DeviceArray, *, stream: StreamLike | None = None) -> float:
        """Return the L2 norm of a vector of float32 that lies in parts on all ranks; `x` is this rank's part. Waits."""
        out = self.memory.local.array("float32", 1, offset=RESULT)
        self.norm_into(out, x, stream=stream)
        self.check(stream=stream)
        return float(out.to_host()[0])

    def norm_into(
        self, out: Span | DeviceArray, x: Span | DeviceArray, *, stream: StreamLike | None = None
    ) -> None:
        """Queue `norm`, with the result, one float32, written to `out`; does not wait."""
        count = _count(x)
        slot = self._round & 1
        if count:
            own = self.memory.local
            self._launch("add_squares", x, count, own, slot, stream=stream, threads=count)
        self._launch("reduce_norm", out, *self._meeting(), stream=stream)

    def gather(self, x: Span | DeviceArray, *, stream: StreamLike | None = None) -> DeviceArray:
        """Return the parts of all ranks as one array of float32, (ranks, n); every rank's has the same n.

        The work is queued, and the array complete once the stream has passed. It lies in memory of the collectives, and
        stays as it is until the next round: what reads it must be queued on the same stream before that.
        """
        count, ranks, rank = _count(x), self.exchange.size, self.exchange.rank
        if count * 4 * ranks > self.capacity:
            raise InvalidValueError(
                f"gathering {format_size(count * 4)} from each of {ranks} ranks",
                rule=f"there is room for {format_size(self.capacity)}",
                next_step="Make the collectives with a larger capacity",
            )
        base = DATA + (self._round & 1) * self.capacity
        everyone = self.memory.multicast
        if count:
            at = base + rank * count * 4
            self._launch("store_all", x, count, everyone, at, stream=stream, threads=count)
        self.meet(stream=stream)
        return self.memory.local.array("float32", (ranks, count), offset=base)

    def check(self, *, stream: StreamLike | None = None) -> None:
        """Wait for a stream, and raise `ShareError` if one of its rounds was left before every rank had come."""
        queue = as_stream(stream, self.device)
        with self.device.current():
            self.device._driver.synchronize_stream(queue.handle)
        status: NDArray[Any] = self.memory.local.to_host("uint32", 1, offset=STATUS)
        self._broken = self._broken or bool(status[0])
        self._check()

    def _meeting(self) -> tuple[Any, ...]:
        """Count a round, and return the arguments of its meeting."""
        number, ranks = self._round, self.exchange.size
        self._round += 1
        expected = (number + 1) * ranks % (1 << 32)
        return self.memory.local, self.memory.multicast, expected, number & 1, self._limit

    def _launch(self, name: str, *arguments: Any, stream: StreamLike | None, threads: int = 1) -> None:
        self._check()
        block = _THREADS if threads > 1 or name == "add_squares" else 1
        grid = min(-(-threads // block), _MOST_BLOCKS)
        self._kernels[name].launch(*arguments, grid=grid, block=block, stream=stream)

    def _check(self) -> None:
        if self._broken:
            raise ShareError(
                f"a round of {self.exchange.size} ranks",
                rule=f"not every rank came to one of its meetings within {self._limit / 1e9:g} s",
                next_step="The ranks are out of step: close the collectives and make new ones",
            )

    def close(self) -> None:
        """Give the memory and the kernels up, when the work of this rank is done. Closing again does nothing."""
        self.memory.close()
        self._module.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close it; if the block failed, what closing raises is a note on its error."""
        end_block(error, self.close)


def _fitting(which: DeviceLike | None) -> Device:
    """Return a device that multicast kernels run on; raises `NotSupportedError` naming what is missing."""
    found = device(which)
    check_architecture(found.properties.compute_capability, str(found))
    require_multicast(found)
    return found


def check_architecture(capability: tuple[int, int], name: str) -> None:
    """Raise `NotSupportedError` for a device whose compute capability has no multimem instructions."""
    if capability < MulticastCollectives.NEEDS:
        raise not_supported(
            "cuMulticastCreate",
            f"multicast kernels on {name}",
            f"multimem instructions need sm_90 or newer, and it is sm_{capability[0]}{capability[1]}",
            capability="multicast",
        )


def _count(x: Span | DeviceArray) -> int:
    """Return how many float32 there are."""
    if isinstance(x, DeviceArray):
        if x.dtype != np.float32:
            raise InvalidValueError(f"an array of {x.dtype}", rule="the kernels take float32")
        return x.size
    return x.size // 4
