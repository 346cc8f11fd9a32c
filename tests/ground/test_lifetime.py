"""Lifetimes: closing, collecting, hooks, rollback, fork, exit. On real objects of the driver that runs."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import remap
from remap import MiB, lifetime
from remap.errors import RemapError, driver_error
from remap.lifetime import Release, Resource, Rollback


def free() -> int:
    """Return the free memory of device 0."""
    return remap.device(0).memory().free


def test_closing_twice_does_nothing_the_second_time() -> None:
    """close() is idempotent and leaves the object closed (invariant 3)."""
    memory = remap.create(2 * MiB)
    assert not memory.closed
    memory.close()
    memory.close()
    assert memory.closed


MAKERS: dict[str, Callable[[], Any]] = {
    "buffer": lambda: remap.allocate(2 * MiB),
    "elastic": lambda: remap.ElasticBuffer(2 * MiB),
    "typed": lambda: remap.DeviceBuffer.zeroed(2 * MiB, "uint8", source="mapped"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_block_that_fails_raises_its_own_error(kind: str) -> None:
    """A refusal to close is a note on it, and the memory goes, in silence, when it is collected (trap 10)."""
    remap.collect()
    before = free()
    with pytest.raises(ValueError, match="mine") as failed, MAKERS[kind]() as made:
        (made.owner if kind == "typed" else made).registered("NCCL")
        raise ValueError("mine")
    (note,) = failed.value.__notes__
    assert note.startswith("and then: ")
    assert "registered with NCCL" in note
    assert note.endswith("It is open, and given back when it is collected")
    assert not made.closed
    del made, failed
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gc.collect()
    assert not told
    assert remap.collect() == 1
    assert free() == before


def test_a_block_that_does_not_fail_raises_what_closing_does() -> None:
    """Without an error of the block, the refusal is raised (invariant 3)."""
    made = remap.allocate(2 * MiB)
    registration = made.registered("NCCL")
    with pytest.raises(remap.InUseError, match="registered"), made:
        pass
    assert not made.closed
    registration.close()
    made.close()


def test_use_after_close_is_refused_by_name() -> None:
    """Use of a closed object raises ClosedError that says what it was (invariant 4)."""
    buffer = remap.allocate(2 * MiB)
    buffer.close()
    with pytest.raises(remap.ClosedError, match="buffer"):
        buffer.fill(1)


@pytest.mark.parametrize("kind", ["buffer", "elastic", "memory", "addresses", "stream", "event"])
def test_nothing_is_copied(kind: str) -> None:
    """An object is the one owner of what it stands for: copies and pickles are refused with the cure (1, 4)."""
    others: dict[str, Callable[[], Any]] = {
        "memory": lambda: remap.create(2 * MiB),
        "addresses": lambda: remap.reserve(2 * MiB),
        "stream": remap.Stream,
        "event": remap.Event,
    }
    with {**MAKERS, **others}[kind]() as made:
        for take in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy({"held": [one]})):
            with pytest.raises(TypeError, match=r"a copy of .*two objects would own one resource"):
                take(made)
        assert not made.closed


def test_an_unclosed_object_is_given_back_with_a_warning() -> None:
    """Collecting an unclosed buffer queues its memory, warns with the cure, and collect() frees it (invariant 4)."""
    before = free()
    buffer = remap.allocate(4 * MiB)
    with pytest.warns(ResourceWarning, match=r"buffer \d+ of .* was never closed.*with statement"):
        del buffer
        gc.collect()
    with remap.device(0).current():
        left = remap.driver().memory_info().free
    assert left == before - 4 * MiB, "a finaliser must not call the driver"
    assert remap.collect() == 1
    assert free() == before


def test_the_next_public_call_gives_back_what_was_collected() -> None:
    """Without collect(), the next call that opens something releases what finalisers queued (invariant 4)."""
    before = free()
    with pytest.warns(ResourceWarning):
        remap.create(2 * MiB)
        gc.collect()
    remap.reserve(2 * MiB).close()
    assert free() == before


def test_a_cycle_of_mapping_and_reservation_is_given_back_in_order() -> None:
    """The collector may find a mapping and its reservation in any order; the mapping is unmapped first."""
    before = free()
    memory, addresses = remap.create(2 * MiB), remap.reserve(4 * MiB)
    mapping = addresses.map(memory, access={0: "rw"})
    memory.close()
    mapping.cycle = mapping  # type: ignore[attr-defined]
    with pytest.warns(ResourceWarning):
        del mapping, addresses
        gc.collect()
    assert remap.collect() == 2
    assert free() == before


def test_finalisers_take_no_lock() -> None:
    """An object can be collected while its driver's lock is held by another thread, without waiting."""
    buffer = [remap.allocate(2 * MiB)]
    collected = threading.Event()

    def collect() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            buffer.clear()
        collected.set()

    with remap.driver().lock:
        thread = threading.Thread(target=collect)
        thread.start()
        assert collected.wait(30)
    thread.join()
    remap.collect()


def test_hooks_see_what_is_made_in_their_block_only() -> None:
    """A creation hook is called with each object made in its context, and no longer."""
    seen: list[Resource] = []
    with lifetime.on_creation(seen.append), remap.allocate(2 * MiB) as inside:
        pass
    with remap.allocate(2 * MiB):
        pass
    assert seen == [inside]


def test_live_lists_objects_oldest_first() -> None:
    """live() lists what is open, and nothing after it was closed."""
    with remap.create(2 * MiB) as first, remap.allocate(2 * MiB) as second:
        assert lifetime.live()[-2:] == [first, second]
        assert second in lifetime.live(remap.Buffer)
        assert first not in lifetime.live(remap.Buffer)
    assert first not in lifetime.live()


def test_rollback_undoes_in_reverse_and_keeps_the_first_error() -> None:
    """Steps are undone last first; what fails meanwhile becomes a note on the first error (invariant 5, trap 10)."""
    undone: list[int] = []

    def refuse() -> None:
        raise driver_error("cuMemUnmap", 1)

    with pytest.raises(RemapError, match="first") as caught, Rollback() as rollback:
        rollback.undo(undone.append, 1)
        rollback.undo(refuse)
        rollback.undo(undone.append, 2)
        raise RemapError("the first error")
    assert undone == [2, 1]
    assert "cuMemUnmap" in caught.value.__notes__[0]


def test_rollback_does_nothing_on_success() -> None:
    """A block that succeeds keeps what it made."""
    undone: list[int] = []
    with Rollback() as rollback:
        rollback.undo(undone.append, 1)
    assert not undone


def test_a_release_takes_all_steps_and_raises_the_first_failure() -> None:
    """One failing step does not keep the later ones from running; later failures are notes."""
    taken: list[int] = []

    def fail(code: int) -> None:
        raise driver_error("cuMemRelease", code)

    with pytest.raises(remap.DriverError, match="INVALID_VALUE") as caught:
        Release(0, [(fail, (1,)), (taken.append, (1,)), (fail, (400,)), (taken.append, (2,))]).run()
    assert taken == [1, 2]
    assert "INVALID_HANDLE" in caught.value.__notes__[0]


def test_a_refusal_ends_a_release_before_later_steps() -> None:
    """InUseError means that nothing was changed, so that nothing else may be either."""
    taken: list[int] = []

    def refuse() -> None:
        raise remap.InUseError("unmapping", rule="work is queued")

    with pytest.raises(remap.InUseError):
        Release(0, [(refuse, ()), (taken.append, (1,))]).run()
    assert not taken


def test_a_failure_that_is_not_ours_ends_no_release_either() -> None:
    """What a foreign object raises in one step keeps later steps from nothing, and comes out at the end."""
    taken: list[int] = []

    with pytest.raises(ZeroDivisionError) as caught:
        Release(0, [(divmod, (1, 0)), (taken.append, (1,)), (int, ("x",)), (taken.append, (2,))]).run()
    assert taken == [1, 2]
    assert "and then: invalid literal" in caught.value.__notes__[0]
    assert not lifetime.queued


def test_no_later_call_raises_what_a_queued_release_raises() -> None:
    """A queued release that fails, by whatever exception, is told once as a warning, and not tried again."""
    tried: list[int] = []
    lifetime.queued.append(Release(0, [(tried.append, (1,)), (divmod, (1, 0))]))
    with pytest.warns(remap.RemapWarning, match="unclosed object failed: ZeroDivisionError"):
        remap.allocate(2 * MiB).close()
    lifetime.queued.append(Release(0, [], lambda: tried.append(1 // 0)))
    with pytest.warns(remap.RemapWarning, match="unclosed object failed: ZeroDivisionError"):
        remap.allocate(2 * MiB).close()
    remap.allocate(2 * MiB).close()
    assert tried == [1]
    assert not lifetime.queued


def test_an_interrupt_of_a_queued_release_is_raised_and_leaves_the_rest() -> None:
    """Ctrl-C comes out of the call that runs what was queued; what was not begun stays for the next one."""
    taken: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    lifetime.queued.extend([Release(0, [(interrupt, ())]), Release(1, [(taken.append, (1,))])])
    with pytest.raises(KeyboardInterrupt):
        remap.collect()
    assert (remap.collect(), taken) == (1, [1])


class ClosesItself(Resource):
    """A resource that what its last check calls has closed."""

    def __init__(self) -> None:
        super().__init__(remap.driver())
        self.given_back: list[int] = []
        self._opened()

    def _check_closable(self) -> None:
        if self._open and not self.given_back:
            self.given_back.append(0)
            self.close()

    def _detach(self) -> Release:
        return Release(0, [(self.given_back.append, (1,))])


def test_what_was_closed_while_it_was_checked_is_not_closed_twice() -> None:
    """A check before closing may call what closes the object; its memory is given back once (invariant 3)."""
    thing = ClosesItself()
    thing.close()
    assert thing.closed
    assert thing.given_back == [0, 1]


CHILD_OF_FORK = """
import os, sys, warnings
import remap
from remap import MiB
buffer = remap.allocate(4 * MiB); buffer.fill(5)
child = os.fork()
if child == 0:
    try:
        try:
            buffer.fill(1)
        except remap.ForkedError as error:
            assert "fork" in str(error) and "child" in str(error), error
        else:
            os._exit(3)
        buffer.close()          # inert: the memory is the parent's
        del buffer
        if remap.collect() != 0:
            os._exit(4)
        if os.environ["REMAP_DRIVER"] == "host":
            with remap.allocate(2 * MiB) as fresh:
                fresh.fill(9)
                if not (fresh.to_host() == 9).all():
                    os._exit(5)
        else:
            try:
                remap.driver()
            except remap.ForkedError:
                pass
            else:
                os._exit(6)
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (buffer.to_host() == 5).all()
buffer.close()
"""


def test_a_forked_child_touches_nothing_of_the_parent() -> None:
    """In the child objects are inert and say so; the host driver opens afresh, CUDA refuses (invariant 10, trap 44)."""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD_OF_FORK], check=True, timeout=100, env=os.environ
    )


def test_objects_alive_at_exit_are_silent() -> None:
    """A program that ends with open objects prints nothing and ends well (invariant 4)."""
    program = "import remap; b = remap.allocate(2 << 20); b.fill(3); s = remap.Stream(); b.fill(4, stream=s)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=False,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


KEPT_BY_A_TEST = """
import remap

kept = []

def test():
    kept.extend([remap.allocate(2 << 20), remap.Stream()])
"""


def test_objects_that_outlive_the_modules_are_silent(tmp_path: Path) -> None:
    """Objects that a test module keeps live longer than the names of remap's modules, and end as silently."""
    (tmp_path / "test_kept.py").write_text(KEPT_BY_A_TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)],
        check=False,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_changing_the_driver_is_refused_while_objects_live() -> None:
    """use() names what is alive, and changes nothing."""
    present = remap.driver()
    with remap.create(2 * MiB), pytest.raises(remap.InUseError, match="physical allocation"):
        remap.use("host")
    assert remap.driver() is present
