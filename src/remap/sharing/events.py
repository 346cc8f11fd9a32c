"""`SharedEvent`: work handed over between processes without a host that waits.

The writer records the event after its work and says so; the reader lets its stream, or itself, wait for it. Memory that
is shared has no order of its own: without such a hand-over, or a wait on the host and a message after it, a reader may
see anything.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NoReturn, Self, cast

from remap.drivers.powers import SupportsSharedEvents
from remap.ends import End
from remap.errors import ShareError
from remap.locations import DeviceLike, device
from remap.streams import Event


class SharedEvent(Event):
    """An event that other processes can wait for, and record. Source: cuEventCreate with CU_EVENT_INTERPROCESS.

    It is used as every event is: `stream.record(event)`, `stream.wait(event)`, `event.synchronize()`. A wait is for the
    latest record at the time of the call, whichever process made it, so the writer has to say that it has recorded
    before the reader waits. It travels through `multiprocessing`, or as 64 bytes through anything else; CUDA opens it
    in other processes only. Its maker closes it last, as CUDA does not say what becomes of the others' otherwise; on
    the host driver waits for a maker that has died end.
    """

    __slots__ = ()

    kind: ClassVar[str] = "shared event"

    def __init__(self, at: DeviceLike | None = None, *, data: bytes | None = None) -> None:
        self.device = device(at)
        # Not Event.__init__, which creates an event of this process alone.
        super(Event, self).__init__(self.device._driver)
        driver = self._driver
        if not isinstance(driver, SupportsSharedEvents):
            raise ShareError(
                "a shared event",
                rule="the driver has none",
                next_step="Wait on the host (stream.synchronize()), then send a message",
            )
        self._end = End(driver)
        with self.device.current():
            self.handle = driver.create_shared_event() if data is None else driver.import_event(bytes(data))
            self._open = True  # from here on an interrupt leaves it to its finaliser
        self._opened()

    @classmethod
    def open(cls, data: bytes, at: DeviceLike | None = None) -> Self:
        """Open another process's event from its `to_bytes()`, on the device that it was made on.

        Raises `DriverError` if its maker has closed it or has died, or the bytes are none of an event.
        """
        return cls(at, data=data)

    def to_bytes(self) -> bytes:
        """Return the 64 bytes by which other processes open it. Source: cuIpcGetEventHandle."""
        with self._named(), self.device.current():
            return bytes(self._driver.export_event(self.handle))

    def __reduce__(self) -> NoReturn:
        """Refuse plain pickling: an event in a file would mean nothing."""
        raise ShareError(
            "pickling a shared event",
            rule="it lives as long as its maker; only multiprocessing can pass it on",
            next_step="Send it through a Queue, Pipe or Process of multiprocessing, or send to_bytes()",
        )


def _open(data: bytes, index: int) -> SharedEvent:
    return SharedEvent(index, data=data)


def _reduce(event: SharedEvent) -> tuple[Any, ...]:
    return _open, (event.to_bytes(), event.device.index)


cast("Any", ForkingPickler).register(SharedEvent, _reduce)
