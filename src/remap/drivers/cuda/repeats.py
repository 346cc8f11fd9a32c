"""Launches that are made again and again: handles and numbers become objects of the bindings once, not every time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from remap.drivers.cuda.bindings import cuda, failure
from remap.drivers.cuda.graphs import graph_launch_failed
from remap.drivers.cuda.work import launch_failed
from remap.errors import DriverError
from remap.types import LaunchConfig, PackedArguments


class RepeatCalls:
    """`SupportsRepeats` of the CUDA driver; it keeps no state."""

    def repeat_launch(
        self, context: int, function: int, config: LaunchConfig, stream: int, arguments: PackedArguments
    ) -> Callable[[], None]:
        call = partial(
            cuda.cuLaunchKernel,
            cuda.CUfunction(function),
            *config.grid,
            *config.block,
            config.shared_bytes,
            cuda.CUstream(stream),
            arguments.pointers,
            0,
        )
        return _repeat(context, call, partial(launch_failed, config), arguments)

    def repeat_graph_launch(self, context: int, executable: int, stream: int) -> Callable[[], None]:
        call = partial(cuda.cuGraphLaunch, cuda.CUgraphExec(executable), cuda.CUstream(stream))
        return _repeat(context, call, graph_launch_failed)


def _repeat(
    context: int, call: Callable[[], Any], failed: Callable[[Any], DriverError], keep: object = None
) -> Callable[[], None]:
    current, own = cuda.cuCtxGetCurrent, cuda.CUcontext(context)

    def repeat(_kept: object = keep) -> None:
        _, found = current()
        # Most programs keep one context current. (An error of that call would be this one's, too.)
        (err,) = call() if found == own else _elsewhere(own, call)
        if err:
            raise failed(err)

    return repeat


def _elsewhere(own: Any, call: Callable[[], Any]) -> Any:
    """Make a call in a context that is not the current one."""
    (err,) = cuda.cuCtxPushCurrent(own)
    if err:
        raise failure("cuCtxPushCurrent", err)
    try:
        return call()
    finally:
        cuda.cuCtxPopCurrent()
