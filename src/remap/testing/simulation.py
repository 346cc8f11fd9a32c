"""A simulated machine for a block, or for a fixture of tests; and what a block or a test has left, closed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from typing import Any

from remap import drivers, lifetime
from remap.drivers.protocol import Driver
from remap.errors import RemapError, RemapWarning
from remap.sizes import counted
from remap.streams import Stream


@contextmanager
def simulated(**options: Any) -> Generator[Driver]:
    """Use a simulated machine inside of the block; at its end close what is left, and use the present driver again.

    `options` are those of `remap.use("host", ...)`; yields the driver. As a fixture of pytest:

        @pytest.fixture
        def machine():
            with remap.testing.simulated(devices=4, memory="256MiB"):
                yield

    What was left is told with a `RemapWarning` or, if the block failed, with a note on its error: it may be in the
    traceback. pytest raises nothing in a fixture when a test fails; with `remap.testing.plugin` what such a test holds
    is closed before, and no fixture has to tell. What arrays of other libraries still look at goes when they do.

    Raises `InUseError` while objects of the present driver live.
    """
    before = drivers.opened()
    driver = drivers.open("host", **options)
    try:
        drivers.use(driver)
    except BaseException:
        driver.shutdown()
        raise
    try:
        try:
            yield driver
        except BaseException as error:
            for line in close_leftovers():
                error.add_note(f"left open, and closed: {line}")
            raise
        left = close_leftovers()
    finally:
        others = [driver, drivers.opened()]  # the block may have named another one
        if before is None:
            drivers.close(shutdown=False)
        else:
            drivers.use(before)
        for one in others:
            if one is not None and drivers.innermost(one) is not drivers.innermost(before):
                drivers.end(one)
    if left:
        told = f"{counted(len(left), 'object')} left open, and closed: {'; '.join(left)}"
        warnings.warn(told, RemapWarning, stacklevel=3)


def close_leftovers(keep: Collection[int] = ()) -> list[str]:
    """Close every object but those with the serials in `keep`, end their captures, and return what they were.

    What refuses to close, as somebody looks at its memory, stands in nobody's way from then on.
    """
    left = [thing for thing in lifetime.live() if thing.serial not in keep]
    said = [str(thing.describe()) for thing in left]
    for thing in left:
        if isinstance(thing, Stream):
            with suppress(RemapError), thing.device.current():
                driver: Any = thing._driver
                if thing.capturing:
                    driver.graph_destroy(driver.end_capture(thing.handle))
        for registration in getattr(thing, "_registrations", ()):
            registration.close()
    # What stands on others comes after them in the list, and is closed before them.
    for thing in reversed(left):
        with suppress(RemapError):
            thing.close()
        if not thing.closed:
            drivers.let_go(thing)
    return said
