"""What tests of streams and typed memory share: gates that hold a stream up, and what runs in processes of its own."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import remap
from remap.drivers.powers import SupportsHostFunctions
from remap.streams import StreamCalls

LIMIT = 30.0


@contextmanager
def gate(stream: StreamCalls) -> Generator[threading.Event]:
    """Hold a stream up until the event that is given is set: at the end of the block, whatever happens in it."""
    opened = hold(stream)
    try:
        yield opened
    finally:
        opened.set()


def hold(stream: StreamCalls) -> threading.Event:
    """Hold a stream up until the event that is returned is set, or `LIMIT` seconds have passed.

    CUDA calls host functions one at a time: whatever else is to be called, for any stream, waits behind this one.
    """
    opened = threading.Event()
    driver = remap.driver()
    assert isinstance(driver, SupportsHostFunctions)
    with stream.device.current():
        driver.launch_host_function(stream.handle, lambda: _pass(opened))
    return opened


def _pass(opened: threading.Event) -> None:
    assert opened.wait(LIMIT), "nobody opened the gate"


def advice_with(hmm: bool) -> tuple[remap.Advice, remap.Advice]:
    """Return the advice for small configuration and for a prototype on a host driver with or without HMM."""
    remap.use("host", capabilities={"hmm": hmm})
    return remap.advise(100, read_only=True), remap.advise("1GiB", prototype=True)
