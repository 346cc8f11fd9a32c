"""What is asked of tensors and pools that cannot be, and tensors of no elements: refused in words, or simply right."""

from __future__ import annotations

import gc
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB

USERS: list[Any] = [0, remap.Host()]
"""Who may look at a buffer that CPU torch is to see."""


def users() -> list[Any]:
    """Return who may touch a buffer that torch is to show."""
    return USERS if remap.driver().name == "host" else [0]


def test_tensors_of_no_elements(torch: Any, machine: Any) -> None:
    """They need no memory, wherever they lie: a backup, an export and a view of memory have their shape (trap 39)."""
    from remap.integrations.tms import TorchMemorySaver

    with machine.pool("weights", shareable="posix_fd"):
        weights, nothing = machine.empty(8, 4).fill_(1), machine.empty(0, 4)
    sent = [machine.export(one) for one in (nothing, weights[:0], weights[:0].t())]
    opened = [machine.open(one) for one in sent]
    assert [one.shape for one in opened] == [(0, 4), (0, 4), (4, 0)]
    assert {one.device for one in opened} == {weights.device}
    assert pickle.loads(pickle.dumps(sent[0])) == sent[0]
    machine.sleep("weights")
    for one in (nothing, weights[:0]):
        assert machine.backup(one).shape == (0, 4)
        saver: Any = TorchMemorySaver()
        assert saver.get_cpu_backup(one, zero_copy=True).shape == (0, 4)
    machine.wake("weights")
    for one in sent:
        one.close()
    with remap.allocate(2 * MiB, resident=0, accessing=users()) as buffer:
        assert machine.tensor(buffer, torch.int64, 0).device == weights.device
        assert machine.tensor(buffer, "int64", (0, 3), offset=buffer.size).shape == (0, 3)
        with pytest.raises(remap.InvalidValueError, match="offset"):
            machine.tensor(buffer, offset=buffer.size + 4)
    with remap.ElasticBuffer(2 * MiB, accessing=users()) as elastic:
        assert machine.tensor(elastic).shape == (0,)


def test_what_lies_nowhere(torch: Any, machine: Any) -> None:
    """What is no tensor, or no span of memory, is a TypeError that says what is taken."""
    sparse = torch.eye(3).to_sparse()
    for call in (machine.backup, machine.buffer_of, machine.export):
        for wrong in ([1], None, np.ones(3)):
            with pytest.raises(TypeError, match="only tensors and ElasticTensors"):
                call(wrong)
        with pytest.raises(TypeError, match=r"layout torch\.sparse_coo: .*values\(\)"):
            call(sparse)
    with machine.ElasticTensor(10, 3, rows=1) as rows:
        for array in ([[1, 2, 3]], np.ones((1, 3))):
            with pytest.raises(TypeError, match=r"to be appended: .*torch\.as_tensor"):
                rows.append(array)
        assert rows.append(torch.as_tensor(np.ones((1, 3)))).tolist() == [[1, 1, 1]]
        gc.collect()
    with pytest.raises(TypeError, match="it shows memory of a buffer"):
        machine.tensor(3)


def test_memory_that_may_only_be_read(torch: Any, machine: Any) -> None:
    """Torch has no read-only tensors, and a write would end the process: whoever wants one says that nobody writes."""
    with remap.allocate(2 * MiB, resident=0, accessing=users(), shareable="posix_fd") as buffer:
        buffer.array("float32").copy_from(np.full(buffer.size // 4, 3, np.float32))
        with remap.export(buffer) as exported, remap.open(exported, access="r", accessing=users()) as opened:
            with pytest.raises(remap.AccessError, match=r'may only be read, .*Pass access="r"'):
                machine.tensor(opened, torch.float32)
            assert machine.tensor(opened, torch.float32, 8, access="r").tolist() == [3] * 8
            gc.collect()
        tensor = machine.tensor(buffer, torch.float32, 8)
        tensor[0] = 5
        assert tensor.tolist() == [5, *[3] * 7]
        del tensor


def test_one_thing_that_is_needed_first(torch: Any, machine: Any) -> None:
    """`order=` takes a tensor, a module or an ElasticTensor alone, and passes over parts that have no memory."""
    layer = torch.nn.Linear(8, 8)
    layer.later, layer.nowhere = torch.nn.LazyLinear(3), torch.nn.Linear(2, 2, device="meta")
    layer.register_buffer("sparse", torch.eye(3).to_sparse())
    with machine.pool("weights"), torch.no_grad():
        layer.weight.data = machine.empty(8, 8).fill_(1)
        single = machine.empty(1).fill_(2)
        rows = machine.ElasticTensor(10, 4, rows=2)
    for first in (layer, layer.weight, single, rows, (one for one in [single, layer])):
        machine.sleep("weights")
        machine.wake("weights", order=first)
    machine.sleep("weights")
    for wrong, kind in ((torch.zeros(1), ValueError), ("weight", TypeError), (layer.sparse, TypeError)):
        with pytest.raises(kind, match=r"none of it|tensors and modules|not one span"):
            machine.wake("weights", order=wrong)
    machine.wake("weights")
    assert float(single) == 2
    rows.close()
    del layer


def test_a_margin_is_named_where_it_is_in_the_way(machine: Any) -> None:
    """Where memory is free and a margin keeps it, the message says so; on CUDA the error is torch's."""
    if remap.driver().name == "cuda":
        pytest.skip("torch's own error says what torch knows")
    machine.set_margin("10GiB")
    try:
        with (
            machine.pool("weights"),
            pytest.raises(remap.OutOfMemoryError, match=r"a margin of 10 GiB .*set_margin"),
        ):
            machine.empty(10)
    finally:
        machine.set_margin(0)


def test_many_small_tensors(machine: Any) -> None:
    """A small tensor takes a whole granule of a simulated device; where that was too much, the message says so."""
    if remap.driver().name == "cuda":
        pytest.skip("torch puts small tensors together")
    with machine.pool("weights"):
        made: list[Any] = []
        with pytest.raises(
            remap.OutOfMemoryError,
            match=r'whole granules of 2 MiB.*remap\.use\("host", memory="256MiB", \.\.\.\)',
        ):
            made.extend(machine.empty(100) for _ in range(65))
    made.clear()


def test_a_pool_of_an_earlier_driver(machine: Any) -> None:
    """A pool, or a block of one, that was kept over `remap.use` says so, and takes nothing of the new driver."""
    if remap.driver().name == "cuda":
        pytest.skip("CUDA has one driver")
    with machine.pool("weights") as pool:
        pass
    block = machine.pool("weights")
    remap.use("host", memory=64 * MiB, coherent=True, integrated=False)
    before = remap.device(0).memory().free
    calls = (lambda: pool.empty(10), block.__enter__, lambda: pool.segments, lambda: pool.asleep, pool.trim)
    for call in calls:
        with pytest.raises(remap.ClosedError, match=r"an earlier driver, .*anew"):
            call()
    assert repr(pool) == "<remap.torch.Pool 'weights', of an earlier driver>"
    assert remap.device(0).memory().free == before
    with machine.pool("weights"):
        assert machine.empty(10).numel() == 10


def test_a_pool_that_is_empty_by_mistake(torch: Any, machine: Any) -> None:
    """CPU torch makes a model outside of the pool that it is in, which a test would not notice: said once."""
    if remap.driver().name == "cuda":
        pytest.skip("torch routes what it makes there")
    with machine.pool("weights"):
        layer = torch.nn.Linear(8, 8)
    with pytest.warns(remap.RemapWarning, match=r"'weights' .*nothing was ever made .*move_in"):
        assert machine.sleep("weights").buffers == 0
    machine.wake("weights")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        machine.sleep("weights")
        machine.wake("weights")
        with machine.pool("weights"):
            machine.move_in(layer)
        with machine.pool("rows"):
            rows = machine.ElasticTensor(10, 4)
        assert machine.sleep(["weights", "rows"]).buffers == 3
        machine.wake()
    rows.close()
    del layer


def test_moving_a_module_in(torch: Any, machine: Any) -> None:
    """Parameters stay the objects that they are, buffers and gradients go along, and what is shared stays shared."""
    layer = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.LazyLinear(2))
    layer[0].to(memory_format=torch.channels_last)
    layer[0].tied, layer.kept = layer[0].weight, layer[1].running_mean
    layer.register_buffer("kept_too", layer[1].running_mean)
    layer.register_buffer("sparse", torch.eye(3).to_sparse())
    layer[0].weight.grad = torch.ones_like(layer[0].weight)
    before, weight = layer[0].weight.detach().clone(), layer[0].weight
    with machine.pool("model"):
        assert machine.move_in(layer) is layer
    moved = [layer[0].weight, layer[0].bias, layer[0].weight.grad, layer[1].running_var, layer.kept_too]
    for one in moved:
        assert machine.buffer_of(one) in machine.pools()["model"].segments
    assert layer[0].weight is layer[0].tied is weight
    assert weight.stride() == before.stride()
    assert weight.requires_grad
    assert layer.kept_too.data_ptr() == layer[1].running_mean.data_ptr()
    machine.sleep("model")
    machine.wake("model")
    assert torch.equal(weight.cpu(), before.cpu())
    assert float(weight.grad.sum()) == weight.numel()
    with machine.pool("model"), machine.outside():
        machine.move_in(layer)
    with pytest.raises(remap.InvalidValueError, match="pool"):
        machine.buffer_of(weight)
    with machine.pool("model"), pytest.raises(TypeError, match="it takes a module"):
        machine.move_in(before)
    with pytest.raises(remap.InvalidValueError, match="move_in: this thread is in no pool"):
        machine.move_in(layer)


@pytest.mark.filterwarnings("ignore:pool 'empty' .* nothing was ever made")
def test_a_listener_that_raises_while_pools_sleep(machine: Any) -> None:
    """Its error comes when everything sleeps, pools that hold nothing among them; a refusal leaves all awake (5)."""
    with machine.pool("weights"):
        weights = machine.empty(10).fill_(1)
    with machine.pool("empty"):
        pass
    fail = True

    def listen(_: Any) -> None:
        if fail:
            raise ZeroDivisionError

    machine.buffer_of(weights).on_change(listen)
    with machine.registered(weights, "NCCL"), pytest.raises(remap.InUseError):
        machine.sleep(["weights", "empty"])
    assert {one.state for one in machine.status().values()} == {"awake"}
    with pytest.raises(ZeroDivisionError):
        machine.sleep(["weights", "empty"])
    assert {one.state for one in machine.status().values()} == {"asleep"}
    fail = False
    machine.wake()
    assert float(weights.sum()) == 10
