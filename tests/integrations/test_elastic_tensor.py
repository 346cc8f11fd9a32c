"""ElasticTensor: a first dimension that grows in place; and buffers as tensors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB


def test_growing_in_place(torch: Any, machine: Any) -> None:
    """Rows come and go under one pointer, nothing is copied, and earlier views see what is written (invariant 6)."""
    with machine.ElasticTensor(1000, 8, 64, dtype=torch.bfloat16, rows=2) as cache:
        first = cache.view(2)
        first.fill_(1)
        pointer = cache.data_ptr
        for rows in (3, 500, 1000):
            cache.resize(rows)
            assert cache.tensor.shape == (rows, 8, 64)
            assert cache.tensor.data_ptr() == pointer == first.data_ptr()
        cache.tensor[2:].fill_(2)
        cache.tensor[0].fill_(5)
        assert first[0, 0, 0].item() == 5
        assert cache.tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        assert len(cache) == 1000
        del first
        gc.collect()


def test_shrinking_gives_memory_back(machine: Any) -> None:
    """Memory behind the rows there are goes back, although tensors of it live."""
    before = remap.device(0).memory().free
    cache = machine.ElasticTensor(64, MiB, rows=16, chunk=4 * MiB)
    head = cache.view(1)
    head.fill_(3)
    held = before - remap.device(0).memory().free
    assert cache.resize(1).freed > 0
    assert before - remap.device(0).memory().free < held
    assert float(head.sum()) == 3 * MiB
    with pytest.raises(remap.InvalidValueError, match="resize"):
        cache.view(2)
    del head
    cache.close()
    assert remap.device(0).memory().free >= before - (0 if remap.driver().name == "host" else 16 * MiB)


def test_appending(torch: Any, machine: Any) -> None:
    """Rows that are appended are those of the tensor given; other shapes are refused, and nothing grows."""
    with machine.ElasticTensor(10, 4) as cache:
        cache.append(torch.ones(2, 4, device=cache.tensor.device))
        added = cache.append(torch.full((1, 4), 2.0, device=cache.tensor.device))
        assert cache.tensor.sum(1).tolist() == [4, 4, 8]
        assert added.tolist() == [[2, 2, 2, 2]]
        with pytest.raises(remap.InvalidValueError, match="shape"):
            cache.append(torch.ones(1, 5))
        with pytest.raises(remap.InvalidValueError, match="capacity"):
            cache.resize(10_000_000)
        with pytest.raises(remap.InvalidValueError, match=r"shape \(\) to be appended"):
            cache.append(torch.tensor(1.0))
        assert len(cache) == 3
        del added


def test_appending_what_cannot_be_copied(torch: Any, machine: Any) -> None:
    """Torch's error is raised, and rows, memory and contents are as they were (invariant 5)."""
    with machine.ElasticTensor(10_000, 64, rows=2, chunk=2 * MiB) as cache:
        cache.tensor.fill_(1)
        before = cache.buffer.footprint()
        with pytest.raises(NotImplementedError, match="meta"):
            cache.append(torch.ones(9_000, 64, device="meta"))
        assert (len(cache), cache.shape, cache.buffer.size) == (2, (2, 64), 2 * 256)
        assert cache.buffer.footprint() == before
        assert float(cache.tensor.sum()) == 128
    with (
        pytest.raises(NotImplementedError, match="meta") as failed,
        machine.ElasticTensor(10, 4) as cache,
    ):
        cache.append(torch.ones(1, 4, device="meta"))
    assert cache.buffer.closed, "the traceback keeps no tensor of it"
    assert not hasattr(failed.value, "__notes__")


def test_appending_what_requires_gradients(torch: Any, machine: Any) -> None:
    """Its values are copied, and autograd's graph is not kept."""
    with machine.ElasticTensor(10, 4, rows=1) as cache:
        graph = torch.ones(2, 4, requires_grad=True, device=cache.tensor.device) * 2
        added = cache.append(graph)
        assert not added.requires_grad
        assert not cache.whole.requires_grad
        assert added.tolist() == [[2.0] * 4] * 2
        del added


def test_it_sleeps_with_its_pool(torch: Any, machine: Any) -> None:
    """Made inside of a pool, it sleeps and wakes with it, and can be used again under the same pointer."""
    with machine.pool("kv"):
        cache = machine.ElasticTensor(100, 1024, rows=3)
    cache.tensor.copy_(torch.arange(3 * 1024).view(3, 1024))
    pointer = cache.data_ptr
    machine.sleep("kv")
    assert cache.asleep
    with pytest.raises(remap.PausedError):
        _ = cache.tensor
    with pytest.raises(remap.PausedError):
        cache.resize(4)
    machine.wake("kv")
    cache.resize(4)
    assert cache.tensor.data_ptr() == pointer
    assert cache.tensor[2, 5].item() == 2 * 1024 + 5
    cache.close()


def test_tensors_are_copied_and_not_what_they_lie_in(torch: Any, machine: Any) -> None:
    """A copy of an ElasticTensor or a pool would be a second owner: refused, as in a module that holds one (1)."""
    with machine.pool("cache") as pool:
        cache = machine.ElasticTensor(100, 64, rows=4)
    module = torch.nn.Module()
    module.cache = cache
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"ElasticTensor of shape \(4, 64\): two .*clone"):
            take(cache)
        with pytest.raises(TypeError, match="pool 'cache': a tag has one pool"):
            take(pool)
    with pytest.raises(TypeError, match="ElasticTensor"):
        copy.deepcopy(module)
    cache.close()


def test_tensors_have_storages_of_their_rows(torch: Any, machine: Any) -> None:
    """What torch does with whole storages (save, pickle, deep-copy, share) sees the rows there are, and no more."""
    with machine.ElasticTensor(100_000, 64, rows=4) as cache:
        cache.tensor.copy_(torch.arange(256.0).view(4, 64))
        parts: Any = ((cache.tensor, 4), (cache.view(3), 3), (cache.view(0), 0), (cache.tensor[1:3], 4))
        for part, rows in parts:
            assert part.untyped_storage().nbytes() == rows * 256
            file = io.BytesIO()
            torch.save({"cache": part}, file)
            file.seek(0)
            copies = (torch.load(file)["cache"], pickle.loads(pickle.dumps(part)), copy.deepcopy(part))
            assert all(torch.equal(one, part) for one in copies)
        if cache.tensor.device.type == "cpu":  # moves the tensor, and nothing else
            moved = cache.tensor.share_memory_()
            moved.fill_(-1)
            assert moved.data_ptr() != cache.data_ptr == cache.tensor.data_ptr()
        assert cache.tensor[3, 63].item() == 255
        cache.resize(2)
        cache.resize(3)
        assert cache.tensor.untyped_storage().nbytes() == 3 * 256
        assert cache.whole.untyped_storage().nbytes() == 100_000 * 256
        part = parts = None


def test_views_of_inference(torch: Any, machine: Any) -> None:
    """A view that is taken in inference mode is none of its tensors: it can be written to afterwards."""
    with machine.ElasticTensor(10, 4, rows=2) as cache:
        with torch.inference_mode():
            view = cache.tensor
        assert not view.is_inference()
        view.fill_(1)
        del view


def test_looking_up_what_lies_in_it(torch: Any, machine: Any) -> None:
    """It and its views can be named in an order, waited for, written to as they sleep, and registered."""
    with machine.pool("kv"):
        first = machine.ElasticTensor(100_000, 64, rows=2, chunk=2 * MiB)
        cache = machine.ElasticTensor(100_000, 64, rows=4, chunk=2 * MiB)
        weights = machine.empty(100)
    cache.tensor.copy_(torch.arange(256.0).view(4, 64))
    view, last = cache.tensor, cache.view(4)[2:]
    for named in (cache, view, cache.whole):
        machine.sleep("kv")
        with machine.wake("kv", order=[named, weights, cache.buffer], events=True) as arriving:
            assert arriving.waking.events[0].chunk.address == cache.data_ptr
            arriving.wait_for(named)
            assert float(view[3, 63]) == 255
    machine.sleep("kv")
    copies = machine.backup(cache), machine.backup(last)
    assert [tuple(one.shape) for one in copies] == [(4, 64), (2, 64)]
    copies[0].mul_(2)
    assert copies[1][1, 63].item() == 510
    del copies
    with pytest.raises(remap.InvalidValueError, match=r"only .* Pass the ElasticTensor itself"):
        machine.backup(cache.whole)
    machine.wake("kv")
    assert float(view[1, 0]) == 128
    assert machine.buffer_of(last) is machine.buffer_of(cache) is cache.buffer
    with machine.registered(view, "NCCL"), pytest.raises(remap.InUseError, match="registered with NCCL"):
        machine.sleep("kv")
    with pytest.raises(remap.InvalidValueError, match="shareable"):
        machine.export(view)
    del view, last, named
    with machine.registered(cache, "NCCL"), pytest.raises(remap.InUseError, match="registered with NCCL"):
        cache.close()
    cache.tensor.fill_(1)
    cache.close()
    first.close()
    with pytest.raises(remap.ClosedError):
        machine.buffer_of(cache)


def test_closing_while_tensors_live(machine: Any) -> None:
    """It says so and stays open; after they have gone it closes, once (trap 26)."""
    cache = machine.ElasticTensor(10, 16, rows=2)
    part = cache.tensor[1]
    with pytest.raises(remap.InUseError, match="live"):
        cache.close()
    cache.tensor.fill_(1)
    assert float(part.sum()) == 16
    del part
    cache.close()
    cache.close()
    with pytest.raises(remap.ClosedError):
        cache.view(1)


def test_a_block_that_fails_while_tensors_live(machine: Any) -> None:
    """Its own error is raised, with the refusal to close as a note; the memory goes, in silence, with the tensors."""
    kept: list[Any] = []
    with pytest.raises(ValueError, match="mine") as failed, machine.ElasticTensor(10, 4, rows=2) as cache:
        kept.append(cache.tensor.fill_(1))
        raise ValueError("mine")
    assert "tensors that were taken from it live" in failed.value.__notes__[0]
    assert float(kept[0].sum()) == 8
    kept.clear()
    cache = failed = None  # type: ignore[assignment]
    gc.collect()
    assert remap.collect() == 1


def test_tensors_keep_the_memory(machine: Any) -> None:
    """A tensor that outlives the object it was taken from goes on working (trap 26)."""
    cache = machine.ElasticTensor(10, 16, rows=2)
    part = cache.tensor[1].fill_(2)
    cache.buffer._warns = False
    del cache
    gc.collect()
    remap.collect()
    assert float(part.sum()) == 32


@pytest.mark.parametrize("rows", [1001, 1020, 1 << 60, -1])
def test_rows_beyond_its_capacity(machine: Any, rows: int) -> None:
    """Refused in rows, also where the memory, which comes in whole granules, would have room for a few more."""
    with machine.ElasticTensor(1000, 8, 64, rows=4) as cache:
        said = f"to {rows} rows: it may have 0 to 1000, its capacity"
        with pytest.raises(remap.InvalidValueError, match=said):
            cache.resize(rows)
        assert (len(cache), cache.shape, len(cache.tensor)) == (4, (4, 8, 64), 4)
        cache.resize(1000)
        assert len(cache.tensor) == 1000
    with pytest.raises(remap.InvalidValueError, match=said):
        machine.ElasticTensor(1000, 8, 64, rows=rows)


def test_numbers_of_rows(torch: Any, machine: Any) -> None:
    """Integers of any kind are taken, as Python's own; what is none is a `TypeError`, and nothing is left half-made."""
    with machine.ElasticTensor(np.int64(10), np.int32(4), rows=np.int8(1)) as cache:
        cache.resize(np.int64(5))
        assert cache.shape == cache.tensor.shape == cache.view(np.uint8(5)).shape == (5, 4)
        assert repr((cache.shape, cache.capacity, cache.row)) == "((5, 4), 10, (4,))"
        for wrong in (True, np.True_, 2.0, "3", None):
            for ask in (cache.resize, cache.view):
                with pytest.raises(TypeError, match=f"rows {wrong!r}: it is a whole number"):
                    ask(wrong)
        assert cache.shape == (5, 4)
        for rows, advice in ((-1, ""), (7, r"\. Call resize\(7\) first"), (11, "")):
            with pytest.raises(remap.InvalidValueError, match=f"a view of {rows} rows: there are 5{advice}$"):
                cache.view(rows)
    for arguments in ((True, 4), (10, True), (10, "4"), (10.0, 4)):
        with pytest.raises(TypeError, match="it is a whole number"):
            machine.ElasticTensor(*arguments)
    with pytest.raises(TypeError, match="rows True"):
        machine.ElasticTensor(10, 4, rows=True)
    assert torch is not None


def test_shapes(torch: Any, machine: Any) -> None:
    """Numbers, or one sequence of them, of any integer type; text is no shape."""
    with machine.pool("shapes"):
        for shape in ((3, 4), ((3, 4),), ([np.int64(3), 4],), (torch.Size([3, 4]),), (np.array([3, 4]),)):
            assert machine.empty(*shape).shape == (3, 4)
        assert machine.empty(np.int64(3)).shape == (3,)
        assert machine.empty().shape == machine.empty(()).shape == ()
        for wrong in ((3, "4"), ("34",), (3.0,), (True, 3), ((3, "4"),)):
            with pytest.raises(TypeError, match=r"extent .*: it is a whole number"):
                machine.empty(*wrong)
    users: Any = [0, remap.Host()] if remap.driver().name == "host" else [0]
    with remap.allocate(2 * MiB, resident=0, accessing=users) as buffer:
        assert machine.tensor(buffer, torch.int8, np.int64(3)).shape == (3,)
        gc.collect()


def test_more_rows_than_there_is_memory(torch: Any, machine: Any) -> None:
    """Rows that it is to begin with and that do not fit are an `OutOfMemoryError`, and nothing is left."""
    before = remap.device(0).memory()
    rows = 2 * before.total // MiB
    with pytest.raises(remap.OutOfMemoryError):
        machine.ElasticTensor(rows, MiB, dtype=torch.uint8, rows=rows)
    assert remap.device(0).memory().free >= before.free - (0 if remap.driver().name == "host" else 16 * MiB)


def test_types(torch: Any, machine: Any) -> None:
    """What torch takes for a type is taken, and all else is a TypeError that says what is meant."""
    types = {None: torch.float32, float: torch.float64, torch.int8: torch.int8, "bfloat16": torch.bfloat16}
    for given, meant in types.items():
        with machine.ElasticTensor(10, 4, dtype=given, rows=1) as cache:
            assert cache.dtype == cache.tensor.dtype == meant
    users: Any = [0, remap.Host()] if remap.driver().name == "host" else [0]
    with remap.allocate(2 * MiB, resident=0, accessing=users) as buffer:
        assert machine.tensor(buffer, int, 4).dtype == torch.int64
        assert machine.tensor(buffer, "float16", 4).dtype == torch.float16
        for wrong in ("float33", "nn", 4):
            with pytest.raises(TypeError, match=rf"dtype {wrong!r}: torch takes .*torch\.float32"):
                machine.ElasticTensor(10, 4, dtype=wrong)
            with pytest.raises(TypeError, match=rf"dtype {wrong!r}: torch takes .*torch\.float32"):
                machine.tensor(buffer, wrong, 4)
        gc.collect()


ASLEEP = """
import resource
import remap
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
remap.use("host", coherent=True, integrated=False)
with remap.torch.pool("weights"):
    weights = remap.torch.empty(1024).zero_()
remap.torch.sleep("weights")
weights.sum()
"""


def test_use_of_a_sleeping_tensor(torch: Any) -> None:
    """On the host driver it ends the process as any unmapped memory does, and faulthandler shows where."""
    assert torch is not None
    if remap.driver().name == "cuda":
        pytest.skip("about CPU torch")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", ASLEEP], check=False, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "Segmentation fault" in done.stderr
    assert 'File "<string>", line 9' in done.stderr


@pytest.mark.filterwarnings("ignore:pool 'empty' .* nothing was ever made")
def test_a_pool_that_holds_nothing(machine: Any) -> None:
    """It sleeps as others do, with no buffers, and can be entered again when it was woken."""
    with machine.pool("empty"):
        pass
    assert machine.sleep("empty").buffers == 0
    with pytest.raises(remap.PausedError), machine.pool("empty"):
        pass
    machine.wake("empty")
    with machine.pool("empty"):
        pass


def test_completion_shows_what_is_public(machine: Any) -> None:
    """`dir` of the module lists its public names, and no module or name that it merely imports."""
    assert sorted(dir(machine)) == sorted(machine.__all__)


@pytest.mark.parametrize("row", [(0,), (3, 0)])
def test_rows_without_bytes(machine: Any, row: tuple[int, ...]) -> None:
    """Refused: there is nothing to grow."""
    with pytest.raises(remap.InvalidValueError, match="no bytes"):
        machine.ElasticTensor(10, *row)


def test_extents_that_overflow(machine: Any) -> None:
    """An `OverflowError`, before anything is reserved (trap 43)."""
    with pytest.raises(OverflowError):
        machine.ElasticTensor(1 << 40, 1 << 40)


def test_the_device_that_is_named(torch: Any, machine: Any) -> None:
    """By number, by name or by object; a name of what the driver's memory is not is refused (trap 40)."""
    last = remap.driver().device_count() - 1
    for named in (last, f"cuda:{last}", torch.device("cuda", last), remap.device(last)):
        with machine.ElasticTensor(10, 4, rows=1, device=named) as cache:
            assert cache.buffer.resident[0].index == last
    wrong = ("meta", torch.device("meta")) + (("cpu",) if remap.driver().name == "cuda" else ("mps",))
    for named in wrong:
        with pytest.raises(remap.InvalidValueError, match="torch's device"):
            machine.ElasticTensor(10, 4, device=named)
        with machine.pool("named"), pytest.raises(remap.InvalidValueError, match="torch's device"):
            machine.empty(3, device=named)
    with pytest.raises(remap.InvalidValueError, match="device 64"):
        machine.ElasticTensor(10, 4, device="cuda:64")


def test_the_device_that_is_current(torch: Any, machine: Any) -> None:
    """Where none is named, or none by number, it is torch's current device on CUDA, and the default one elsewhere."""
    last = 0
    if remap.driver().name == "cuda":
        last = torch.cuda.device_count() - 1
        torch.cuda.set_device(last)
    try:
        for named in (None, "cuda", torch.device("cuda")):
            with machine.ElasticTensor(10, 4, rows=1, device=named) as cache:
                assert cache.buffer.resident[0].index == last
            with machine.pool("current"):
                tensor = machine.empty(3, device=named)
            assert machine.buffer_of(tensor).device == last
    finally:
        if remap.driver().name == "cuda":
            torch.cuda.set_device(0)


def test_poisoned_rows(torch: Any, machine: Any) -> None:
    """With poison, what was never written is visible (trap 18)."""
    with machine.ElasticTensor(10, 4, dtype=torch.uint8, rows=2, poison=True) as cache:
        assert cache.tensor.tolist() == [[0xCB] * 4] * 2


def test_a_buffer_as_a_tensor(torch: Any, machine: Any) -> None:
    """No copy, any type of torch, any part; the buffer stays open while the tensor lives (trap 26)."""
    users: Any = [0, remap.Host()] if remap.driver().name == "host" else [0]
    with remap.allocate(2 * MiB, resident=0, accessing=users) as buffer:
        tensor = machine.tensor(buffer, torch.bfloat16, (4, 8), offset=1024)
        tensor.fill_(2)
        assert tensor.data_ptr() == buffer.address + 1024
        assert bytes(buffer.to_host("uint8", 2, offset=1024)) == b"\x00\x40"
        assert machine.tensor(buffer).shape == (MiB // 2,)
        assert machine.tensor(buffer, torch.int8, 0).numel() == 0
        with pytest.raises(remap.InUseError, match="viewed through"):
            buffer.close()
        with pytest.raises(remap.InvalidValueError, match="multiple"):
            machine.tensor(buffer, torch.float32, 4, offset=2)
        with pytest.raises(remap.InvalidValueError, match="fit"):
            machine.tensor(buffer, torch.float32, (MiB,))
        del tensor
        gc.collect()


def test_memory_that_the_cpu_may_not_see(torch: Any) -> None:
    """On a simulated device that keeps its memory to itself, CPU torch gets none, and the message says what to do."""
    assert torch is not None
    if remap.driver().name == "cuda":
        pytest.skip("about CPU torch")
    with pytest.raises(remap.InvalidValueError, match="coherent=True"):
        remap.torch.ElasticTensor(10, 4)
    with pytest.raises(remap.InvalidValueError, match="coherent=True"), remap.torch.pool("weights"):
        remap.torch.empty(1)
    with remap.allocate(1, resident=0) as buffer, pytest.raises(remap.AccessError):
        remap.torch.tensor(buffer)
