"""Forks: buffers that share memory until one takes a copy of its own (B3, B8)."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import remap
from remap import Access, MiB
from remap.buffers.growth import Change
from remap.testing.stage import Stage

pytest_plugins = ("remap.testing.stage",)

PREFIX = 32 * MiB


def prefix(**options: object) -> tuple[remap.ElasticBuffer, bytes]:
    """Return a buffer with random contents."""
    buffer = remap.ElasticBuffer(256 * MiB, device=0, chunk=8 * MiB, **options)  # type: ignore[arg-type]
    buffer.resize(PREFIX)
    data = np.random.default_rng(1).integers(0, 256, PREFIX, dtype=np.uint8)
    buffer.copy_from_host(data)
    return buffer, data.tobytes()


def test_eight_sequences_share_a_prefix(stage: Stage) -> None:
    """Eight caches with a common prefix cost it once, each sees it, and each grows by itself."""
    memory = remap.device(0).memory
    before = memory().free
    root, data = prefix()
    here = remap.device(0).location
    forks = [root.fork() for _ in range(7)]
    everybody = [root, *forks]
    assert before - memory().free == PREFIX
    assert remap.footprint(everybody) == {here: PREFIX}
    assert [one.footprint() for one in everybody] == [{here: PREFIX}] * 8
    assert all(one.to_host().tobytes() == data for one in everybody)
    assert len({one.address for one in everybody}) == 8
    for value, one in enumerate(everybody):
        one.resize(PREFIX + 8 * MiB)
        one.fill(value, offset=PREFIX)
    assert remap.footprint(everybody) == {here: PREFIX + 8 * 8 * MiB}
    for value, one in enumerate(everybody):
        assert (one.to_host(shape=8 * MiB, offset=PREFIX) == value).all()
        assert one.to_host(shape=PREFIX).tobytes() == data
    root.close()
    assert all(one.to_host(shape=PREFIX).tobytes() == data for one in forks)
    for one in forks:
        one.close()
    assert stage.unchanged(stage.seen())
    assert abs(before - memory().free) <= stage.slack


def test_shared_bytes_cannot_be_written(stage: Stage) -> None:
    """Fills and copies into shared chunks are refused with advice, on both sides and by the driver itself (B8)."""
    root, data = prefix()
    fork = root.fork()
    for one in (root, fork):
        assert one.shared == ((0, PREFIX),)
        for write in (
            partial(one.fill, 0, offset=PREFIX - 1, size=1),
            partial(one.copy_from_host, b"12", offset=5),
            partial(one.copy_from, root if one is fork else fork, size=5),
            partial(one.array().copy_from, np.zeros(PREFIX, np.uint8)),
        ):
            with pytest.raises(remap.AccessError, match="make_private"):
                write()
        assert one.array("uint8", 5).__cuda_array_interface__["data"] == (one.address, True)
        for chunk in one.chunks:
            assert stage.inner.get_access(chunk.address, chunk.location) is Access.READ
        assert one.to_host().tobytes() == data
        assert dict(one.access) == {chunk.location: Access.READ_WRITE for chunk in one.chunks}
    root.close()
    fork.close()


def test_make_private_copies_what_it_must(stage: Stage) -> None:
    """A copy is made of the chunks that are asked for; the fork keeps its bytes, and each writes its own."""
    memory = remap.device(0).memory
    root, data = prefix()
    fork = root.fork()
    before, generation = memory().free, fork.generation
    assert fork.make_private(8 * MiB + 1, 16 * MiB + 1) == Change(mapped=16 * MiB)
    assert fork.generation == generation + 1
    assert before - memory().free == 16 * MiB
    assert fork.shared == ((0, 8 * MiB), (24 * MiB, PREFIX))
    assert fork.to_host().tobytes() == data
    fork.fill(0, offset=8 * MiB, size=16 * MiB)
    assert root.to_host().tobytes() == data
    assert fork.make_private(8 * MiB, 16 * MiB) == Change()
    # The root is alone with what the fork has copied: nothing needs to be copied to write there.
    mark = stage.mark()
    assert root.make_private(8 * MiB, 24 * MiB) == Change()
    assert not {"create", "copy", "unmap"} & set(stage.names_since(mark))
    root.fill(1, offset=8 * MiB, size=16 * MiB)
    assert (fork.to_host(shape=16 * MiB, offset=8 * MiB) == 0).all()
    fork.close()
    root.make_private()
    assert root.shared == ()
    root.fill(2)
    root.close()


def test_forking_waits_for_writers_and_copying_does_not_exclude_readers(stage: Stage) -> None:
    """A fork sees what was queued before it; what still reads the old chunks is waited for (invariant 7)."""
    root, _ = prefix()
    with remap.Stream(0) as stream:
        root.fill(9, stream=stream)
        mark = stage.mark()
        fork = root.fork()
        names = [name for name in stage.names_since(mark) if name in {"synchronize_stream", "set_access"}]
        assert names[:2] == ["synchronize_stream", "set_access"]
        assert (fork.to_host() == 9).all()
        out = np.zeros(PREFIX, np.uint8)
        fork.copy_to_host(out, stream=stream)
        fork.make_private()
        assert (out == 9).all()
    fork.close()
    root.close()


def test_shared_memory_stays_where_it_is(stage: Stage) -> None:
    """While chunks are shared a buffer keeps its rights, and does not move alone; afterwards it may (trap 7)."""
    del stage
    root, data = prefix()
    fork = root.fork()
    for refused in (
        lambda: remap.pause(root),
        lambda: remap.migrate(fork, remap.Host()),
        lambda: fork.set_access({0: "r"}),
    ):
        with pytest.raises(remap.InUseError, match="make_private"):
            refused()
    assert fork.resize(0) == Change(), "memory that others have is not freed"
    root.make_private()
    remap.pause(root)
    remap.resume(root)
    assert root.to_host().tobytes() == data
    fork.close()
    root.close()


@pytest.mark.parametrize("gone", ["the fork", "the source", "its chunks"])
def test_what_no_fork_has_any_more_can_be_written(stage: Stage, gone: str) -> None:
    """Where all others have gone or given the memory back, it needs no call to write it, and no copy (trap 7)."""
    source, data = prefix()
    fork = source.fork()
    one, other = (fork, source) if gone == "the source" else (source, fork)
    if gone == "its chunks":
        other.resize(0)
    else:
        other.close()
    assert one.shared == ()
    mark = stage.mark()
    one.fill(1, size=1)
    one.copy_from_host(b"2", offset=PREFIX - 1)
    assert not {"create", "copy", "map"} & set(stage.names_since(mark))
    assert one.to_host().tobytes() == b"\1" + data[1:-1] + b"2"
    one.set_access({0: "r"})
    one.set_access({0: "rw"})
    one.array().copy_from(np.zeros(PREFIX, np.uint8))
    remap.pause(one)
    remap.resume(one)
    one.fill(3)
    other.close()
    one.close()


def test_forks_of_forks_and_of_growth(stage: Stage) -> None:
    """Forks fork; what one committed after its fork is shared by its own forks alone."""
    del stage
    root, data = prefix()
    one = root.fork()
    one.resize(PREFIX + 5)
    one.fill(4, offset=PREFIX)
    two = one.fork()
    assert two.to_host().tobytes() == data + bytes([4]) * 5
    assert remap.footprint([root, one, two]) == {remap.device(0).location: PREFIX + 8 * MiB}
    root.resize(PREFIX + 5)
    root.fill(5, offset=PREFIX)
    one.close()
    two.make_private(PREFIX, PREFIX + 1)
    two.fill(6, offset=PREFIX)
    assert root.to_host().tobytes() == data + bytes([5]) * 5
    assert two.to_host().tobytes() == data + bytes([6]) * 5
    two.close()
    root.close()
    with pytest.raises(remap.ClosedError):
        remap.footprint([root])


def test_a_fork_of_read_only_memory(stage: Stage) -> None:
    """What nobody may write can be forked too, and stays read-only when it is private."""
    del stage
    with remap.ElasticBuffer("8MiB", device=0, access="r") as root:
        root.resize(MiB)
        with root.fork() as fork:
            fork.make_private()
            with pytest.raises(remap.AccessError):
                fork.fill(1)
