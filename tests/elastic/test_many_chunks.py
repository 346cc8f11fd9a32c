"""100,000 chunks stay usable: bulk operations take one pass, and single ones look up and do not search."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A driver of its own, with small granules: 100,000 of two MiB are more than a test machine has.
MANY = """
import time
import remap
from remap.drivers.wrappers import Recording

COUNT, GRANULE = 100_000, 64 << 10
driver = Recording(remap.drivers.open("host", devices=1, granularity=GRANULE, memory=COUNT * GRANULE))
remap.use(driver)

def calls(act):
    driver.forget()
    start = time.perf_counter()
    result = act()
    names = [call.name for call in driver.calls]
    counts = {name: names.count(name) for name in ("create", "map", "set_access", "unmap")}
    return result, counts, time.perf_counter() - start

def check(found, expected):
    assert found == expected, (found, expected)

buffer = remap.ElasticBuffer(COUNT * GRANULE, device=0, chunk=GRANULE)
_, counts, growing = calls(lambda: buffer.resize(buffer.capacity))
check(counts, {"create": COUNT, "map": COUNT, "set_access": 1, "unmap": 0})
check(len(buffer.chunks), COUNT)
buffer.fill(7, offset=GRANULE * (COUNT // 2) - 5, size=10)
check(set(buffer.to_host(shape=10, offset=GRANULE * (COUNT // 2) - 5).tolist()), {7})

# One chunk costs as little among 100,000 as it must: a hundred look-ups in less time than a thousandth of the growth
# would take if each of them went through the list.
def single():
    for n in range(100):
        at = (n * 997 + 13) * GRANULE
        buffer.decommit(at, at + GRANULE)
        buffer.commit(at + 1, at + 5)
_, counts, seconds = calls(single)
check(counts, {"create": 100, "map": 100, "set_access": 100, "unmap": 100})
assert seconds < growing, (seconds, growing)

change, counts, _ = calls(lambda: buffer.decommit(GRANULE, (COUNT - 1) * GRANULE))
check(counts, {"create": 0, "map": 0, "set_access": 0, "unmap": 1})
check(change.freed, (COUNT - 2) * GRANULE)
_, counts, _ = calls(lambda: buffer.resize(0))
check(counts["unmap"], 1)
buffer.close()
print("usable")
"""


@pytest.mark.alone
@pytest.mark.timeout(100)
def test_100_000_chunks() -> None:
    """Growth is one access call for all chunks, giving back is one unmapping, and single chunks are found at once."""
    if os.environ["REMAP_DRIVER"] != "host":
        pytest.skip("the host driver has granules small enough")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", MANY],
        check=False,
        timeout=90,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert (done.stdout, done.stderr) == ("usable\n", "")
