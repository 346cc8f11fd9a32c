"""Pools sleep and wake as transactions, whatever happens meanwhile; on CPU torch and the host driver, and on CUDA."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest

import remap
from remap import MiB, lifetime, residency


def free() -> int:
    """Return the free bytes of the first device."""
    return remap.device(0).memory().free


def filled(machine: Any, tag: str, count: int = 3, size: int = 12 * MiB) -> list[Any]:
    """Return tensors of a pool, with random contents."""
    with machine.pool(tag):
        tensors = [machine.empty(size // 4) for _ in range(count)]
    return [tensor.normal_() for tensor in tensors]


def test_contents_come_back_at_the_same_addresses(torch: Any, machine: Any) -> None:
    """What was kept wakes as it was, under the same pointers (invariant 6, trap 19); sleep frees memory (trap 7)."""
    before = free()
    weights = filled(machine, "weights")
    kept, pointers = [one.clone() for one in weights], [one.data_ptr() for one in weights]
    awake = free()
    assert awake < before
    moved = machine.sleep({"weights": "host"})
    assert moved.freed == sum(one.size for one in machine.pools()["weights"].segments)
    assert moved.confirmed >= 36 * MiB
    assert free() - awake >= 36 * MiB
    assert machine.status()["weights"].state == "asleep"
    assert machine.status()["weights"].resident == 0
    machine.wake("weights", wait=1)
    assert [one.data_ptr() for one in weights] == pointers
    assert all(torch.equal(one, two) for one, two in zip(weights, kept, strict=True))
    assert machine.status()["weights"].kept == {}


def test_given_up_contents_are_undefined(machine: Any) -> None:
    """With keep=None nothing is copied, and poison makes what wakes visible (invariant 8, trap 18)."""
    (cache,) = filled(machine, "kv", 1)
    assert machine.sleep({"kv": None}).bytes == 0
    machine.wake("kv", poison=True)
    assert cache.view(remap.integrations.tensors.torch.uint8)[100].item() == 0xCB
    cache.fill_(1)
    assert float(cache.sum()) == cache.numel()


def test_one_transaction(machine: Any) -> None:
    """A tag that is not there leaves all pools awake: nothing was begun (invariant 5)."""
    weights = filled(machine, "weights")
    with pytest.raises(remap.InvalidValueError, match="no such group"):
        machine.sleep({"weights": "host", "nothing": None})
    assert machine.status()["weights"].state == "awake"
    assert float(weights[0].abs().sum()) > 0


def test_waking_with_too_little_memory(torch: Any, machine: Any) -> None:
    """A wake that finds no memory raises, leaves everything asleep, and succeeds later (traps 1, 14)."""
    on_host = remap.driver().name == "host"
    size, slack = (24 * MiB, 0) if on_host else (1024 * MiB, 256 * MiB)  # a GPU cannot give its last bytes
    weights = filled(machine, "weights", 2, size)
    kept = [one.clone() for one in weights]
    machine.sleep("weights")
    with remap.allocate(free() - size - slack, resident=0):
        with pytest.raises(remap.OutOfMemoryError):
            machine.wake("weights")
        assert machine.status()["weights"].state == "asleep"
        with pytest.raises(remap.OutOfMemoryError):
            machine.wake("weights", wait=0.05)
    machine.wake("weights")
    assert all(torch.equal(one, two) for one, two in zip(weights, kept, strict=True))


def test_a_sleeping_pool_cannot_be_entered(machine: Any) -> None:
    """Entering raises, since torch would hand out memory that is not there; so does making a tensor in it."""
    filled(machine, "weights", 1)
    pool = machine.pools()["weights"]
    machine.sleep("weights")
    with pytest.raises(remap.PausedError, match="wake"), machine.pool("weights"):
        pass
    with pytest.raises(remap.PausedError):
        pool.empty(10)
    machine.wake()
    pool.empty(10)


def test_an_entered_pool_cannot_sleep(machine: Any) -> None:
    """Sleep refuses while a thread is inside of a block, and everything stays awake."""
    with machine.pool("weights"):
        tensor = machine.empty(10).fill_(1)
        with pytest.raises(remap.InUseError, match="inside"):
            machine.sleep("weights")
    assert float(tensor.sum()) == 10
    machine.sleep("weights")
    machine.wake("weights")


def test_an_exception_inside_of_a_block(machine: Any) -> None:
    """It passes through unchanged, and the pool can be used and put to sleep after it."""
    made: list[Any] = []
    with pytest.raises(ZeroDivisionError), machine.pool("weights"):
        made.append(machine.empty(10).fill_(2))
        raise ZeroDivisionError
    machine.sleep("weights")
    machine.wake("weights")
    assert float(made[0].sum()) == 20
    with pytest.raises(remap.InvalidValueError, match="in no pool"):
        machine.empty(1)


def test_registered_memory_stays_awake(machine: Any) -> None:
    """Sleep refuses a pool that remap was told is registered elsewhere, and names who; deleting tensors ends it."""
    weights = filled(machine, "weights", 2)
    registration = machine.registered(weights[0][100:], "NCCL")
    with pytest.raises(remap.InUseError, match="registered with NCCL"):
        machine.sleep({"weights": "host"})
    assert machine.status()["weights"].state == "awake"
    registration.close()
    machine.sleep("weights")
    with pytest.raises(remap.PausedError):
        machine.registered(weights[0], "NCCL")
    machine.wake("weights")
    machine.registered(weights[1], "NCCL")
    weights.clear()
    gc.collect()
    machine.sleep("weights")
    machine.wake("weights")


def test_deleting_tensors_while_they_sleep(torch: Any, machine: Any) -> None:
    """Their addresses and backups are given back; the others wake (trap 23)."""
    weights = filled(machine, "weights")
    other = weights[2].clone()
    machine.sleep("weights")
    held = remap.host_pool().statistics().used
    del weights[:2]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    machine.status()
    assert remap.host_pool().statistics().used < held
    machine.wake("weights")
    assert torch.equal(weights[0], other)
    assert len(machine.pools()["weights"].segments) == 1


def test_the_backup_of_a_sleeping_tensor_is_writable(torch: Any, machine: Any) -> None:
    """What is written into it wakes, in the tensor's shape and strides; while it lives, nothing wakes."""
    with machine.pool("weights"):
        tensor = machine.empty(16, 8, dtype=torch.bfloat16)
    tensor.copy_(torch.arange(128).view(16, 8))
    part = tensor.t()[2:5]
    machine.sleep("weights")
    copy = machine.backup(part)
    assert copy.shape == part.shape
    assert copy.stride() == part.stride()
    assert copy.device.type == "cpu"
    assert copy[0, 0].item() == 2
    copy[0, 0] = 77
    with pytest.raises(remap.InUseError, match="view"):
        machine.wake("weights")
    del copy
    gc.collect()
    machine.wake("weights")
    assert tensor[0, 2].item() == 77
    with pytest.raises(remap.InvalidValueError, match="not paused"):
        machine.backup(tensor)


def test_the_backup_of_lazy_views(torch: Any, machine: Any) -> None:
    """A conjugate, or a negative, that is written through its backup has the values that were written."""
    with machine.pool("weights"):
        tensor = machine.empty(8, dtype=torch.complex64)
    tensor.copy_(torch.arange(8) * (1 + 2j))
    conjugate, negative = tensor[:4].conj(), tensor[4:].conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    machine.sleep("weights")
    copies = machine.backup(conjugate), machine.backup(negative)
    assert copies[0].tolist() == [0, 1 - 2j, 2 - 4j, 3 - 6j]
    assert copies[1].tolist() == [-8, -10, -12, -14]
    copies[0].fill_(5 + 6j)
    copies[1].fill_(7)
    del copies
    machine.wake("weights")
    assert conjugate.tolist() == [5 + 6j] * 4
    assert negative.tolist() == [7] * 4
    assert tensor.tolist() == [5 - 6j] * 4 + [4 - 7j, 5 - 7j, 6 - 7j, 7 - 7j]


def test_lazy_views_are_not_exported(torch: Any, machine: Any) -> None:
    """The other process would read the memory, which holds other values."""
    with machine.pool("shared", shareable="posix_fd"):
        tensor = machine.empty(8, dtype=torch.complex64).fill_(1j)
    for lazy in (tensor.conj(), tensor.conj().imag):
        with pytest.raises(remap.InvalidValueError, match="lazy"):
            machine.export(lazy)
    machine.export(tensor.imag).close()


def test_no_backup_without_contents(machine: Any) -> None:
    """A pool that was put to sleep with None has none; a tensor of no pool neither. Both are said."""
    (cache,) = filled(machine, "kv", 1)
    machine.sleep({"kv": None})
    with pytest.raises(remap.InvalidValueError, match="given up"):
        machine.backup(cache)
    machine.wake("kv")
    with pytest.raises(remap.InvalidValueError, match="pool"):
        machine.backup(cache.clone())


def test_using_sleeping_memory_through_remap(machine: Any) -> None:
    """It raises `PausedError`, as for any paused buffer."""
    (cache,) = filled(machine, "kv", 1)
    buffer = machine.buffer_of(cache)
    machine.sleep("kv")
    with pytest.raises(remap.PausedError):
        buffer.fill(0)
    machine.wake("kv")
    buffer.fill(0)
    assert float(cache.abs().sum()) == 0
    with pytest.raises(remap.InUseError, match="belongs to the framework"):
        buffer.close()


def test_generations_tell_who_registered_the_memory(machine: Any) -> None:
    """Each wake counts, and calls those who have to register the memory again (invariant 6)."""
    (tensor,) = filled(machine, "weights", 1)
    buffer = machine.buffer_of(tensor)
    told: list[int] = []
    buffer.on_change(lambda one: told.append(one.generation))
    machine.sleep("weights")
    machine.wake("weights")
    assert told == [1, 2]


def test_a_listener_that_fails_in_an_ordered_wake(torch: Any, machine: Any) -> None:
    """Who gets its error gets no `Arriving`: everything has arrived then."""
    weights = filled(machine, "weights")
    kept = [tensor.clone() for tensor in weights]

    def fail(buffer: remap.Buffer) -> None:
        if not buffer.paused:
            raise ZeroDivisionError

    machine.buffer_of(weights[0]).on_change(fail)
    machine.sleep("weights")
    with pytest.raises(ZeroDivisionError):
        machine.wake("weights", events=True)
    assert not lifetime.live(residency.Waking)
    assert machine.status()["weights"].state == "awake"
    assert all(map(torch.equal, weights, kept))


def test_several_pools_in_one_call(torch: Any, machine: Any) -> None:
    """Weights are kept and caches given up in one transaction; each can wake by itself."""
    weights, caches = filled(machine, "weights"), filled(machine, "kv")
    kept = weights[0].clone()
    moved = machine.sleep({"weights": "host", "kv": None})
    assert moved.buffers == 6
    machine.wake("weights")
    assert torch.equal(weights[0], kept)
    assert machine.status()["kv"].state == "asleep"
    machine.wake()
    caches[0].fill_(3)
    assert machine.status()["kv"].state == "awake"


def test_kept_on_disk(torch: Any, machine: Any) -> None:
    """A pool sleeps in a file as well, and its backup can be changed there."""
    (weights,) = filled(machine, "weights", 1)
    kept = weights.clone()
    machine.sleep({"weights": "disk"})
    assert machine.status()["weights"].kept["disk"] > 0
    copy = machine.backup(weights)
    copy[5] = 42
    del copy
    machine.wake("weights")
    kept[5] = 42
    assert torch.equal(weights, kept)


def test_ordered_wake(torch: Any, machine: Any) -> None:
    """With events, what is needed first comes first, and streams wait for what they use."""
    weights = filled(machine, "weights")
    kept = [one.clone() for one in weights]
    machine.sleep("weights")
    with machine.wake("weights", order=[weights[2], weights[0]], events=True) as arriving:
        first = arriving.waking.events[0].chunk.address
        assert first == machine.buffer_of(weights[2])._address
        for one, two in ((weights[2], kept[2]), (weights[0], kept[0])):
            arriving.wait_for(one)
            assert torch.equal(one, two)
    assert arriving.result == arriving.waking.result
    assert torch.equal(weights[1], kept[1])
    machine.sleep("weights")
    machine.wake("weights")
    assert torch.equal(weights[1], kept[1])


def test_ordered_wake_of_a_module(torch: Any, machine: Any) -> None:
    """Modules name their parameters; what is no tensor is refused before anything wakes."""
    layer = torch.nn.Linear(64, 64)
    with machine.pool("weights"), torch.no_grad():
        for one in layer.parameters():
            one.data = machine.empty_like(one).copy_(one)
    kept = layer.weight.detach().clone()
    machine.sleep("weights")
    with pytest.raises(TypeError, match="tensors and modules"):
        machine.wake("weights", order=["weight"])
    with machine.wake("weights", order=[layer], events=True) as arriving:
        arriving.wait_for(layer)
        assert torch.equal(layer.weight, kept)
    del layer


def test_threads_make_tensors_while_others_sleep(machine: Any) -> None:
    """Threads in different pools, and in the same one, do not disturb each other (invariant 13)."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(tag: str, number: int) -> None:
        try:
            barrier.wait(30)
            for _ in range(10):
                with machine.pool(tag):
                    tensor = machine.empty(1000).fill_(number)
                assert float(tensor.sum()) == 1000 * number
        except BaseException as error:  # noqa: BLE001 (raised below)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"t{number // 2}", number)) for number in range(3)]
    weights = filled(machine, "weights", 1)
    for thread in threads:
        thread.start()
    barrier.wait(30)
    for _ in range(10):
        machine.sleep("weights")
        machine.wake("weights")
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert weights[0].numel()


def test_first_blocks_of_one_tag(machine: Any) -> None:
    """Threads that enter a new tag at the same moment are in one pool, which sleeps under none of them (13)."""
    together, inside = threading.Barrier(4), threading.Barrier(5)
    entered: list[Any] = []

    def work(tag: str, leave: threading.Event) -> None:
        together.wait(30)
        with machine.pool(tag) as pool:
            entered.append(pool)
            inside.wait(30)
            leave.wait(30)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for tag in (f"new{number}" for number in range(8)):
            leave = threading.Event()
            threads = [threading.Thread(target=work, args=(tag, leave)) for _ in range(4)]
            for thread in threads:
                thread.start()
            inside.wait(30)
            try:
                assert {id(pool) for pool in entered} == {id(machine.pools()[tag])}
                with pytest.raises(remap.InUseError, match="4 blocks"):
                    machine.sleep(tag)
            finally:
                leave.set()
                for thread in threads:
                    thread.join(30)
            entered.clear()
    finally:
        sys.setswitchinterval(before)


def test_migration_of_a_segment(torch: Any, machine: Any) -> None:
    """The memory behind tensors can move, to the host as well, under the same pointers."""
    (weights,) = filled(machine, "weights", 1)
    kept, pointer = weights.clone(), weights.data_ptr()
    remap.migrate(machine.buffer_of(weights), remap.HostNuma(0))
    assert weights.data_ptr() == pointer
    assert torch.equal(weights, kept)
    remap.migrate(machine.buffer_of(weights), 0)
    assert torch.equal(weights, kept)


def test_options_belong_to_the_tag(machine: Any) -> None:
    """A tag has one kind of memory: other options are refused, none are taken as they are."""
    with machine.pool("shared", shareable="posix_fd"):
        pass
    with pytest.raises(remap.InvalidValueError, match="another tag"), machine.pool("shared", rdma=True):
        pass
    with machine.pool("shared") as pool:
        assert pool.options.shareable == {"posix_fd"}
    with pytest.raises(remap.InvalidValueError, match="chunks"), machine.pool("other", chunks=0):
        pass


def test_memory_in_chunks(torch: Any, machine: Any) -> None:
    """A segment may be several allocations, whose addresses `chunks` lists; it sleeps and wakes as one (trap 33)."""
    with machine.pool("pieces", chunks=3):
        tensor = machine.empty(5 * MiB, dtype=torch.uint8)
    tensor.random_()
    kept = tensor.clone()
    buffer = machine.buffer_of(tensor)
    assert len(buffer.chunks) == 3
    assert sum(chunk.size for chunk in buffer.chunks) == buffer.size >= 5 * MiB
    machine.sleep("pieces")
    machine.wake("pieces")
    assert torch.equal(tensor, kept)


def test_shared_memory_does_not_sleep(machine: Any) -> None:
    """What was exported refuses, as others would go on using the old memory, until they may (detach)."""
    with machine.pool("shared", shareable="posix_fd"):
        tensor = machine.empty(100).fill_(4)
    with pytest.raises(remap.ShareError, match="handle"), machine.pool("plain"):
        machine.export(machine.empty(10))
    exported = machine.export(tensor)
    assert (exported.dtype, exported.shape, exported.strides) == ("float32", (100,), (1,))
    assert machine.status()["shared"].shared == 1
    with pytest.raises(remap.InUseError, match="exported or opened"):
        machine.sleep("shared")
    assert float(tensor.sum()) == 400
    machine.sleep("shared", detach=True)
    machine.wake("shared")
    assert float(tensor.sum()) == 400
    exported.close()


def test_running_out_of_memory(torch: Any, machine: Any) -> None:
    """It is the error that the caller expects, and the next allocation works (traps 8, 9)."""
    expected = (torch.OutOfMemoryError, remap.OutOfMemoryError)
    with machine.pool("weights"):
        with pytest.raises(expected):
            machine.empty(4 * remap.device(0).memory().total, dtype=torch.uint8)
        assert machine.empty(10).numel() == 10


def test_empty_tensors(torch: Any, machine: Any) -> None:
    """Tensors of no elements are valid, and make no driver call (trap 39)."""
    with machine.pool("weights") as pool:
        assert machine.empty(0, 5).shape == (0, 5)
        assert not pool.segments
    with pytest.raises(remap.InvalidValueError, match="extent"), machine.pool("weights"):
        machine.empty(-1)


def test_a_margin_makes_allocations_fail(torch: Any, machine: Any) -> None:
    """With a margin, pools leave that much memory free."""
    machine.set_margin(free() - 16 * MiB)
    try:
        with machine.pool("weights"):
            with pytest.raises((torch.OutOfMemoryError, remap.OutOfMemoryError)):
                machine.empty(32 * MiB, dtype=torch.uint8)
            machine.empty(MiB, dtype=torch.uint8)
    finally:
        machine.set_margin(0)
    with machine.pool("weights"):
        machine.empty(32 * MiB, dtype=torch.uint8)


def test_a_failing_step_of_sleep_changes_nothing(torch: Any, machine: Any) -> None:
    """A CPU view, or a backup, keeps the memory where it is: refused, with contents and state as they were."""
    (weights,) = filled(machine, "weights", 1)
    buffer = machine.buffer_of(weights)
    kept = weights.clone()
    view = machine.tensor(buffer, torch.uint8, (16,))
    if view.device.type == "cpu":
        with pytest.raises(remap.InUseError, match="view"):
            machine.sleep("weights")
        assert machine.status()["weights"].state == "awake"
    del view
    machine.sleep("weights")
    machine.wake("weights")
    assert torch.equal(weights, kept)


def test_a_pool_that_was_resumed_as_a_group(torch: Any, machine: Any) -> None:
    """Whether a pool sleeps is what its memory says, whoever paused or resumed it; with none, it is remembered (14)."""
    pool_states: list[tuple[str, bool]] = []

    def look() -> None:
        pool_states.append((machine.status()["weights"].state, machine.pools()["weights"].asleep))

    (weights,) = filled(machine, "weights", 1)
    kept = weights.clone()
    machine.sleep("weights")
    remap.resume("weights")
    look()
    assert pool_states == [("awake", False)]
    assert torch.equal(weights, kept)
    with machine.pool("weights"):
        other = machine.empty(10).fill_(1)
    remap.pause("weights")
    look()
    with pytest.raises(remap.PausedError), machine.pool("weights"):
        pass
    machine.wake("weights")
    assert float(other.sum()) == 10
    machine.sleep("weights")
    del weights, other
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    look()
    machine.wake("weights")
    look()
    assert pool_states[1:] == [("asleep", True), ("asleep", True), ("awake", False)]


@pytest.mark.filterwarnings("ignore:pool 'kv' .* nothing was ever made")
def test_an_empty_pool_sleeps(machine: Any) -> None:
    """A pool that holds nothing sleeps until it is woken; one that holds other buffers alone is as they are."""
    with machine.pool("kv"):
        pass
    machine.sleep({"kv": None})
    assert machine.status()["kv"].state == "asleep"
    with pytest.raises(remap.PausedError), machine.pool("kv"):
        pass
    machine.wake("kv")
    with machine.pool("kv"):
        keys = machine.ElasticTensor(100, 1024, rows=2)
    machine.sleep({"kv": None})
    assert machine.status()["kv"].state == "asleep"
    remap.resume("kv")
    assert machine.status()["kv"].state == "awake"
    keys.close()
    assert machine.status()["kv"].state == "awake"


def test_deleting_tensors_while_a_wake_waits(torch: Any, machine: Any) -> None:
    """What is deleted while a wake waits for memory goes, and the rest wakes as soon as there is enough for that."""
    if torch.cuda.is_available():
        pytest.skip("what CUDA has in use is machine-wide, and this is about the last bytes")
    weights = filled(machine, "weights", 2, 24 * MiB)
    kept = weights[1].clone()
    machine.sleep("weights")
    half = sum(one.size for one in machine.pools()["weights"].segments) // 2
    failures: list[BaseException] = []

    def wake() -> None:
        try:
            machine.wake("weights", wait=60)
        except BaseException as error:  # noqa: BLE001 (looked at below)
            failures.append(error)

    with remap.allocate(free() - half, resident=0):
        waker = threading.Thread(target=wake)
        waker.start()
        del weights[0]
        gc.collect()
        remap.collect()
        machine.status()
        waker.join(30)
        assert not waker.is_alive()
        assert not failures, failures
    assert machine.status()["weights"].state == "awake"
    assert torch.equal(weights[0], kept)


def test_status_while_other_threads_delete(machine: Any) -> None:
    """A snapshot of what is there is never disturbed by what goes at that moment (invariant 13)."""
    failures: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            while not done.is_set():
                with machine.pool("p"):
                    tensors = [machine.empty(10) for _ in range(5)]
                del tensors
        except BaseException as error:  # noqa: BLE001 (looked at below)
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for worker in workers:
            worker.start()
        for _ in range(300):
            status = machine.status()
            assert "p" not in status or status["p"].state == "awake"
    finally:
        done.set()
        for worker in workers:
            worker.join(60)
        sys.setswitchinterval(before)
    assert not failures, failures


def test_progress_of_an_ordered_wake(torch: Any, machine: Any) -> None:
    """A wake that returns before its contents arrive has no progress to tell of, and says so, as resume does."""
    (weights,) = filled(machine, "weights", 1)
    kept = weights.clone()
    machine.sleep("weights")
    with pytest.raises(remap.InvalidValueError, match="progress"):
        machine.wake("weights", events=True, progress=print)
    assert machine.status()["weights"].state == "asleep"
    machine.wake("weights")
    assert torch.equal(weights, kept)


def test_an_address_that_is_used_again(torch: Any, machine: Any) -> None:
    """Memory that the framework gave back and made anew at the same address is another segment, whoever noticed."""
    if torch.cuda.is_available():
        pytest.skip("torch does not say where it puts its next segment")
    from remap.integrations.memory import memory

    with machine.pool("weights") as pool:
        tensor = pool.empty(100)
    old = machine.buffer_of(tensor)
    native = memory().pools["weights"]
    address = old.record.address
    for _ in range(20):  # as torch does, which tells nobody
        native._free(address, old.size, 0, 0)
        address = native._allocate(old.size, 0, 0)
        if address == old.record.address:
            break
    new = machine.buffer_of(tensor)
    assert new.record.serial > old.record.serial
    native.free_segment(new)
    assert old.closed
    assert new.closed


def test_modules_that_lie_in_part_elsewhere(torch: Any, machine: Any) -> None:
    """What a module has outside of the pools that wake needs no waiting; a module with nothing there is a mistake."""
    layer, elsewhere = torch.nn.Linear(64, 64), torch.nn.Linear(4, 4)
    layer.register_buffer("steps", torch.zeros(3))
    with torch.no_grad():
        with machine.pool("weights"):
            layer.weight.data = machine.empty_like(layer.weight).copy_(layer.weight)
        with machine.pool("biases"):
            layer.bias.data = machine.empty_like(layer.bias).copy_(layer.bias)
    kept = layer.weight.detach().clone()
    with machine.pool("kv"):
        keys = machine.ElasticTensor(100, 1024, rows=2)
    machine.sleep(["weights", "kv", "biases"])
    for wrong in (elsewhere, layer.steps, layer.bias):
        with pytest.raises(remap.InvalidValueError, match="none of it lies"):
            machine.wake(["weights", "kv"], order=[wrong])
    assert machine.status()["weights"].state == "asleep"
    with machine.wake(["weights", "kv"], order=[keys.whole, layer], events=True) as arriving:
        arriving.wait_for(layer)
        assert torch.equal(layer.weight, kept)
    machine.wake("biases", order=[layer])
    keys.close()
    del layer
