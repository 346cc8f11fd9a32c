"""Chunk pools: what they keep, for whom, how much, and when they let go."""

from __future__ import annotations

import dataclasses

import pytest

import remap
from remap import MiB
from remap.buffers.growth import Change
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)


def buffer(**options: object) -> remap.ElasticBuffer:
    """Return an empty buffer of 8 MiB chunks."""
    return remap.ElasticBuffer("256MiB", device=0, chunk=8 * MiB, **options)  # type: ignore[arg-type]


def test_closed_means_freed(stage: Stage) -> None:
    """Nothing is kept unless somebody asked, and a pool keeps nothing until it has a limit."""
    memory = remap.device(0).memory
    before = memory().free
    with buffer() as one:
        one.resize(32 * MiB)
    assert memory().free == before
    with remap.chunk_pool(0) as pool:
        with buffer() as one:
            one.resize(32 * MiB)
            assert one.resize(0) == Change(freed=32 * MiB)
        assert memory().free == before
        assert (pool.statistics().used, pool.statistics().kept) == (0, 0)
    assert stage.unchanged(stage.seen())


def test_a_pool_saves_creating(stage: Stage) -> None:
    """What one buffer gave up another takes, with no create; used, kept and reserved are told apart."""
    with remap.chunk_pool(0, limit=24 * MiB) as pool, buffer() as one, buffer() as two:
        assert remap.chunk_pool(0) is pool
        one.resize(32 * MiB)
        assert one.resize(0) == Change(freed=8 * MiB, pooled=24 * MiB)
        mark = stage.mark()
        two.resize(24 * MiB)
        assert "create" not in stage.names_since(mark)
        two.fill(1)
        told = pool.statistics()
        assert (told.used, told.kept, told.reserved) == (24 * MiB, 0, 24 * MiB)
        assert (told.hits, told.misses) == (3, 4)
        assert (told.used_peak, told.reserved_peak) == (32 * MiB, 32 * MiB)
        with pytest.raises(dataclasses.FrozenInstanceError):
            told.used = 0  # type: ignore[misc]
        two.close()
        assert (pool.statistics().used, pool.statistics().kept) == (0, 24 * MiB)
        assert pool.trim(8 * MiB) == 16 * MiB
        assert pool.statistics().kept == 8 * MiB
        remap.chunk_pool(0, limit=0)
        assert pool.statistics().kept == 0


def test_pooled_memory_was_waited_for(stage: Stage) -> None:
    """A chunk comes into the pool after the work that used it, so the next user need not wait (trap 11)."""
    with remap.ChunkPool(0, limit="1GiB") as pool, remap.Stream(0) as stream:
        one, two = buffer(pool=pool), buffer(pool=pool)
        one.resize(8 * MiB)
        one.fill(1, stream=stream)
        mark = stage.mark()
        one.resize(0)
        names = [
            name for name in stage.names_since(mark) if name in {"synchronize_stream", "retain", "unmap"}
        ]
        assert names == ["synchronize_stream", "retain", "unmap"]
        two.resize(8 * MiB)
        two.fill(2)
        assert (two.to_host() == 2).all()
        one.close()
        two.close()


def test_memory_that_runs_out_is_taken_from_pools(stage: Stage) -> None:
    """Any request that finds no memory gets what pools keep there, once, before it fails (invariant 9)."""
    if stage.inner.name == "cuda":
        pytest.skip("it would fill the GPU; the host driver shows it")
    memory = remap.device(0).memory
    with remap.chunk_pool(0, limit="1GiB") as pool:
        with buffer() as one:
            one.resize(64 * MiB)
        assert pool.statistics().kept == 64 * MiB
        with remap.create(memory().free + 32 * MiB, at=0):
            assert pool.statistics().kept == 0
            with pytest.raises(remap.OutOfMemoryError):
                remap.allocate(memory().free + 2 * MiB, resident=0)


def test_a_limit_on_what_is_used(stage: Stage) -> None:
    """Beyond `used_limit` growth is out of memory by the pool's word, and nothing changed (invariant 9)."""
    del stage
    with remap.ChunkPool(0, used_limit=24 * MiB) as pool, buffer(pool=pool) as one, buffer(pool=pool) as two:
        one.resize(16 * MiB)
        with pytest.raises(remap.OutOfMemoryError, match="used_limit"):
            two.resize(16 * MiB)
        assert (two.size, two.chunks, pool.statistics().used) == (0, (), 16 * MiB)
        two.resize(8 * MiB)
        one.resize(0)
        two.resize(24 * MiB)


def test_forks_and_sleep_are_counted_right(stage: Stage) -> None:
    """Shared chunks count once until the last one goes; what is asleep is not used, what has moved neither."""
    del stage
    with remap.ChunkPool(0, limit="1GiB") as pool:
        one = buffer(pool=pool)
        one.resize(32 * MiB)
        two = one.fork()
        assert pool.statistics().used == 32 * MiB
        two.make_private(0, 8 * MiB)
        assert pool.statistics().used == 40 * MiB
        assert one.resize(8 * MiB) == Change()
        assert pool.statistics().used == 40 * MiB
        one.close()
        two.close()
        assert (pool.statistics().used, pool.statistics().kept) == (0, 40 * MiB)
        three = buffer(pool=pool)
        three.resize(16 * MiB)
        remap.pause(three)
        assert pool.statistics().used == 0
        remap.resume(three)
        assert pool.statistics().used == 16 * MiB
        remap.migrate(three, remap.Host())
        assert pool.statistics().used == 0
        three.close()
        assert pool.statistics().used == 0


def test_a_closed_pool_keeps_nothing(stage: Stage) -> None:
    """Closing a pool frees what it kept; buffers that still have its memory go on, and give it to the driver."""
    memory = remap.device(0).memory
    before = memory().free
    pool = remap.chunk_pool(0, limit="1GiB")
    one = buffer()
    one.resize(32 * MiB)
    one.resize(16 * MiB)
    pool.close()
    assert before - memory().free == 16 * MiB
    one.fill(1)
    assert one.resize(0) == Change(freed=16 * MiB)
    one.close()
    with pytest.raises(remap.ClosedError):
        pool.statistics()
    with pytest.raises(remap.ClosedError):
        buffer(pool=pool)
    with remap.chunk_pool(0) as other:
        assert other is not pool
    assert stage.unchanged(stage.seen())


def test_a_pool_of_another_location(stage: Stage) -> None:
    """A pool that could neither give nor limit a chunk of the buffer is refused, and nothing was made."""
    with remap.ChunkPool(remap.Host(), limit="64MiB") as pool:
        before = stage.seen()
        with pytest.raises(remap.InvalidValueError, match="device 0 with a chunk pool of host"):
            buffer(pool=pool)
        assert stage.unchanged(before)
        places: list[remap.Device | remap.Location] = [remap.device(0), remap.Host()]
        with remap.ElasticBuffer("16MiB", resident=places, accessing=0, chunk=2 * MiB, pool=pool) as both:
            both.resize(both.capacity)
            assert pool.statistics().used == both.size // 2
