"""Listening to a driver: every call that anyone makes of it, whoever holds it, for as long as somebody listens.

Objects hold their driver, so it cannot be changed for a wrapper while they live. Instead its methods are covered by
instance attributes for the time of a trace, and uncovered after it: who does not listen pays nothing.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import islice
from threading import get_ident
from time import perf_counter_ns
from typing import Any, TypeAlias

from remap import drivers
from remap.drivers.wrappers import _OWN_NAMES
from remap.errors import DriverError
from remap.forks import in_child
from remap.types import Location

CallRecord: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any] | None, Any, str | None, int, int, int]
"""Method, arguments, keywords, result, error, start and duration in ns, and thread of one call."""

Listener: TypeAlias = Callable[[CallRecord], None]

# Calls whose arguments hold objects of the program, which a record must not keep alive.
_HEAVY = frozenset({"launch", "graph_add_kernel", "launch_host_function", "graph_add_host", "load_module"})
_MISSING = object()
_MOST = 1000  # entries of a list that a record keeps


class Tap:
    """The cover over the methods of one driver."""

    def __init__(self, driver: Any, listeners: list[Listener]) -> None:
        self.driver = driver
        self.listening = True
        self._listeners = listeners
        self._covered: dict[str, Any] = {}

    def cover(self) -> None:
        """Cover the methods; what an interrupt leaves covered is known to `remove`."""
        driver = self.driver
        for name in dir(driver):
            if (
                name[0] == "_"
                or name in _OWN_NAMES
                or isinstance(inspect.getattr_static(driver.__class__, name, None), property)
            ):
                continue
            call = getattr(driver, name)
            if inspect.isroutine(call):
                self._covered[name] = driver.__dict__.get(name, _MISSING)
                setattr(driver, name, self._heard(name, call))

    def remove(self) -> None:
        """Uncover the methods; doing so again does what an interrupt has left.

        What still holds a covered one (a bound method kept somewhere) records nothing.
        """
        self.listening = False
        for name, before in self._covered.items():
            if before is _MISSING:
                self.driver.__dict__.pop(name, None)
            else:
                setattr(self.driver, name, before)
        self._covered.clear()

    def _heard(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        heavy, listeners = name in _HEAVY, self._listeners

        def heard(*arguments: Any, **keywords: Any) -> Any:
            if not self.listening:
                return call(*arguments, **keywords)
            start = perf_counter_ns()
            result, reason = None, None
            try:
                result = call(*arguments, **keywords)
            except BaseException as error:
                reason = error.name if isinstance(error, DriverError) else type(error).__name__
                raise
            finally:
                duration = perf_counter_ns() - start
                said = tuple([as_value(one) for one in arguments]) if heavy else arguments
                # None for no keywords: a record of plain values alone is nothing that the garbage collector looks at.
                record = (name, said, keywords or None, result, reason, start, duration, get_ident())
                for listener in listeners:
                    listener(record)
            return result

        heard.__name__ = name
        return heard


class Taps:
    """The drivers that are listened to, each once, whatever the number of listeners."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._taps: list[Tap] = []
        # Between threads of which one begins to listen as another ends: the drivers would be uncovered for both.
        self._lock = threading.Lock()

    def listen(self, listener: Listener) -> None:
        """Let a listener hear every call of the driver in use, and of those that come into use."""
        with self._lock:
            self._listeners.append(listener)
            driver = drivers.opened()  # after that: one that is opened meanwhile is seen here, or adds itself
            if driver is not None:
                self._add(driver)

    def leave(self, listener: Listener) -> None:
        """Let a listener hear nothing more; doing so again does what an interrupt has left."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if not self._listeners:
                self._clear()

    def add(self, driver: Any) -> None:
        """Listen to a driver that comes into use, if anybody listens."""
        with self._lock:
            if self._listeners:
                self._add(driver)

    def forget(self) -> None:
        """Record nothing in a forked child: what it would write is the parent's."""
        self._lock = threading.Lock()
        self._listeners.clear()
        self._clear()

    def _add(self, driver: Any) -> None:
        if any(tap.driver is driver for tap in self._taps):
            return
        tap = Tap(driver, self._listeners)
        self._taps.append(tap)
        try:
            tap.cover()
        except BaseException:  # an interrupt: a driver that is heard in part would pass for one that is heard
            tap.remove()
            self._taps.remove(tap)
            raise

    def _clear(self) -> None:
        while self._taps:
            self._taps[-1].remove()
            del self._taps[-1]


taps = Taps()
drivers.on_enter.append(taps.add)
in_child(taps.forget)


def as_value(value: Any) -> Any:
    """Return an argument or a result as a value that JSON can hold; what is no value is named by its type."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Location):
        return str(value)
    if isinstance(value, str):
        return value[:1000]
    if isinstance(value, bytes | bytearray):
        return {"bytes": len(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: as_value(getattr(value, one.name)) for one in fields(value) if one.name[0] != "_"}
    many: Any = value
    if isinstance(value, Mapping):
        return {str(as_value(key)): as_value(one) for key, one in islice(many.items(), _MOST)}
    if isinstance(value, Sequence | frozenset | set):
        return [as_value(one) for one in islice(many, _MOST)]
    return {"object": getattr(value, "__qualname__", type(value).__qualname__)}
