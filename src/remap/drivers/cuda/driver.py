"""`CudaDriver`: the groups of calls together, with what the driver itself holds, and its end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import NoReturn

from remap.drivers.cuda import bindings, capabilities
from remap.drivers.cuda.callbacks import HostFunctionCalls
from remap.drivers.cuda.devices import DeviceCalls
from remap.drivers.cuda.graph_memory import CaptureCalls, GraphMemoryCalls
from remap.drivers.cuda.graphs import GraphCalls
from remap.drivers.cuda.managed import ManagedCalls
from remap.drivers.cuda.memory import MemoryCalls
from remap.drivers.cuda.multicast import MulticastCalls
from remap.drivers.cuda.pinned import PinnedCalls
from remap.drivers.cuda.pools import PoolCalls
from remap.drivers.cuda.repeats import RepeatCalls
from remap.drivers.cuda.shared_events import SharedEventCalls
from remap.drivers.cuda.work import WorkCalls
from remap.errors import ForkedError
from remap.forks import in_child
from remap.types import Capability


class CudaDriver(
    MemoryCalls,
    WorkCalls,
    DeviceCalls,
    PinnedCalls,
    PoolCalls,
    ManagedCalls,
    HostFunctionCalls,
    SharedEventCalls,
    MulticastCalls,
    GraphCalls,
    GraphMemoryCalls,
    CaptureCalls,
    RepeatCalls,
):
    """The driver of NVIDIA GPUs, through `cuda.bindings.driver`.

    It implements `Driver` and the optional powers of `protocol`, `powers` and `graph_powers`. Opening raises
    `RemapError` where the bindings, the library or a device are missing. In a child of `fork` every call raises
    `ForkedError`.
    """

    name = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self._capabilities: dict[int, Mapping[str, Capability]] = {}
        if _forked:
            raise _refusal("open the CUDA driver")
        bindings.start()
        _opened.add(self)

    def version(self) -> str:
        return bindings.version_text()

    def shutdown(self) -> None:
        self.release_all_contexts()

    def capabilities(self, device: int) -> Mapping[str, Capability]:
        known = self._capabilities.get(device)
        if known is None:
            # Two threads may both probe; the probes undo themselves, and the first answer stays.
            known = self._capabilities.setdefault(device, capabilities.probe(self, device))
        return known


class ForkedCudaDriver:
    """What a `CudaDriver` becomes in a child of fork: CUDA does not work there, so nothing is left to call.

    The driver changes its class instead of asking before every call: that costs nothing and cannot be forgotten.
    """

    name = "cuda"

    def shutdown(self) -> None:
        """Do nothing: what the driver held belongs to the parent."""

    def __getattr__(self, attribute: str) -> NoReturn:
        """Refuse every call."""
        raise _refusal(f"CUDA call {attribute!r}")


def _refusal(asked: str) -> ForkedError:
    return ForkedError(
        asked,
        rule="CUDA was opened in this process's parent, and does not work after fork",
        next_step='Start processes with multiprocessing\'s "spawn" or "forkserver" method',
    )


_opened: weakref.WeakSet[CudaDriver] = weakref.WeakSet()
_forked = False


def _in_child() -> None:
    global _forked  # noqa: PLW0603 (it says what happened to this process, and that never ends)
    _forked = _forked or bool(_opened)
    for driver in list(_opened):
        driver.lock = threading.RLock()  # the parent's may be held by a thread that does not exist here
        driver.__class__ = ForkedCudaDriver  # type: ignore[assignment] # not a subclass: it has none of the calls


in_child(_in_child)
