"""Kernels: Python callables that run on a stream's thread and see memory as their device does (T10)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from remap.drivers.host import linux
from remap.drivers.host.contexts import Contexts
from remap.drivers.host.copies import Spans
from remap.drivers.host.devices import Devices
from remap.drivers.host.guard import lose_context
from remap.drivers.host.machine import Machine
from remap.drivers.host.multicast import Teams
from remap.drivers.host.refusals import invalid
from remap.drivers.host.streams import Stream, Streams, failed
from remap.drivers.host.team import Team
from remap.drivers.host.work import OpaqueWork, Point, Work
from remap.errors import (
    ContextLostError,
    CudaResult,
    DriverError,
    IllegalAddressError,
    KernelError,
    driver_error,
)
from remap.sizes import format_size
from remap.types import LaunchConfig, PackedArguments, Touched


class Launch:
    """One launch as its kernel sees it (the protocol's `HostLaunch`).

    The views that `read` and `write` return are the memory itself and are valid while the kernel runs; one that is
    kept longer may show other memory, or none.
    """

    __slots__ = (
        "_arguments",
        "_config",
        "_device",
        "_launches",
        "_name",
        "_over",
        "host_ranges",
        "point",
        "work",
    )

    def __init__(
        self, launches: Launches, name: str, device: int, config: LaunchConfig, arguments: tuple[object, ...]
    ) -> None:
        self._launches = launches
        self._name = name
        self._device = device
        self._config = config
        self._arguments = arguments
        self._over = False
        self.work: Work | None = None
        self.point: Point | None = None
        # Host memory that the launch was given where devices reach all of it (the capability "hmm").
        self.host_ranges: list[Touched] = []

    @property
    def device(self) -> int:
        """The number of the device that the launch runs on."""
        return self._device

    @property
    def config(self) -> LaunchConfig:
        """Grid, block and dynamic shared memory."""
        return self._config

    @property
    def arguments(self) -> tuple[object, ...]:
        """The arguments as Python values."""
        return self._arguments

    def read(self, address: int, size: int) -> memoryview:
        """Return read-only bytes at an address; an unmapped or forbidden one faults the kernel."""
        return self._view(address, size, writes=False)

    def write(self, address: int, size: int) -> memoryview:
        """Return writable bytes at an address; an unmapped or forbidden one faults the kernel."""
        return self._view(address, size, writes=True)

    def _view(self, address: int, size: int, writes: bool) -> memoryview:
        if self._over:
            raise invalid("cuLaunchKernel", f"memory of {self._name}", "the launch is over")
        if size == 0:
            return memoryview(bytearray() if writes else b"")
        rule = self._launches.use(self, address, size, writes)
        if rule:
            raise self._fault("wrote" if writes else "read", address, size, rule)
        return linux.view(address, size, writes)

    def _fault(self, verb: str, address: int, size: int, rule: str) -> DriverError:
        asked = f"kernel {self._name} {verb} {format_size(size)} at {address:#x}"
        error = driver_error("cuLaunchKernel", CudaResult.ILLEGAL_ADDRESS, asked=asked, rule=rule)
        if isinstance(error, IllegalAddressError):
            # Recorded here: the kernel is faulty even if its code swallows the exception.
            lose_context(error)
        return error

    @contextmanager
    def multimem(self, address: int, size: int, *, writes: bool) -> Generator[tuple[memoryview, ...]]:
        """Yield the bytes of every replica behind a multicast address, for one operation (`MulticastLaunch`)."""
        if self._over or size <= 0:
            rule = "the launch is over" if self._over else "an operation has at least one byte"
            raise invalid("cuLaunchKernel", f"{size} bytes of multicast memory of {self._name}", rule)
        found = self._launches.use_multicast(self, address, size, writes)
        if isinstance(found, str):
            raise self._fault("used", address, size, found)
        with self._launches.teams.operation(*found, size) as replicas:
            if isinstance(replicas, str):
                raise self._fault("used", address, size, replicas)
            yield replicas

    def run(self, function: Callable[..., None]) -> None:
        """Call the kernel; whatever it raises loses the context."""
        try:
            function(self)
        except ContextLostError as error:
            lose_context(error)
        except KernelError as error:
            self._launches.report(error)
        except BaseException as error:  # noqa: BLE001 (a kernel cannot raise to anybody)
            lose_context(failed(f"kernel {self._name} on device {self._device}", error))
        finally:
            self._over = True


class Launches:
    """The call that queues kernels."""

    def __init__(
        self,
        machine: Machine,
        devices: Devices,
        contexts: Contexts,
        streams: Streams,
        spans: Spans,
        opaque: OpaqueWork,
        teams: Teams,
    ) -> None:
        self._machine = machine
        self._devices = devices
        self._contexts = contexts
        self._streams = streams
        self._spans = spans
        self._opaque = opaque
        self.teams = teams
        self._hmm = bool(devices.capabilities_of_all["hmm"])

    def launch(
        self,
        function: int | Callable[..., None],
        config: LaunchConfig,
        stream_handle: int,
        arguments: PackedArguments,
        touches: Sequence[Touched] | None,
    ) -> None:
        """Check the shape of a launch, log what it touches, and queue it."""
        call = "cuLaunchKernel"
        device = self._contexts.device(call)
        stream = self._streams.find(call, stream_handle)
        if not callable(function):
            rule = "the host driver runs Python callables, and has no compiled functions"
            raise driver_error(call, CudaResult.INVALID_HANDLE, asked=f"function {function!r}", rule=rule)
        if stream.device != device:
            rule = f"the current context is device {device}'s"
            raise driver_error(call, CudaResult.INVALID_HANDLE, asked=f"a launch on {stream}", rule=rule)
        self._check_config(call, device, config)
        name = str(getattr(function, "__qualname__", type(function).__qualname__))
        launch = Launch(self, name, device, config, tuple(arguments.values))
        with self._machine.lock:
            self._queue(function, stream, launch, touches)

    def report(self, error: KernelError) -> None:
        """Let the next wait raise what a kernel did wrongly; the context lives on."""
        self._machine.guard.reports.append(error)

    def _queue(
        self,
        function: Callable[..., None],
        stream: Stream,
        launch: Launch,
        touches: Sequence[Touched] | None,
    ) -> None:
        # The worker cannot begin before its work is known: `use` takes the lock that the caller holds.
        tick = self._machine.tick + 1
        kind = f"kernel {launch._name}"
        launch.point = self._streams.point(stream)
        work = launch.work = self._streams.submit(stream, kind, lambda: launch.run(function), tick=tick)
        self._machine.tick = tick
        if touches is None:
            self._opaque.record(work)
            return
        for touched in touches:
            if self._hmm and not self._spans.touches(touched.address, touched.address + touched.size):
                launch.host_ranges.append(touched)
            for region in self._spans.overlapping(touched.address, touched.address + touched.size):
                region.record(work, touched.writes)

    def use(self, launch: Launch, address: int, size: int, writes: bool) -> str:
        """Log that a running kernel touches a range; return the rule that it breaks by that, or nothing.

        What the kernel really touches is logged beside what its launch announced, so that no memory can be taken
        from under a view.
        """
        with self._machine.lock:
            found = self._spans.regions(1 << launch.device, address, size, writes, True, launch.point)
            if isinstance(found, str):
                given = any(
                    one.address <= address and address + size <= one.address + one.size
                    for one in launch.host_ranges
                    if one.writes or not writes
                )
                return "" if given else found
            if launch.work is not None:
                for region in found:
                    region.record(launch.work, writes)
            return ""

    def use_multicast(self, launch: Launch, address: int, size: int, writes: bool) -> tuple[Team, int] | str:
        """Log a use of a multicast address; return its object and the offset there, or the rule that it breaks."""
        with self._machine.lock:
            region = self._spans.mapping_at(address)
            if region is None or not isinstance(region.allocation, Team):
                what = "nothing is mapped there" if region is None else "it is no multicast address"
                return f"{what}, and multimem operations use nothing else"
            if address + size > region.end:
                return "it runs over the end of the multicast mapping"
            if not (region.writers if writes else region.readers) >> launch.device & 1:
                return f"device {launch.device} has no such right to the multicast mapping"
            if launch.work is not None:
                region.record(launch.work, writes)
            return region.allocation, address - region.base

    def _check_config(self, call: str, device: int, config: LaunchConfig) -> None:
        limits = self._devices.properties(device)
        for what, given, most in (
            ("grid", config.grid, limits.max_grid),
            ("block", config.block, limits.max_block),
        ):
            if not all(1 <= one <= top for one, top in zip(given, most, strict=True)):
                raise invalid(call, f"{what} {given}", f"its extents go from 1 to {most}")
        threads = config.block[0] * config.block[1] * config.block[2]
        if threads > limits.max_threads_per_block:
            rule = f"a block has at most {limits.max_threads_per_block} threads"
            raise invalid(call, f"block {config.block} of {threads} threads", rule)
        if not 0 <= config.shared_bytes <= limits.shared_memory_per_block_optin:
            rule = f"a block has at most {limits.shared_memory_per_block_optin}"
            raise invalid(call, f"{config.shared_bytes} bytes of shared memory", rule)
