"""What a newcomer is told: each message names what was asked, the rule that holds there, and a step that helps."""

from __future__ import annotations

import copy
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap
from remap.cli import run
from remap.drivers.graph_powers import GraphFigures
from remap.errors import AccessError, InvalidValueError, OutOfMemoryError
from remap.integrations.support import missing
from remap.sizes import format_size, parse_size
from remap.testing import simulated


def whole() -> int:
    """Return the bytes of a device."""
    return remap.device().memory().total


@pytest.mark.parametrize(
    "make",
    [
        remap.allocate,
        remap.create,
        remap.RingBuffer,
        lambda size: remap.DeviceBuffer.empty(size, "uint8"),
        lambda size: remap.DeviceBuffer.empty(size, "uint8", source="plain"),
        lambda size: remap.DeviceBox.empty(size, "uint8"),
    ],
    ids=["allocate", "create", "RingBuffer", "DeviceBuffer", "plain", "DeviceBox"],
)
def test_more_than_the_device_has(make: Callable[[int], object]) -> None:
    """What no closing and pausing could make room for is told apart from what they could."""
    granule = remap.device().granularity().recommended
    size = -(-2 * whole() // granule) * granule
    with pytest.raises(OutOfMemoryError) as caught:
        make(size)
    assert format_size(size) in caught.value.asked
    assert format_size(whole()) in caught.value.rule
    assert "pause" not in caught.value.next_step
    if remap.driver().name == "host":
        named = re.search(r'remap\.use\("host", memory="(\w+)"\)', caught.value.next_step)
        assert named
        assert parse_size(named[1]) >= size


def test_larger_devices_have_room_for_what_is_there() -> None:
    """The machine that a shortage proposes holds what is in use beside what was asked for."""
    if remap.driver().name != "host":
        pytest.skip("only simulated devices can be larger")
    used, places = whole() // 2, remap.devices()
    each = 2 * whole() - used + 1  # one byte more than what devices of twice the size have beside it
    with remap.allocate(used), pytest.raises(OutOfMemoryError) as caught:
        remap.allocate(each * len(places), resident=places)
    named = re.search(r'memory="(\w+)"', caught.value.next_step)
    assert named
    assert parse_size(named[1]) >= used + each


@pytest.mark.parametrize(
    "memory", [["256MiB", "128MiB", "64MiB", "8MiB"], ["8MiB"], "8MiB", ["16MiB", "8704KiB"]]
)
def test_a_larger_machine_is_the_same_but_for_one_device(memory: list[str] | str) -> None:
    """The machine that a shortage proposes has room, as many devices, and none that is smaller than before."""
    options: dict[str, Any] = {"memory": memory, "granularity": "512KiB"}
    with simulated(devices=4 if isinstance(memory, str) else len(memory), **options):
        before = [one.properties.memory for one in remap.devices()]
        with pytest.raises(OutOfMemoryError) as caught:
            remap.allocate(len(before) * parse_size("64MiB"), resident=remap.devices())
        found = re.search(r"remap\.use\(\"host\", .*\)", caught.value.next_step)
        assert found
        eval(found[0].removesuffix(")") + ", granularity='512KiB')")
        after = [one.properties.memory for one in remap.devices()]
        assert len(after) == len(before)
        assert all(new >= old for new, old in zip(after, before, strict=True))
        assert isinstance(memory, str) or sum(new != old for new, old in zip(after, before, strict=True)) == 1


MARK = re.compile(r"\b(invariant|trap)s? \d|\([A-T]\d+\)")


def test_help_has_no_marks_of_ours() -> None:
    """What help() shows of a public name cites no number of a list that its reader does not have."""
    for name in remap.__all__:
        thing = getattr(remap, name)
        parts = [
            vars(one).get(part)
            for one in getattr(thing, "__mro__", ())
            for part in dir(one)
            if part[0] != "_"
        ]
        for part in (thing, *parts):
            found = MARK.search(inspect.getdoc(part) or "")
            assert not found, f"{name}: {part}: {found}"


def test_what_sleeps_instead_of_a_small_buffer() -> None:
    """Memory that cannot sleep names the two ways in which the same buffer could."""
    with remap.DeviceBuffer.zeroed(4) as small:
        with pytest.raises(InvalidValueError, match=r"remap\.group.*source='mapped'"):
            remap.pause(small)
        with remap.group("asleep"), remap.DeviceBuffer.zeroed(4) as other:
            remap.pause(other)


def test_stripes_name_the_buffer() -> None:
    """A stripe that finds no memory names the buffer that it belongs to, as nobody asked for a stripe."""
    if len(remap.devices()) < 2:
        pytest.skip("needs two devices")
    with pytest.raises(OutOfMemoryError, match=f"one of 2 stripes of a buffer of {format_size(4 * whole())}"):
        remap.allocate(4 * whole(), resident=[0, 1])


def test_elastic_buffers_name_what_was_asked() -> None:
    """A buffer that cannot grow says by how much it was to grow, not which chunk found no memory."""
    size = whole() // 2
    with remap.ElasticBuffer(64 * whole()) as buffer:
        buffer.resize(size)
        with pytest.raises(OutOfMemoryError) as caught:
            buffer.resize(2 * size + whole())
        assert "the whole device" in caught.value.rule or "free there" in caught.value.rule
        assert f"bytes 0 to {2 * size + whole():,} of elastic buffer" in caught.value.asked
        with pytest.raises(OutOfMemoryError, match="are free there"), remap.allocate(size // 2):
            buffer.resize(whole())
        assert buffer.size == size


def test_rights_that_cannot_be_granted_here() -> None:
    """What was opened read-only is not to be had by set_access, so the advice is to open it again."""
    with remap.allocate("2MiB", shareable="posix_fd") as buffer, remap.export(buffer) as shared:
        opened = remap.open(shared, access="r")
        calls: list[Callable[[], None]] = [
            lambda: opened.fill(1),
            lambda: opened.set_access({remap.device(): "rw"}),
        ]
        for call in calls:
            with pytest.raises(AccessError, match='access="rw"') as caught:
                call()
            assert "set_access(" not in caught.value.next_step
        opened.close()


def test_rights_that_can_be_granted() -> None:
    """The advice is a call that can be copied, and that helps."""
    with remap.allocate("2MiB", access="r") as buffer:
        with pytest.raises(AccessError) as caught:
            buffer.fill(1)
        found = re.search(r"set_access\((\{.*?\})\)", caught.value.next_step)
        assert found
        buffer.set_access(eval(found[1], {"remap": remap}))
        buffer.fill(1)


def test_sizes_may_be_text_everywhere() -> None:
    """Offsets and sizes of fills, copies, views and graphs take "1MiB" as allocations do."""
    with remap.allocate("4MiB") as one, remap.allocate("4MiB") as other:
        one.fill(0)
        one.fill(7, offset="1MiB", size="1MiB")
        other.copy_from(one, offset="2MiB", source_offset="1MiB", size="1MiB")
        assert (other.to_host("uint8", 1 << 20, offset="2MiB") == 7).all()
        other.copy_from_host(np.full(4, 9, "uint8"), offset="4KiB")
        out = np.zeros(4, "uint8")
        other.copy_to_host(out, offset="4KiB")
        assert (out == 9).all()
        assert other.array("uint8", offset="1MiB").size == 3 << 20
        with remap.Graph() as graph:
            graph.fill(one, 5, offset="3MiB", size="1MiB")
            with graph.instantiate() as executable:
                executable.launch()
                remap.device().synchronize()
        assert (one.to_host("uint8", offset="3MiB") == 5).all()
        with pytest.raises(InvalidValueError, match="it is not a size"):
            one.fill(1, offset="one")


def test_lists_as_numpy_takes_them() -> None:
    """Typed memory takes lists; memory without a type says that a list has no bytes, and what to pass."""
    with remap.DeviceBuffer.from_host([1.5, 2, 3]) as buffer:
        assert (buffer.dtype, buffer.shape) == (np.dtype("float64"), (3,))
        buffer.copy_from_host([4, 5, 6])
        assert buffer.to_host().tolist() == [4, 5, 6]
        with pytest.raises(TypeError, match="an array to be filled"):
            buffer.copy_to_host([0, 0, 0])
    with remap.allocate("2MiB") as plain, pytest.raises(TypeError, match=r"numpy\.array\(values, dtype\)"):
        plain.copy_from_host([1, 2, 3])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("allocat", "remap.allocate"),
        ("Devicebuffer", "remap.DeviceBuffer"),
        ("snapshots", "remap.snapshot"),
        ("testing", "import remap.testing"),
    ],
)
def test_misspelt_names(name: str, said: str) -> None:
    """A public name that does not exist leads to one that does."""
    sys.modules.pop("remap.testing", None)
    vars(remap).pop("testing", None)
    with pytest.raises(AttributeError, match=re.escape(said)):
        getattr(remap, name)


def test_names_that_objects_do_not_have() -> None:
    """What the functions of remap, CUDA and other libraries make one expect of an object leads to what it is here."""
    with (
        remap.ElasticBuffer("4MiB") as cache,
        remap.DeviceBuffer.zeroed(4) as typed,
        remap.Stream() as stream,
        stream.record() as event,
    ):
        array = cache.array(shape=0)
        wanted: list[tuple[object, dict[str, str]]] = [
            (cache, {"grow": "resize(size)", "pause": "remap.pause(buffer)", "data_ptr": "address"}),
            (cache, {"export": "remap.export(memory)", "nbytes": "size", "migrate": "remap.migrate(buffer"}),
            (typed, {"pause": "remap.pause(buffer)", "ptr": "address"}),
            (array, {"resume": "remap.resume(buffer)", "data_ptr": "address"}),
            (remap.DeviceBuffer, {"zeros": "zeroed(shape, dtype)"}),
            *((one, {"sync": "synchronize()"}) for one in (stream, event, remap.device())),
        ]
        for thing, names in wanted:
            for name, said in names.items():
                with pytest.raises(
                    AttributeError, match=rf"has no attribute '{name}': use {re.escape(said)}"
                ):
                    getattr(thing, name)
                assert not hasattr(thing, name)
                if not isinstance(thing, type):
                    assert name not in dir(thing)
                found = re.match(r"(remap\.)?(\w+)", said)
                assert found
                assert hasattr(remap if found[1] else thing, found[2]), "what is named instead exists"
        assert {"resize", "address", "_check"} <= set(dir(cache))
        assert typed.nbytes == 16
        assert copy.copy(array).address == array.address


def test_names_that_resemble_nothing() -> None:
    """Where no name is close, none is named."""
    with pytest.raises(AttributeError) as caught:
        _ = remap.xyzzy  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    assert str(caught.value) == "module 'remap' has no attribute 'xyzzy'"


def test_opening_by_name() -> None:
    """A name is not shared memory: it belongs to a broker."""
    with pytest.raises(TypeError, match=r"remap\.connect\(\)\.open\(name\)"):
        remap.open("weights")  # type: ignore[arg-type]


def test_footprint_of_one_buffer() -> None:
    """One buffer is taken as several are."""
    with remap.allocate("2MiB") as buffer:
        assert remap.footprint(buffer) == remap.footprint([buffer]) == {remap.device().location: 2 << 20}


def test_footprint_takes_what_pause_takes_and_more() -> None:
    """Tags, groups, typed and other memory have a footprint; what is named twice or shared counts once."""
    here, granule = remap.device().location, remap.allocate(1)
    size = granule.size
    with (
        granule,
        remap.group("footprints") as group,
        remap.allocate(1) as one,
        remap.DeviceBuffer.zeroed(4) as typed,
    ):
        assert typed.owner is not one
        both: dict[remap.Location, int] = {here: 2 * size}
        assert remap.footprint("footprints") == remap.footprint(group) == group.footprint() == both
        assert remap.footprint([one, typed, one.array(), "footprints"]) == both
        assert remap.footprint([*group, granule]) == {here: 3 * size}
        assert remap.footprint(typed) == remap.footprint(typed[:2]) == {here: size}
        remap.pause(group)
        assert group.footprint() == {}
    with (
        remap.create(size) as memory,
        remap.reserve(2 * size) as addresses,
        addresses.map(memory) as mapping,
        addresses.map(memory, offset=size) as alias,
    ):
        assert remap.footprint([mapping, alias, memory]) == {here: size}
    with remap.DeviceBuffer.zeroed(4, source="plain") as plain, remap.pinned(4) as pinned:
        assert remap.footprint([plain, pinned]) == {here: plain.owner.size, remap.Host(): pinned.owner.size}


class Tensor:
    """What another library has, and remap knows nothing of."""

    __module__ = "torch.somewhere"


TENSOR, SINCE = (
    r"takes a buffer.*not .*Tensor.*remap\.torch\.export",
    r"since= is what remap\.leaks or remap\.snapshot",
)
ANYTHING: Any = remap  # nothing of what follows is for a type checker
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "export of a tensor": (lambda: ANYTHING.export(Tensor()), TENSOR),
    "export of an array": (lambda: ANYTHING.export(np.zeros(3)), r"takes a buffer.*not .*ndarray'>$"),
    "footprint of a number": (lambda: ANYTHING.footprint(3), "groups and tags have a footprint, not .*int"),
    "footprint of None": (lambda: ANYTHING.footprint(None), "not .*NoneType"),
    "footprint of a stream": (lambda: ANYTHING.footprint([remap.default_stream()]), "not .*Stream"),
    "leaks since a number": (lambda: ANYTHING.leaks(since=3), SINCE),
    "leaks since text": (lambda: ANYTHING.leaks(since="x"), SINCE),
    "snapshot less leaks": (
        lambda: ANYTHING.snapshot() - remap.leaks(),
        r"not to .*Leaks.*remap\.leaks\(since=snapshot\)",
    ),
    "pause of a block": (lambda: ANYTHING.pause(remap.group("x")), "groups and tags can sleep"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_types_are_told_what_is_taken(what: str) -> None:
    """What is taken is said in the words of the call, and no private name of ours stands in the message."""
    call, said = WRONG[what]
    with pytest.raises(TypeError, match=said) as caught:
        call()
    assert not re.search(r"'_\w+'", str(caught.value))


def test_options_by_the_names_of_our_parameters() -> None:
    """An option that no driver has is told so, also where a parameter of ours has that name."""
    for option in ("name", "driver"):
        with pytest.raises(
            InvalidValueError, match=f"option {option}= of the host driver: its options are devices"
        ):
            remap.use("host", **{option: "x"})


def test_values_say_what_they_are() -> None:
    """Locations print as what a program writes, and figures with units."""
    assert [repr(one) for one in (remap.device(0).location, remap.Host(), remap.HostNuma(1))] == [
        "remap.device(0).location",
        "remap.Host()",
        "remap.HostNuma(1)",
    ]
    assert repr(GraphFigures(1 << 20, 2 << 20, 0, 512)) == (
        "GraphFigures(used=1 MiB, used_high=2 MiB, reserved=0 B, reserved_high=512 B)"
    )
    with remap.ElasticBuffer("64MiB") as cache:
        cache.resize("2MiB")
        assert "paused" not in repr(cache)
        remap.pause(cache)
        assert "paused (kept on the host)" in repr(cache)


def test_every_error_is_a_public_name() -> None:
    """What can be raised can be caught without knowing a room of the library.

    A library that is not installed is caught as ImportError, and `UnknownError` never leaves `remap trace`.
    """
    kinds = [remap.RemapError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    ours = [one for one in kinds if one.__module__.startswith("remap.") and not one.__name__.startswith("_")]
    assert len(ours) > 20
    for kind in ours:
        if not issubclass(kind, ImportError) and kind.__name__ != "UnknownError":
            assert getattr(remap, kind.__name__) is kind


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import remap; remap.allocate('2MiB').close()", "driver"),
        ("import remap", "calls of no driver (none was opened)"),
    ],
)
def test_a_trace_knows_its_driver(
    program: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace that begins before any driver is open names the first that opens, and says so if none did."""
    file = tmp_path / "run.json"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "REMAP_TRACE": str(file)},
        check=True,
    )
    assert run(["trace", str(file)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert said in text
    assert "unknown" not in text
    if said == "driver":
        assert f"calls of the {remap.driver().name} driver" in text


@pytest.mark.parametrize("package", ["torch", "numba", "cupy", "numba.cuda", "torch_memory_saver"])
def test_a_missing_package_names_what_brings_it(package: str) -> None:
    """The cure is a command for pip that brings this package, not another."""
    error = missing(package, "an integration", "it is not here")
    assert isinstance(error, ImportError)
    assert re.search(rf"pip install '?({package.partition('.')[0]}|remap\[torch\])", str(error))


def test_a_demo_is_found_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that is a demo only says where it is; what is none does not."""
    assert run(["pause"]) == run(["paws"]) == 64
    said = capsys.readouterr().err
    assert said.count('Did you mean "remap demo pause"?') == 1
    assert "No such command 'paws'" in said
