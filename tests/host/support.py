"""Short ways to say what the tests of the host driver do again and again."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from remap.drivers.host import HostDriver
from remap.drivers.protocol import HostLaunch
from remap.types import Access, AllocationProperties, LaunchConfig, Location, LocationKind, Touched

GRANULE = 2 << 20
LIMIT = 30.0  # seconds that a test waits for what must happen
ONE = LaunchConfig((1, 1, 1), (1, 1, 1))


def device(index: int = 0) -> Location:
    """Return the location of a device."""
    return Location(LocationKind.DEVICE, index)


@dataclass
class Values:
    """Arguments for a kernel that runs in Python."""

    values: tuple[object, ...] = ()
    pointers: int = field(default=0)


class Host:
    """A host driver with device 0's context current on the calling thread."""

    def __init__(self, **options: Any) -> None:
        self.driver = HostDriver(**options)
        self.driver.push_context(self.driver.retain_context(0))

    def memory(
        self, granules: int = 1, access: Access = Access.READ_WRITE, at: Location | None = None
    ) -> int:
        """Return the address of fresh mapped memory."""
        driver, size = self.driver, granules * GRANULE
        handle = driver.create(size, AllocationProperties(at or device()))
        address = driver.reserve(size)
        driver.map(address, size, handle)
        driver.release(handle)
        if access is not Access.NONE:
            driver.set_access(address, size, [(device(), access)])
        return address

    def bytes_at(self, address: int, size: int, stream: int = 0) -> bytes:
        """Return the bytes at an address, after the stream's work."""
        out = ctypes.create_string_buffer(size)
        self.driver.copy_to_host(ctypes.addressof(out), address, size, stream)
        self.driver.synchronize_stream(stream)
        return out.raw

    def launch(
        self,
        function: Callable[[HostLaunch], None],
        stream: int = 0,
        touches: Sequence[Touched] | None = (),
        *arguments: object,
    ) -> None:
        """Launch a kernel of one thread."""
        self.driver.launch(function, ONE, stream, Values(arguments), touches)


def run_child(code: str, *arguments: str, prefix: str = "", **environment: str) -> str:
    """Run Python code in a fresh process and return what it prints; it must end well.

    `prefix` is shell code that comes first, such as a limit.
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments]
    if prefix:
        command = ["bash", "-c", f'{prefix}; exec "$@"', "bash", *command]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        env={**os.environ, **environment},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
