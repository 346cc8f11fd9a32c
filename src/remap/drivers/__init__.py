"""Drivers: the choice of one, made in one place.

`open(name)` is the only importer of a concrete driver. `current()` is the one that this process uses: the one named
by `use()` or by `REMAP_DRIVER`, else CUDA where it works and the host driver elsewhere.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

from remap import lifetime
from remap.drivers.protocol import Driver
from remap.errors import DriverNotFoundError, ForkedError, InUseError, InvalidValueError, RemapError
from remap.forks import in_child
from remap.lifetime import Rollback
from remap.loading import loading
from remap.sizes import counted

__all__ = [
    "NAMES",
    "Driver",
    "close",
    "current",
    "end",
    "innermost",
    "let_go",
    "on_leave",
    "open",
    "opened",
    "use",
]

NAMES = ("cuda", "host")
"""The drivers there are, in the order in which they are tried."""


def open(name: str | None = None, /, **options: Any) -> Driver:
    """Open and return a new driver, without making it the current one.

    `name` is `"cuda"`, `"host"` or None for the first that opens; `options` go to the driver (the host driver's
    `devices=`, `memory=`, …; without any, it takes those of `REMAP_HOST_OPTIONS`). Raises `DriverNotFoundError`
    listing every attempt and its reason.
    """
    if name is not None and name not in NAMES:
        raise InvalidValueError(
            f"driver {name!r}",
            rule=f"the drivers are {', '.join(NAMES)}",
            next_step="Name one of them, or none for the first that opens",
        )
    attempts: list[tuple[str, str]] = []
    for candidate in NAMES if name is None else (name,):
        try:
            driver = _load(candidate)
            if options:
                _check_names(candidate, driver, options)
            elif candidate == "host":
                from remap.drivers.host.outside import open_described

                driver = partial(open_described, driver)
            opened: Driver = driver(**options)
            return opened
        except InvalidValueError:
            raise
        except RemapError as error:
            attempts.append((candidate, str(error)))
            _log.info("driver %s does not open: %s", candidate, error)
    raise DriverNotFoundError(tuple(attempts), next_step='Run "remap doctor" for the cures')


def _check_names(name: str, driver: type[Driver], options: dict[str, Any]) -> None:
    """Raise for options that a driver does not have."""
    import inspect
    from difflib import get_close_matches

    known = list(inspect.signature(driver).parameters)
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            raise InvalidValueError(
                f"option {option}= of the {name} driver",
                rule=f"its options are {', '.join(known)}" if known else "it has no options",
                next_step=f"Did you mean {near[0]}=?" if near else "",
            )


def _load(name: str) -> Any:
    with loading():
        if name == "cuda":
            from remap.drivers.cuda import CudaDriver

            return CudaDriver
        if sys.platform != "linux":  # its modules cannot even be loaded there
            raise RemapError(
                "the host driver cannot be opened",
                rule=f"it is made of Linux memory files, and this platform is {sys.platform}",
                next_step="Use Linux, or a container with it",
            )
        from remap.drivers.host import HostDriver

        return HostDriver


class _Choice:
    """The driver that this process uses, opened on first use; `changing` is held by whoever ends its use."""

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.epoch = 0
        self.renew_locks()

    def renew_locks(self) -> None:
        """Make new locks: in a forked child, threads that do not exist there may hold the old ones."""
        self.lock = threading.Lock()
        self.changing = threading.Lock()


_choice = _Choice()
_ended: WeakSet[Any] = WeakSet()  # the drivers that were shut down here; of a wrapper, what it wraps
_adrift: WeakSet[lifetime.Resource] = WeakSet()
_listeners: list[Callable[[Driver], None]] = []
on_enter: list[Callable[[Driver], None]] = []
"""Called with each driver that becomes the current one; a trace listens to its calls from then on."""

_log = logging.getLogger("remap.drivers")


def current() -> Driver:
    """Return the driver that this process uses, opening it on first use.

    Raises `DriverNotFoundError`, and `ForkedError` in the forked child of a process that used CUDA (the host driver
    is opened afresh there).
    """
    driver = _choice.driver
    if driver is not None and _choice.epoch == lifetime.epoch():
        return driver
    with _choice.lock:
        if _choice.driver is not None and _choice.epoch != lifetime.epoch():
            if _choice.driver.name == "cuda":
                raise ForkedError(
                    "use of CUDA in a forked child",
                    rule="a CUDA context does not survive fork",
                    next_step='Start processes with multiprocessing.get_context("spawn")',
                )
            _choice.driver = None
        if _choice.driver is None:
            _set(open(_asked_for()))
        assert _choice.driver is not None
        return _choice.driver


def opened() -> Driver | None:
    """Return the driver that this process uses, None while it has opened none."""
    return _choice.driver if _choice.epoch == lifetime.epoch() else None


def _asked_for() -> str | None:
    """Return the driver that the environment names, None if it names none; raises `InvalidValueError`."""
    name = os.environ.get("REMAP_DRIVER") or None
    if name is not None and name not in NAMES:
        raise InvalidValueError(
            f"REMAP_DRIVER={name}",
            rule=f"the drivers are {', '.join(NAMES)}",
            next_step="Set the environment variable to one of them, or unset it",
        )
    return name


def use(driver: str | Driver, /, **options: Any) -> Driver:
    """Make `driver` the current one and return it.

    `driver` is a name, with options for it (`use("host", devices=4, memory="256MiB")`), or a driver object, such as
    one of the wrappers around another. With a name, the present driver is shut down, and can be used no more; with an
    object it goes on, so that there is a way back. (For tests there is `remap.testing.simulated`.) Raises `InUseError`
    while objects of the present driver live, and where another thread makes one in the middle of the change: one of
    the two is told.

    CUDA has no options. Those of the host driver say what machine it simulates; where none are given,
    `REMAP_HOST_OPTIONS="devices=4,memory=256MiB"` in the environment may name them:

    - `devices` (2): how many there are
    - `memory` ("512MiB"): what each has, or one size for each
    - `host_memory` ("1GiB"): what can be allocated on the host, over all nodes, and not backups (`remap.host_pool`)
    - `numa_nodes` (1): how many nodes the host has
    - `granularity` ("2MiB"): what sizes of physical allocations are multiples of
    - `peers` ("all"): who reaches whom; "none", or for each device a list with a truth value for each
    - `clock_khz` (1,000,000): the speed, by which the fastest is found; one number, or one for each
    - `coherent` (False): the CPU may be granted access to device memory, as on NVIDIA Grace
    - `integrated` (as `coherent`): that memory is the CPU's own, so that moving it to the host frees nothing
    - `compression` (False): compressible memory is granted, and not merely accepted
    - `capabilities` ({}): features by name; False switches one off, to see how a program does without it, and
      `{"hmm": True}` lets kernels reach the host arrays that a launch names
    """
    name = driver if isinstance(driver, str) else getattr(driver, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"a driver is one of {', '.join(NAMES)}, or a driver object, not {driver!r}")
    asked = f"change of driver to {name!r}"
    with _choice.changing, Rollback() as rollback:
        _check_idle(asked)
        if isinstance(driver, str):
            new = open(driver, **options)
            rollback.undo(new.shutdown)
            previous = _leave(asked, rollback)
        elif options:
            rule = "a driver object has its options already"
            raise InvalidValueError(f"options {sorted(options)}", rule=rule)
        else:  # it may be a wrapper around the previous one, which then goes on
            _check_not_ended(driver)
            new, previous = driver, None
            _leave(asked, rollback)
        with _choice.lock:
            lifetime.enter(new)
            _set(new)
    if previous is not None:
        end(previous)
    return new


def close(*, shutdown: bool = True) -> None:
    """Shut the current driver down, contexts included; the next use opens one again.

    Without `shutdown` it goes on, for whoever opened it. Raises `InUseError` while objects live.
    """
    with _choice.changing:
        with Rollback() as rollback:
            previous = _leave("closing the driver", rollback)
            with _choice.lock:
                _choice.driver = None
        if previous is not None and shutdown:
            end(previous)


def end(driver: Any) -> None:
    """Shut a driver down that is no longer the current one, unless somebody still looks at memory of it.

    Ending it again does nothing.
    """
    if innermost(driver) in _ended:
        return
    _ended.add(innermost(driver))
    if not any(not thing.closed and innermost(thing._driver) is innermost(driver) for thing in _adrift):
        driver.shutdown()


def let_go(thing: lifetime.Resource) -> None:
    """Let an object that refuses to close stand in nobody's way: it is given back when it is collected, in silence.

    For what failed tests leave. Until then its driver is not shut down, since what looks at the memory would crash.
    """
    lifetime._live.pop(thing.serial, None)
    thing._warns = False
    _adrift.add(thing)


def _check_not_ended(driver: Any) -> None:
    if innermost(driver) in _ended:
        raise InvalidValueError(
            f"use of {driver!r}",
            rule="it was shut down when another driver was named, or by closing it",
            next_step=f'Open another with the same options: remap.use("{driver.name}", ...). Tests go back with '
            "remap.testing.simulated",
        )


def innermost(driver: Any) -> Any:
    """Return the driver inside of all wrappers."""
    while (inner := getattr(driver, "inner", None)) is not None:
        driver = inner
    return driver


def on_leave(listener: Callable[[Driver], None]) -> None:
    """Call `listener(driver)` before a driver is closed or another takes its place, when none of its objects live.

    For rooms that keep memory of it ready: they give it back there.
    """
    _listeners.append(listener)


def _leave(asked: str, rollback: Rollback) -> Driver | None:
    """Make sure that nothing of the present driver lives, or is coming to life, and return it if there is one."""
    driver = opened()
    if driver is not None:
        # Before the look at what lives: what another thread makes meanwhile is seen here, or is refused there.
        rollback.undo(lifetime.enter, driver)
        lifetime.leave(driver)
    _check_idle(asked)
    if driver is not None:
        for listener in _listeners:
            listener(driver)
    return driver


def _check_idle(asked: str) -> None:
    lifetime.drain()
    living = lifetime.live()
    if living:
        listed = "; ".join(str(thing.describe()) for thing in living[:5])
        raise InUseError(
            asked,
            rule=f"{counted(len(living), 'object')} of the present driver still alive: {listed}",
            next_step="Close them first (in tests, remap.testing.plugin closes what a failed one has left)",
        )


def _set(driver: Driver) -> None:
    _choice.driver = driver
    _choice.epoch = lifetime.epoch()
    _log.info("using the %s driver", driver.name)
    for listener in tuple(on_enter):
        listener(driver)


in_child(_choice.renew_locks)
