"""Other processes: ends in every state, forks, spawned readers, and ranks that wake together or not at all."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest

import remap

from . import ranks

PYTHON = (sys.executable, "-W", "error::RuntimeWarning", "-c")
BEGIN = """
import gc, os, sys, remap
if remap.driver().name == "host":
    remap.use("host", memory="64MiB", coherent=True, integrated=False)
torch = remap.torch
with torch.pool("weights"):
    weights = torch.empty(1 << 20).fill_(3)
with torch.pool("kv"):
    cache = torch.ElasticTensor(100, 1024, rows=2)
"""

STATES = {
    "awake, inside of a block": 'block = torch.pool("weights"); block.__enter__()',
    "asleep on disk, tensors deleted": 'torch.sleep({"weights": "disk", "kv": None}); del weights; gc.collect()',
    "with a backup in hand, by an exception": 'torch.sleep("weights"); c = torch.backup(weights); raise SystemExit(0)',
    "waking": 'torch.sleep("weights"); waking = torch.wake("weights", events=True)',
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program with warnings as errors."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        BEGIN + textwrap.dedent(code),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.slow
def test_ending_in_every_state(torch: Any) -> None:
    """A process ends at once and in silence, whatever sleeps (invariant 4, trap 22)."""
    assert torch is not None
    running = {
        state: subprocess.Popen([*PYTHON, BEGIN + code], stderr=subprocess.PIPE, text=True)
        for state, code in STATES.items()
    }
    for state, process in running.items():
        _, errors = process.communicate(timeout=100)
        assert (process.returncode, errors) == (0, ""), state


def test_forked_children_are_inert(torch: Any) -> None:
    """A child says that the memory is its parent's, touches nothing of it, and ends (invariant 10, trap 44)."""
    assert torch is not None
    if remap.driver().name == "cuda":
        pytest.skip("a context does not survive a fork, and the child cannot ask")
    done = run(
        """
        torch.sleep("weights")
        import warnings
        warnings.simplefilter("ignore")
        child = os.fork()
        if not child:
            try:
                torch.wake("weights")
            except remap.RemapError:
                pass
            del weights
            gc.collect()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        torch.wake("weights")
        assert float(weights.sum()) == 3 * (1 << 20)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_forked_child_is_told(torch: Any) -> None:
    """All that it asks remap about memory of its parent is a `ForkedError`; memory of its own works (invariant 10)."""
    assert torch is not None
    if remap.driver().name == "cuda":
        pytest.skip("a context does not survive a fork, and the child cannot ask")
    done = run(
        """
        import warnings
        warnings.simplefilter("ignore")
        rows, pool = cache.tensor, torch.pools()["weights"]
        with remap.group("plain"):
            plain = remap.allocate(1, resident=0)
        asked = {
            "tensor": lambda: cache.tensor,
            "view": lambda: cache.view(1),
            "whole": lambda: cache.whole,
            "resize": lambda: cache.resize(5),
            "empty": lambda: pool.empty(3),
            "segments": lambda: pool.segments,
            "trim": pool.trim,
            "backup": lambda: torch.backup(weights),
            "backup of rows": lambda: torch.backup(rows),
            "buffer_of": lambda: torch.buffer_of(weights[5:]),
            "buffer_of rows": lambda: torch.buffer_of(cache),
            "registered": lambda: torch.registered(weights, "NCCL"),
            "export": lambda: torch.export(weights),
            "sleep": lambda: torch.sleep("weights"),
            "sleep of some": lambda: torch.sleep({"kv": None}),
            "wake": lambda: torch.wake("weights"),
            "pause": lambda: remap.pause("plain"),
        }
        child = os.fork()
        if not child:
            for again in range(2):
                for name, ask in asked.items():
                    try:
                        ask()
                    except remap.ForkedError:
                        continue
                    except BaseException as error:
                        print(again, name, repr(error), file=sys.stderr)
                    else:
                        print(again, name, "was answered", file=sys.stderr)
                if not again:
                    remap.use("host", memory="64MiB", coherent=True, integrated=False)
                    with torch.pool("its own"):
                        mine = torch.empty(10).fill_(2)
                    for name in ("backup", "backup of rows", "buffer_of", "registered", "export"):
                        del asked[name]  # its own memory may lie at that address now
            torch.sleep("its own")
            assert torch.backup(mine).tolist() == [2] * 10
            torch.wake()
            cache.close()
            assert mine.sum() == 20
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert float(weights.sum()) == 3 * (1 << 20)
        del rows
        cache.close()
        plain.close()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_workers_of_a_data_loader(torch: Any) -> None:
    """Forked and spawned workers of a DataLoader work beside pools, and end."""
    assert torch is not None
    done = run(
        """
        import warnings
        warnings.simplefilter("ignore")
        from torch.utils.data import DataLoader
        if __name__ == "__main__":
            for way in ("fork", "spawn"):
                loader = DataLoader(list(range(8)), num_workers=2, multiprocessing_context=way)
                assert sorted(int(one) for batch in loader for one in batch) == list(range(8))
            torch.sleep({"weights": "host", "kv": None})
            torch.wake()
            assert float(weights[0]) == 3
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_ranks_wake_together_or_not_at_all(torch: Any) -> None:
    """A rank that is short of memory, or asks wrongly, keeps all asleep, each with an error; later all wake."""
    assert torch is not None
    if remap.driver().name == "cuda" and remap.driver().device_count() < 2:
        pytest.skip("both ranks would share one device's memory")
    told = ranks.started(2, ranks.wake_together)
    assert told[0][0].startswith("ShareError")
    assert "rank 1 could not" in told[0][0]
    assert told[1][0].startswith("OutOfMemoryError")
    assert "; InvalidValueError: group 'nothing'" in told[0][0]
    assert "; ShareError" in told[1][0]
    assert "rank 0 could not: group 'nothing'" in told[1][0]
    assert [one[1:] for one in told] == [("asleep, asleep", "awake", True)] * 2


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_ranks_that_listen(torch: Any) -> None:
    """Listeners hear of a wake once every rank has agreed to it; ranks that name other tags all sleep again.

    A listener that registers memory, as NCCL's do, would keep a rank awake that has to sleep again; one that fails
    comes too late to stop a wake, and says so where it failed.
    """
    assert torch is not None
    if remap.driver().name == "cuda" and remap.driver().device_count() < 2:
        pytest.skip("each rank has a device of its own")
    told = ranks.started(2, ranks.wake_with_listeners)
    (first, paused, right), (second, others, other) = told
    same = 'all ranks name the same tags, and rank 0 named ["weights"], rank 1 named ["kv", "weights"]'
    for one in (first, second):
        assert one[0].startswith("asleep, False, 0 held, ShareError")
        assert same in one[0]
        assert "while undoing" not in one[0] + one[1]
        assert one[1].startswith("asleep, False, 0 held, ")
        assert "group 'nothing'" in one[1]
    assert first[2] == "awake, True, 1 held, it woke"
    assert second[2].startswith("awake, True, 0 held, ZeroDivisionError: a listener")
    assert (paused[-1], others[-1], right, other) == ("awake", "awake", True, True)
    assert set(paused[:-1]) | set(others[:-1]) <= {"paused"}


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_tensor_of_another_process(machine: Any) -> None:
    """An exported tensor is the same memory elsewhere, with its type, shape and strides."""
    with machine.pool("shared", shareable="posix_fd"):
        tensor = machine.empty(6, 4)
    tensor.copy_(remap.integrations.tensors.torch.arange(24.0).view(6, 4))
    ours, theirs = ranks.SPAWN.Pipe()
    child = ranks.SPAWN.Process(target=ranks.read_and_write, args=(remap.driver().name, theirs), daemon=True)
    child.start()
    ours.send(machine.export(tensor.t()[1:3]))
    assert ours.poll(100)
    assert ours.recv() == ([1.0, 5.0, 9.0, 13.0, 17.0, 21.0], (2, 6), (1, 4))
    child.join(30)
    assert tensor[3, 2].item() == 100
