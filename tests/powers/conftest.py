"""What the tests of optional powers share: the present driver with a current context, and gates in streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator

import numpy as np
import numpy.typing as npt
import pytest

import remap
from remap.drivers.powers import SupportsHostFunctions
from remap.drivers.protocol import Driver

LIMIT = 30.0


class Desk:
    """The present driver with device 0's context current on this thread, and streams that go when the test ends."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._streams: list[int] = []
        self._gates: list[threading.Event] = []

    def stream(self) -> int:
        """Return a new non-blocking stream."""
        made = self.driver.create_stream()
        self._streams.append(made)
        return made

    def gate(self, stream: int) -> threading.Event:
        """Hold a stream up until the event that is returned is set."""
        opened = threading.Event()
        assert isinstance(self.driver, SupportsHostFunctions)
        self._gates.append(opened)
        self.driver.launch_host_function(stream, lambda: _pass(opened))
        return opened

    def read(self, address: int, size: int, stream: int) -> npt.NDArray[np.uint8]:
        """Return the bytes at a device address, behind the work of a stream."""
        out = np.zeros(size, np.uint8)
        self.driver.copy_to_host(out.ctypes.data, address, size, stream)
        self.driver.synchronize_stream(stream)
        return out

    def view(self, address: int, size: int) -> npt.NDArray[np.uint8]:
        """Return the bytes at an address that the CPU may touch, without a copy."""
        return np.frombuffer(memoryview((ctypes.c_char * size).from_address(address)), np.uint8)

    def after(self, earlier: int, later: int) -> None:
        """Let one stream wait for what another has queued so far."""
        event = self.driver.create_event()
        self.driver.record_event(event, earlier)
        self.driver.wait_event(later, event)
        self.driver.destroy_event(event)

    def clear(self) -> None:
        """Open all gates, wait for all work, and destroy the streams."""
        for gate in self._gates:
            gate.set()
        self.driver.synchronize_context()
        for stream in self._streams:
            self.driver.destroy_stream(stream)


def _pass(gate: threading.Event) -> None:
    assert gate.wait(LIMIT), "nobody opened the gate"


@pytest.fixture(name="desk")
def _desk() -> Generator[Desk]:
    with remap.device(0).current():
        desk = Desk(remap.driver())
        yield desk
        desk.clear()
