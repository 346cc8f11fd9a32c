"""Rights that are taken away while somebody uses the memory: refused, where going on would crash the process."""

from __future__ import annotations

import threading

import pytest

import remap
from remap import MiB
from remap.testing.children import run_in_child

SIZE = 4 * MiB


def race() -> int:
    """Let one thread write with the CPU while another takes its right away, again and again; return the changes."""
    host = remap.Host()
    done = threading.Event()
    with remap.allocate(64 * MiB, resident=host, accessing=host) as memory:

        def write() -> None:
            while not done.is_set():
                try:
                    memory.fill(1)
                except (remap.AccessError, remap.InUseError):
                    continue

        writer = threading.Thread(target=write)
        writer.start()
        changed = 0
        for _ in range(3000):
            for right in ("none", "rw"):
                try:
                    memory.set_access({host: right})
                    changed += 1
                except remap.InUseError:
                    continue
        done.set()
        writer.join()
        return changed


def test_the_cpu_writes_while_its_right_is_taken() -> None:
    """One of the two is refused; the process died of SIGSEGV in the middle of the write (invariant 13)."""
    assert run_in_child(race) > 0


@pytest.mark.parametrize("right", ["none", "r"])
def test_a_view_keeps_its_right(right: str) -> None:
    """While an array of the CPU lives, its right cannot be taken, as its next look would crash (13, trap 26)."""
    host = remap.Host()
    with remap.allocate(SIZE, resident=host, accessing=[host, 0]) as memory:
        view = memory.array().numpy()
        with pytest.raises(remap.InUseError, match="view"):
            memory.set_access({host: right})
        view[0] = 5
        memory.set_access({0: "none"})  # a device's right is none of its business
        assert memory.get_access(0) is remap.Access.NONE
        del view
        memory.set_access({host: right})
        with pytest.raises(remap.AccessError):
            memory.fill(1)
