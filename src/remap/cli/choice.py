"""The driver of a command: the one that was asked for, or the first that opens."""

from __future__ import annotations

import os
import sys

import remap
from remap import drivers
from remap.cli.report import Report
from remap.cli.waived import Waived
from remap.errors import DriverNotFoundError


def choose_driver(name: str | None, report: Report) -> None:
    """Open the driver that was asked for, or the first that opens; say which, and why not the others."""
    wanted = name or os.environ.get("REMAP_DRIVER") or None
    attempts: list[tuple[str, str]] = []
    for candidate in (wanted,) if wanted else drivers.NAMES:
        try:
            found = remap.use(candidate)
        except DriverNotFoundError as error:
            attempts += error.attempts
            continue
        lines = [f"{found.name}: {found.version()}", *(f"{other} not used: {why}" for other, why in attempts)]
        report.step("driver", lines)
        return
    if wanted == "cuda" or sys.platform != "linux":
        raise Waived("; ".join(f"driver {other}: {why}" for other, why in attempts))
    raise DriverNotFoundError(tuple(attempts))
