"""Jobs in the background: each is done once or cancelled, and nobody waits for ever, whoever was interrupted."""

from __future__ import annotations

import threading

import pytest

from remap.residency.jobs import Job, start

from .support import interrupted


def test_a_job_is_done_once_or_cancelled() -> None:
    """What was cancelled is not done; what was begun cannot be cancelled; who waits sees both end."""
    done: list[int] = []
    job = Job()
    waiting = threading.Thread(target=job.wait)
    waiting.start()
    assert job.cancel()
    assert job.cancel()
    waiting.join()
    job.run(lambda: done.append(1))
    assert job.cancelled
    assert not done
    other = Job()
    start([(other, lambda: done.append(2))], 4)
    other.wait()
    assert not other.cancel()
    assert not other.cancelled
    assert done == [2]


def test_a_failure_is_for_who_asks() -> None:
    """Waiting is silent, and the result raises what the job has raised, each time."""

    def fail() -> None:
        raise OSError("none left")

    job = Job()
    start([(job, fail)], 1)
    job.wait()
    for _ in range(2):
        with pytest.raises(OSError, match="none left"):
            job.result()


@pytest.mark.parametrize("waiters", [1, 3])
def test_an_interrupt_of_who_waits(waiters: int) -> None:
    """Wherever it comes, the job can end, and others go on waiting for it and see that it does."""
    for nth in range(1, 8):
        job, let = Job(), threading.Event()
        working = threading.Thread(target=job.run, args=(let.wait,))
        working.start()
        others = [threading.Thread(target=job.wait) for _ in range(waiters)]
        for other in others:
            other.start()
        assert interrupted(job.wait, nth)
        let.set()
        for thread in (working, *others):
            thread.join(10)
            assert not thread.is_alive()
        job.wait()
