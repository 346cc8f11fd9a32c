"""Time limits of sharing: as long as anybody likes, infinity included, and never no number at all."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB

LONG = [math.inf, 1e12, 3e6]


@pytest.mark.parametrize("limit", LONG)
def test_an_export_without_end_can_be_fetched(limit: float) -> None:
    """An export that waits for ever for its importer is fetched like any other.

    The thread that hands descriptors out ended with an OverflowError, and with it every later export.
    """
    if not remap.device(0).capabilities["posix_fd"]:
        pytest.skip("the device shares no memory")
    with remap.allocate(MiB, shareable="posix_fd") as buffer:
        buffer.fill(7)
        with remap.export(buffer, timeout=limit) as exported:
            code = (
                "import sys, remap\n"
                "with remap.open(bytes.fromhex(sys.argv[1]), timeout=20) as one:\n"
                "    assert bytes(one.to_host('uint8', 2)) == bytes([7, 7])\n"
            )
            command = [sys.executable, "-c", code, exported.to_bytes().hex()]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr


def test_an_export_for_no_time_is_refused() -> None:
    """NaN is no time limit, and is refused before anything is lent."""
    with remap.allocate(MiB, shareable="posix_fd") as buffer:
        with pytest.raises(remap.InvalidValueError, match="nan"):
            remap.export(buffer, timeout=math.nan)
        remap.pause(buffer, None)  # nothing was shared


@pytest.mark.parametrize("limit", LONG)
def test_ranks_may_wait_as_long_as_they_like(limit: float) -> None:
    """An exchange without a limit works; the first step broke it."""
    one, other = remap.ProcessExchange.group(2, timeout=limit)
    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.append(other.allgather(b"b")))
    thread.start()
    assert one.allgather(b"a") == [b"a", b"b"]
    thread.join(20)
    assert told == [[b"a", b"b"]]
    one.close()
    other.close()


@pytest.mark.parametrize("wrong", [math.nan, 0.0, -1.0])
def test_ranks_wait_for_a_number_of_seconds(wrong: float) -> None:
    """A limit that is no time is refused when the exchange is made."""
    with pytest.raises(remap.InvalidValueError, match="time limit"):
        remap.SingleExchange(timeout=wrong)


@pytest.mark.parametrize("limit", [*LONG, math.nan])
def test_no_broker_is_no_broker_whatever_the_limit(limit: float, tmp_path: Path) -> None:
    """Connecting with a broker that is not there says so, or that the limit is none: no error of the socket's."""
    with pytest.raises(remap.RemapError, match=r"there is none|time limit"):
        remap.connect(tmp_path / "none", timeout=limit)
