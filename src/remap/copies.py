"""The host's side of copies on a stream: kept for as long as they need it, and let go without a wait.

A program that waits for its stream, and never for the memory, would keep every array that it has copied from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from remap.drivers.graph_powers import CaptureMode
from remap.drivers.protocol import PER_THREAD_STREAM
from remap.errors import DriverError, KernelError
from remap.lifetime import captures_running
from remap.streams import Event, Queue, StreamCalls

_MUCH = 1 << 20
"""Bytes of host memory that may wait for an event."""
_OBJECT = 1 << 12
"""What a small array counts for beside its bytes."""


class Copies:
    """The host sides of copies that one thread queues on one stream: those before an event each, and those since.

    Rejected: a host function behind each copy, which holds the stream up until Python has run it.
    """

    __slots__ = ("marked", "since", "spare", "weight")

    def __init__(self) -> None:
        self.marked: deque[tuple[Event, list[object]]] = deque()
        self.since: list[object] = []
        self.spare: Event | None = None
        self.weight = 0

    def add(self, queue: Queue, thing: object) -> list[object]:
        """Keep one more, and let go of those whose event has passed; return what nothing but a wait can tell of."""
        self.since.append(thing)
        self.weight += _OBJECT + int(getattr(thing, "nbytes", 0))
        # The handle of another library's stream may be another stream's the next time, behind which no event tells.
        lasting = queue.handle <= PER_THREAD_STREAM or issubclass(type(queue.owner), StreamCalls)
        if lasting and self.weight < _MUCH:
            return []
        with suppress(DriverError), queue.device.current():
            # What is captured is a node of a graph, and an event behind it marks nothing.
            if not captures_running() and not queue.device._driver.stream_capturing(queue.handle):
                self._mark(queue)
        if lasting:
            return []
        left, self.since, self.weight = self.since, [], 0
        return left

    def _mark(self, queue: Queue) -> None:
        driver = queue.device._driver
        with suppress(IndexError):  # all of them have passed, or a wait has dropped them
            while _passed(driver, self.marked[0][0]):
                event, _ = self.marked.popleft()
                if self.spare is None:
                    self.spare = event
                else:
                    event.close()
        if self.spare is None:
            self.spare = Event(queue.device)
            self.spare._warns = False  # as those of `_Noted.mark`
        event = self.spare
        with event._end.kept() as there:
            if there:  # else a wait has dropped it, and all that was before
                driver.record_event(event.handle, queue.handle)
                self.marked.append((event, self.since))
                self.spare, self.since, self.weight = None, [], 0

    def clear(self) -> None:
        """Drop everything."""
        spare, self.spare = self.spare, None
        if spare is not None:
            spare.close()
        with suppress(IndexError):
            while True:
                self.marked.popleft()[0].close()


def _passed(driver: Any, event: Event) -> bool:
    """Tell whether an event has passed, also where a capture is on in the mode that forbids to ask."""
    swap: Callable[[CaptureMode], CaptureMode] | None = getattr(driver, "exchange_capture_mode", None)
    before = None if swap is None else swap(CaptureMode.RELAXED)
    try:
        with event._end.kept() as there:
            return not there or bool(driver.event_done(event.handle))
    except KernelError as error:  # nobody waits here, so it is not told here
        error.leave()
        return False
    finally:
        if swap is not None and before is not None:
            swap(before)
