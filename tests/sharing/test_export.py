"""Export and open within one process: rights, parts, leases, lies, and failures that leave nothing behind."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pickle
from collections.abc import Callable

import numpy as np
import pytest

import remap
from remap import MiB
from remap.buffers.plain import allocate_plain
from remap.errors import CudaResult, context_renewed
from remap.sharing.channel import Fds
from remap.sharing.descriptor import Descriptor, SharedChunk
from remap.sharing.importing import import_memory
from remap.testing.bench import wait_until
from remap.testing.stage import Stage
from remap.types import Location, LocationKind

pytest_plugins = ("remap.testing.stage",)

SIZE = 4 * MiB


def shareable(size: int = SIZE, **options: object) -> remap.Buffer:
    """Allocate memory that can be exported."""
    return remap.allocate(size, **{"resident": 0, "shareable": "posix_fd", **options})  # type: ignore[arg-type]


def test_one_memory_two_addresses(stage: Stage, nothing_left: None) -> None:
    """What is written at one address is read at the other, both ways, and nothing was copied (B5)."""
    del nothing_left
    free = stage.seen().free
    with shareable() as buffer, remap.export(buffer) as exported:
        buffer.fill(1)
        with remap.open(exported, access="rw") as other:
            assert other.address != buffer.address
            assert (other.size, other.identity) == (SIZE, exported.descriptor.identity)
            assert (other.to_host() == 1).all()
            other.fill(2, offset=MiB, size=MiB)
            assert buffer.to_host("uint8", 1, offset=MiB)[0] == 2
            assert stage.seen().free[0] >= free[0] - SIZE - stage.slack


def test_rights_are_what_was_asked(stage: Stage) -> None:
    """A reader cannot write, the default is to read, and more than was offered is refused (invariant 12)."""
    del stage
    with shareable() as buffer, remap.export(buffer, access="r") as exported:
        with remap.open(exported) as other:
            assert other.access == {buffer.resident[0]: remap.Access.READ}
            assert other.get_access(0) is remap.Access.READ
            with pytest.raises(remap.AccessError):
                other.fill(3)
        with pytest.raises(remap.AccessError, match='offers "r"'):
            remap.open(exported, access="rw")
        with pytest.raises(remap.InvalidValueError):
            remap.open(exported, access="w")
        with pytest.raises(remap.AccessError):
            remap.open(exported, access="none")
    with shareable() as buffer, pytest.raises(remap.InvalidValueError):
        remap.export(buffer, access="none")


@pytest.mark.two_devices
def test_a_right_for_each_location(stage: Stage) -> None:
    """Whoever opens memory may say who gets which right; the highest has to be offered (invariant 12)."""
    del stage
    with shareable() as buffer, remap.export(buffer, access="r") as exported:
        with pytest.raises(remap.AccessError, match='offers "r"'):
            remap.open(exported, access={0: "rw", 1: "r"})
        with remap.open(exported, access={1: "r"}) as other:
            assert [other.get_access(at) for at in (0, 1)] == [remap.Access.NONE, remap.Access.READ]
        with pytest.raises(TypeError, match="Pass the mapping as access="):
            remap.open(exported, accessing={1: "r"})
    with (
        shareable() as buffer,
        remap.export(buffer) as exported,
        remap.open(exported, access={0: "rw", 1: "r"}) as other,
    ):
        assert [other.get_access(at) for at in (0, 1)] == [remap.Access.READ_WRITE, remap.Access.READ]
        assert set(other.access) == {remap.device(0).location, remap.device(1).location}


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (CudaResult.OUT_OF_MEMORY, remap.OutOfAddressSpaceError),
        (CudaResult.ILLEGAL_ADDRESS, remap.errors.ContextLostError),
    ],
)
def test_a_place_that_the_driver_refuses(stage: Stage, result: CudaResult, error: type[Exception]) -> None:
    """The error is the driver's own: that something else lies there is said only where it does."""
    with (
        shareable() as buffer,
        remap.export(buffer) as exported,
        pytest.raises(remap.ShareError, match="something else"),
    ):
        remap.open(exported, same_address=True)
    with shareable() as buffer, remap.export(buffer) as exported:
        stage.faulty.fail("reserve", result=result, repeat=True)
        with pytest.raises(error):
            remap.open(exported, same_address=True)
        stage.faulty.heal()
    context_renewed()  # it was not lost: or whatever closes in the tests after this one would be silent about it


def test_each_import_stands_alone(stage: Stage) -> None:
    """Imports of one buffer are closed one by one; the others, and the exporter's, go on (trap 36)."""
    del stage
    buffer = shareable()
    buffer.fill(5)
    with remap.export(buffer) as exported:
        first, second = remap.open(exported), remap.open(exported)
    first.close()
    assert (second.to_host() == 5).all()
    buffer.close()
    assert (second.to_host() == 5).all()
    with pytest.raises(remap.ClosedError):
        first.to_host()
    second.close()


@pytest.mark.parametrize(("offset", "size"), [(0, MiB), (MiB, MiB), (3 * MiB + 7, 9), (SIZE - 1, 1)])
def test_a_part(stage: Stage, offset: int, size: int) -> None:
    """A part begins where it was said to, with any offset, and has its size (trap 34)."""
    del stage
    data = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    with shareable() as buffer:
        buffer.copy_from_host(data)
        with (
            remap.export(buffer, offset=offset, size=size) as exported,
            remap.open(exported, access="rw") as other,
        ):
            assert other.size == size
            assert (other.to_host() == data[offset : offset + size]).all()
            other.fill(1)
            with pytest.raises(remap.InvalidValueError):
                other.fill(1, offset=size, size=1)
        assert (buffer.to_host("uint8", size, offset=offset) == 1).all()
        assert (buffer.to_host()[:offset] == data[:offset]).all()


def test_two_arrays_of_one_allocation(stage: Stage) -> None:
    """Two arrays inside one allocation are exported each by itself, with identity and place (trap 34)."""
    del stage
    with shareable() as buffer:
        buffer.copy_from_host(np.arange(SIZE // 4, dtype=np.uint32))
        arrays = [buffer.array("uint32", 10, offset=0), buffer.array("uint32", 10, offset=400)]
        found = [remap.export(array) for array in arrays]
        assert found[0].descriptor.identity == found[1].descriptor.identity
        for exported, start in zip(found, (0, 100), strict=True):
            with exported, remap.open(exported) as other:
                assert other.to_host("uint32").tolist() == list(range(start, start + 10))
        with pytest.raises(remap.InvalidValueError):
            remap.export(arrays[0], size=41)


@pytest.mark.parametrize(
    ("offset", "size", "chunks"), [(0, 12, 3), (1, 2, 1), (3, 2, 2), (4, 8, 2), (11, 1, 1)]
)
def test_a_buffer_of_several_chunks(stage: Stage, offset: int, size: int, chunks: int) -> None:
    """Every chunk that a part lies in is shared, at its address in the range, and no other (trap 33)."""
    del stage
    data = np.random.default_rng(2).integers(0, 256, 12 * MiB, np.uint8)
    with remap.ElasticBuffer(capacity=12 * MiB, device=0, chunk=4 * MiB, shareable="posix_fd") as buffer:
        buffer.resize(12 * MiB)
        buffer.copy_from_host(data)
        part = remap.export(buffer, offset=offset * MiB, size=size * MiB)
        assert len(part.descriptor.chunks) == chunks
        with part, remap.open(part) as other:
            assert (other.to_host() == data[offset * MiB : (offset + size) * MiB]).all()
            at = other._base
            for chunk in other.chunks:
                assert (chunk.address, chunk.size) == (at, 4 * MiB)
                at += chunk.size
            assert other.footprint() == {Location(LocationKind.DEVICE): chunks * 4 * MiB}


@pytest.mark.two_devices
def test_a_striped_buffer(stage: Stage) -> None:
    """Chunks stay on their devices, and the importer's access is what it names."""
    del stage
    with shareable(8 * MiB, resident=[0, 1], accessing=[0, 1]) as buffer:
        buffer.fill(6)
        with remap.export(buffer) as exported, remap.open(exported, accessing=[1]) as other:
            assert [chunk.location.index for chunk in other.chunks] == [0, 1]
            assert [one.index for one in other.accessing] == [1]
            assert (other.to_host() == 6).all()


def test_a_hole_is_not_exported(stage: Stage) -> None:
    """A part with nothing behind it is refused; what is committed can be exported."""
    del stage
    with remap.ElasticBuffer(capacity=16 * MiB, device=0, chunk=4 * MiB, shareable="posix_fd") as buffer:
        buffer.resize(16 * MiB)
        buffer.decommit(4 * MiB, 8 * MiB)
        with pytest.raises(remap.RemapError):
            remap.export(buffer)
        with remap.export(buffer, offset=8 * MiB, size=8 * MiB) as exported:
            assert len(exported.descriptor.chunks) == 2


def test_an_empty_buffer(stage: Stage) -> None:
    """A buffer of no bytes is shared without a handle, and asks nothing of the driver (trap 39)."""
    with shareable(0) as buffer, shareable() as whole:
        mark = stage.mark()
        for exported in (remap.export(buffer), remap.export(whole, offset=SIZE), remap.export(whole, size=0)):
            with exported, remap.open(exported.to_bytes()) as other:
                assert other.size == 0
                assert other.chunks == ()
        assert not {"reserve", "import_handle", "export_handle", "map"} & set(stage.names_since(mark))


def test_a_mapping_can_be_exported(stage: Stage) -> None:
    """A mapping made by hand is shared as a buffer is."""
    del stage
    with (
        remap.create(SIZE, at=0, shareable="posix_fd") as memory,
        remap.reserve(SIZE) as addresses,
        addresses.map(memory, access={0: "rw"}) as mapping,
    ):
        mapping.fill(8)
        with remap.export(mapping) as exported, remap.open(exported) as other:
            assert (other.to_host() == 8).all()


def test_what_was_not_made_for_it(stage: Stage) -> None:
    """Memory without a handle type says that it is fixed at creation, and how to ask for it (trap 35)."""
    del stage
    with remap.allocate(SIZE, resident=0) as buffer:
        with pytest.raises(remap.ShareError, match='shareable="posix_fd"'):
            remap.export(buffer)
        assert not buffer._shared
    with shareable() as buffer:
        with pytest.raises(remap.ShareError, match="fixed when it was created: posix_fd"):
            remap.export(buffer, handle="fabric")
        with pytest.raises(remap.NotSupportedError, match="Windows") as caught:
            remap.export(buffer, handle="win32")
        assert caught.value.capability == "win32"
        assert not buffer._shared
    with (
        allocate_plain(SIZE, at=0) as plain,
        pytest.raises(remap.ShareError, match=r"cuMemAlloc.*remap\.allocate"),
    ):
        remap.export(plain)


def test_an_exported_buffer_stays_where_it_is(stage: Stage) -> None:
    """Exported and imported buffers refuse to pause unless detach=True, and then go on with memory of their own."""
    del stage
    with shareable() as buffer, remap.export(buffer) as exported, remap.open(exported, access="rw") as other:
        buffer.fill(1)
        for one in (buffer, other):
            with pytest.raises(remap.InUseError, match="detach"):
                remap.pause(one)
            with pytest.raises(remap.InUseError, match="detach"):
                remap.migrate(one, remap.Host())
        remap.pause(other, detach=True)
        with pytest.raises(remap.PausedError):
            other.fill(2)
        remap.resume(other)
        other.fill(3)
        assert (buffer.to_host() == 1).all()
        assert (other.to_host() == 3).all()
        with remap.export(other) as again, remap.open(again) as third:
            assert (third.to_host() == 3).all(), "what is exported is the memory behind it now"
    with shareable() as buffer:
        remap.pause(buffer)
        with pytest.raises(remap.PausedError):
            remap.export(buffer)
        assert not buffer._shared
        remap.resume(buffer)


@pytest.mark.parametrize("kind", ["pause", "migrate", "decommit"])
def test_a_buffer_that_was_exported_tells_what_is_known(stage: Stage, kind: str) -> None:
    """Nobody can know whether importers are still there: the refusal says so, and not that they are."""
    del stage
    with remap.ElasticBuffer(SIZE, resident=0, shareable="posix_fd") as buffer:
        buffer.resize(SIZE)
        with remap.export(buffer) as exported:
            remap.open(exported).close()
        acts: dict[str, Callable[..., object]] = {
            "pause": lambda **options: remap.pause(buffer, **options),
            "migrate": lambda **options: remap.migrate(buffer, 0, **options),
            "decommit": lambda **options: buffer.decommit(0, SIZE, **options),
        }
        with pytest.raises(
            remap.InUseError, match=r"others whom remap cannot know of may .* detach=True if nobody does"
        ):
            acts[kind]()
        acts[kind](detach=True)


def test_an_import_can_be_exported_again(stage: Stage) -> None:
    """An imported buffer, or a part of it, is handed on; its rights can only shrink."""
    del stage
    with shareable() as buffer, remap.export(buffer) as exported, remap.open(exported, access="rw") as second:
        buffer.copy_from_host(np.arange(SIZE // 4, dtype=np.uint32))
        with remap.export(second, offset=400, size=40, access="r") as again, remap.open(again) as third:
            assert third.to_host("uint32").tolist() == list(range(100, 110))
            assert third.identity == second.identity
        with pytest.raises(remap.ShareError, match="imported as posix_fd"):
            remap.export(second, handle="fabric")


def test_the_same_address(stage: Stage) -> None:
    """Memory is mapped where the exporter had it if that is asked for; an address in use is an error (B9)."""
    del stage
    with shareable() as buffer:
        buffer.fill(4)
        address = buffer.address
        exported = remap.export(buffer)
        with pytest.raises(remap.ShareError, match="something else"):
            remap.open(exported, same_address=True)
    with exported, remap.open(exported, same_address=True) as other:
        assert other.address == address
        assert (other.to_host() == 4).all()
    with shareable() as buffer:
        part = remap.export(buffer, offset=MiB + 5, size=9)
        address = buffer.address
    with part, remap.open(part, same_address=True) as other:
        assert other.address == address + MiB + 5


def test_it_keeps_the_memory_by_itself(stage: Stage) -> None:
    """An export duplicates its handles at once: the buffer can be closed before anybody fetches it."""
    before = stage.seen().free
    with shareable() as buffer:
        buffer.fill(7)
        exported = remap.export(buffer)
    assert stage.seen().free[0] <= before[0] - SIZE + stage.slack
    with remap.open(exported) as other:
        assert (other.to_host() == 7).all()
    exported.close()
    exported.close()
    with pytest.raises(remap.ClosedError):
        remap.open(exported)


def test_a_lease_ends_with_its_receipts(stage: Stage, nothing_left: None) -> None:
    """As many receipts as were asked for, then the descriptors are closed and the next one is told why."""
    del stage, nothing_left
    with shareable() as buffer:
        buffer.fill(3)
        ticket = remap.export(buffer, receipts=2).to_bytes()
        for _ in range(2):
            with remap.open(ticket) as other:
                assert (other.to_host() == 3).all()
        # The exporter counts a receipt when the message that tells it has arrived.
        assert wait_until(lambda: "receipts=" in _refusal(ticket))


def _refusal(ticket: bytes) -> str:
    try:
        remap.open(ticket).close()
    except remap.ShareError as error:
        return error.next_step
    return ""


def _has_passed(exported: remap.Exported) -> bool:
    try:
        exported.to_bytes()
    except remap.ShareError:
        return True
    return False


def test_a_lease_ends_with_its_time(stage: Stage, nothing_left: None) -> None:
    """When the time limit has passed, the memory is free although nobody fetched it."""
    before = stage.seen()
    del nothing_left
    with shareable() as buffer:
        exported = remap.export(buffer, timeout=0.05)
    assert wait_until(lambda: _has_passed(exported))
    assert wait_until(lambda: stage.unchanged(before))
    with pytest.raises(remap.ShareError, match="time limit has passed"):
        exported.to_bytes()
    with pytest.raises(remap.ShareError, match="timeout="):
        remap.open(exported)
    for wrong in ({"receipts": 0}, {"timeout": 0}):
        with shareable() as buffer, pytest.raises(remap.InvalidValueError):
            remap.export(buffer, **wrong)  # type: ignore[arg-type]


def test_an_export_that_nobody_was_told_of(stage: Stage, nothing_left: None) -> None:
    """An export that is dropped before it was sent anywhere keeps nothing: nobody could fetch it."""
    before = stage.seen()
    del nothing_left
    with shareable() as buffer:
        remap.export(buffer)
    assert wait_until(lambda: stage.unchanged(before))


def test_plain_pickle_is_refused(stage: Stage) -> None:
    """Bytes that could end up in a file are refused, with the reason and the ways that there are."""
    del stage
    with (
        shareable() as buffer,
        remap.export(buffer) as exported,
        pytest.raises(remap.ShareError, match=r"multiprocessing.*to_bytes"),
    ):
        pickle.dumps(exported)


def test_a_ticket_for_nothing(stage: Stage) -> None:
    """Tickets of a closed export, with another token, or to no socket, are refused with what to do."""
    del stage
    with shareable() as buffer:
        exported = remap.export(buffer)
        ticket = exported.to_bytes()
        forged = ticket[:10] + bytes(32) + ticket[42:]
        with pytest.raises(remap.ShareError, match="refuses"):
            remap.open(forged)
        nowhere = ticket.replace(b"/lease-", b"/other-")
        with pytest.raises(remap.ShareError, match="Keep the exporter alive"):
            remap.open(nowhere)
        for cut in (0, 9, 41, 60, len(ticket) - 1):
            with pytest.raises(remap.DescriptorError):
                remap.open(ticket[:cut])
        exported.close()
        with pytest.raises(remap.ShareError, match="refuses"):
            remap.open(ticket)


# -- lies --


def handles_of(buffer: remap.Buffer) -> tuple[Descriptor, Fds]:
    """Return what an importer is given."""
    with remap.export(buffer) as exported:
        handles = exported.handles()
        assert isinstance(handles, Fds)
        return exported.descriptor, handles


def memory_file(size: int, *, sealed: bool) -> int:
    """Return a memory file that could pass for one of the host driver."""
    number = os.memfd_create("remap device 0", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, size)
    if sealed:
        fcntl.fcntl(number, 1033, 0x7)
    return number


def a_closed_one() -> int:
    """Return a number that is no descriptor."""
    return 1 << 19


FOREIGN: dict[str, Callable[[], int]] = {
    "a pipe": lambda: os.pipe()[0],
    "a directory": lambda: os.open("/", os.O_RDONLY),
    "/dev/zero": lambda: os.open("/dev/zero", os.O_RDWR),
    "a file": lambda: os.open(__file__, os.O_RDONLY),
    "a small memory file": lambda: memory_file(2 * MiB, sealed=True),
    "an unsealed memory file": lambda: memory_file(SIZE, sealed=False),
    "a closed one": a_closed_one,
}


@pytest.mark.parametrize("what", FOREIGN)
def test_handles_that_are_none(stage: Stage, nothing_left: None, what: str) -> None:
    """Descriptors of anything else are refused with an error, and nothing stays behind (invariant 11, trap 31)."""
    del stage, nothing_left
    piped: list[int] = []
    with shareable() as buffer:
        descriptor, handles = handles_of(buffer)
        handles.close()
        if what == "a pipe":
            piped = list(os.pipe())
            number = piped.pop(0)
        else:
            number = FOREIGN[what]()
        with pytest.raises((remap.DriverError, remap.DescriptorError)):
            import_memory(descriptor, Fds([number]), access="r")
    for other in piped:
        os.close(other)


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": (SharedChunk(2 * MiB, Location(LocationKind.DEVICE)),), "size": 2 * MiB},
        {"chunks": (SharedChunk(8 * MiB, Location(LocationKind.DEVICE)),), "size": 8 * MiB},
        {"chunks": (SharedChunk(SIZE, Location(LocationKind.HOST_NUMA)),)},
        {"chunks": (SharedChunk(SIZE + 1, Location(LocationKind.DEVICE)),)},
        {"chunks": (SharedChunk(SIZE, Location(LocationKind.DEVICE)),) * 2, "size": 2 * SIZE},
        {"chunks": (), "size": 0},
    ],
    ids=["smaller", "larger", "elsewhere", "unaligned", "more chunks", "fewer chunks"],
)
def test_descriptors_that_lie(stage: Stage, nothing_left: None, change: dict[str, object]) -> None:
    """Sizes, locations and counts that are not what the driver says are refused, and nothing stays behind."""
    del stage, nothing_left
    with shareable() as buffer:
        descriptor, handles = handles_of(buffer)
        with pytest.raises(remap.DescriptorError):
            import_memory(dataclasses.replace(descriptor, **change), handles, access="r")  # type: ignore[arg-type]
        assert not handles, "what was handed over is closed"


def test_memory_of_another_driver(stage: Stage) -> None:
    """Memory of a driver that this process does not use is refused by name."""
    with shareable() as buffer:
        descriptor, handles = handles_of(buffer)
        other = "host" if stage.inner.name == "cuda" else "cuda"
        with pytest.raises(remap.ShareError, match=f"memory of the {other} driver"):
            import_memory(dataclasses.replace(descriptor, driver=other), handles, access="r")


# -- failures --

STEPS = ("import_handle", "properties_of", "granularity", "reserve", "map", "set_access")


@pytest.mark.parametrize("call", STEPS)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failure_of_any_step_of_open(stage: Stage, nothing_left: None, call: str, nth: int) -> None:
    """Whatever the driver refuses, nothing is mapped, held or left open, and the next try works (invariant 5)."""
    del nothing_left
    with remap.ElasticBuffer(capacity=8 * MiB, device=0, chunk=4 * MiB, shareable="posix_fd") as buffer:
        buffer.resize(8 * MiB)
        with remap.export(buffer) as exported:
            before = stage.seen()
            stage.faulty.fail(call, nth=nth, result=CudaResult.OUT_OF_MEMORY)
            failed = False
            try:
                remap.open(exported).close()
            except remap.DriverError:
                failed = True
            assert failed == (nth == 1 or call not in {"reserve", "set_access"})
            stage.faulty.heal()
            assert stage.unchanged(before)
            remap.open(exported).close()


@pytest.mark.parametrize("call", ["retain", "properties_of", "export_handle", "release"])
def test_a_failure_of_any_step_of_export(stage: Stage, nothing_left: None, call: str) -> None:
    """A refused export leaves no handle, and the buffer can still be paused (invariant 5)."""
    del nothing_left
    with shareable() as buffer:
        mark = stage.mark()
        stage.faulty.fail(call, nth=1)
        with pytest.raises(remap.DriverError):
            remap.export(buffer)
        stage.faulty.heal()
        stage.clean_up_refused(mark)
        assert not buffer._shared
        remap.pause(buffer)
        remap.resume(buffer)
        remap.export(buffer).close()


def test_the_driver_without_sharing(stage: Stage) -> None:
    """A driver that lacks the power says so."""

    class Alone:
        name = "alone"

    from remap.sharing.importing import check_shares

    del stage
    with pytest.raises(remap.ShareError, match="alone driver"):
        check_shares(Alone(), "export")  # type: ignore[arg-type]


def test_no_more_than_it_was_opened_with(stage: Stage) -> None:
    """Who opened memory to read cannot grant itself writing afterwards; less, and as much again, can be had (12)."""
    del stage
    with remap.allocate(SIZE, resident=0, shareable="posix_fd") as buffer:
        buffer.fill(3)
        with remap.export(buffer) as exported, remap.open(exported, access="r") as other:
            with pytest.raises(remap.AccessError, match=r'opened with access="r"'):
                other.set_access({0: "rw"})
            other.set_access({0: "none"})
            other.set_access({0: "r"})
            assert (other.to_host() == 3).all()


KINDS: dict[str, Callable[[], remap.Buffer]] = {
    "buffer": lambda: shareable(8 * MiB),
    "elastic": lambda: remap.ElasticBuffer(capacity=8 * MiB, device=0, chunk=4 * MiB, shareable="posix_fd"),
    "ring": lambda: remap.RingBuffer(4 * MiB, device=0, shareable="posix_fd"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("imported", [False, True])
def test_every_kind_stays_where_it_is(stage: Stage, kind: str, imported: bool) -> None:
    """Every kind of buffer, exported or imported, refuses to pause, migrate and decommit; with detach=True it does."""
    del stage
    with KINDS[kind]() as buffer:
        if isinstance(buffer, remap.ElasticBuffer):
            buffer.resize(8 * MiB)
        with remap.export(buffer) as exported, remap.open(exported, access="rw") as other:
            buffer.fill(1)
            one: remap.Buffer = other if imported else buffer
            acts: list[Callable[..., object]] = [
                lambda **how: remap.pause(one, **how),
                lambda **how: remap.migrate(one, remap.Host(), **how),
            ]
            if isinstance(one, remap.ElasticBuffer):
                elastic = one
                acts.append(lambda **how: elastic.decommit(0, 4 * MiB, **how))
                acts.append(lambda **how: elastic.resize(4 * MiB, **how))
            for act in acts:
                with pytest.raises(remap.InUseError, match="detach"):
                    act()
            remap.pause(one, detach=True)
            remap.resume(one)
            one.fill(2)
            left = buffer if imported else other
            assert (left.to_host() == 1).all(), "the others have the old memory still"


def test_an_import_is_handed_on_twice(stage: Stage, nothing_left: None) -> None:
    """Two hops away, with everybody before gone, memory can still be exported: each keeps what it received (T17)."""
    del stage, nothing_left
    with shareable() as buffer:
        buffer.fill(7)
        ticket = remap.export(buffer).to_bytes()
        before = remap.open(ticket, access="rw")
    for _ in range(3):
        ticket = remap.export(before).to_bytes()
        before.close()
        before = remap.open(ticket, access="rw")
    assert (before.to_host() == 7).all()
    before.close()


def test_what_forks_share_is_not_exported(stage: Stage) -> None:
    """An importer would go on using it when a fork has it alone and writes; without forks it can be exported (12).

    What was exported is not forked then, for the same reason.
    """
    del stage
    with remap.ElasticBuffer("16MiB", device=0, chunk="2MiB", shareable="posix_fd") as buffer:
        buffer.resize("4MiB")
        with buffer.fork(), pytest.raises(remap.InUseError, match="make_private"):
            remap.export(buffer)
        remap.export(buffer).close()
        with pytest.raises(remap.InUseError, match="into another buffer") as caught:
            buffer.fork()
        assert "detach" not in str(caught.value), "fork takes no such word"
        with pytest.raises(remap.InUseError, match="detach=True"):
            buffer.resize(0)
