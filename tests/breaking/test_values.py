"""Numbers and objects of other types where remap asks for its own: taken for what they are, or refused at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remap
from remap import MiB, drivers
from remap.drivers.host import HostDriver

SIZE = 4 * MiB


@pytest.mark.parametrize("number", [np.uint8, np.int8, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("place", ["device", "host"])
def test_numbers_of_numpy_are_numbers(number: Callable[[int], Any], place: str) -> None:
    """NumPy integers of any width serve as offsets, sizes and bytes.

    Added to an address as they are, they wrap around, or reach the thread of a stream that can do nothing with them:
    the context was lost.
    """
    where = 0 if place == "device" else remap.Host()
    with (
        remap.allocate(SIZE, resident=where, accessing=where) as buffer,
        remap.allocate(SIZE, resident=where, accessing=where) as other,
    ):
        buffer.fill(0)
        buffer.fill(number(7), offset=number(5), size=number(3))
        assert buffer.to_host(shape=10).tolist() == [0, 0, 0, 0, 0, 7, 7, 7, 0, 0]
        buffer.copy_from_host(b"abc", offset=number(1))
        out = bytearray(2)
        buffer.copy_to_host(out, offset=number(2))
        assert out == b"bc"
        assert bytes(buffer.to_host(shape=3, offset=number(1))) == b"abc"
        other.fill(0)
        other.copy_from(buffer, offset=number(2), source_offset=number(1), size=number(3))
        assert bytes(other.to_host(shape=6)) == b"\0\0abc\0"
        remap.device(0).synchronize()


@pytest.mark.parametrize("wrong", [1.0, None, b"1"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_what_is_no_number_is_refused(wrong: Any, place: str) -> None:
    """Floats, bytes and None are a TypeError before anything is queued, wherever the memory lies."""
    where = 0 if place == "device" else remap.Host()
    with remap.allocate(SIZE, resident=where, accessing=where) as buffer:
        buffer.fill(3)
        acts: list[Callable[[], object]] = [
            lambda: buffer.fill(wrong),
            lambda: buffer.fill(1, offset=wrong),
            lambda: buffer.copy_from_host(b"a", offset=wrong),
            lambda: buffer.copy_to_host(bytearray(1), offset=wrong),
            lambda: buffer.to_host(offset=wrong),
            lambda: buffer.copy_from(buffer, offset=wrong),
            lambda: buffer.copy_from(buffer, source_offset=wrong),
        ]
        with pytest.raises(TypeError):
            buffer.fill("1")  # type: ignore[arg-type] # text is a size, and no value
        if wrong is not None:
            acts.append(lambda: buffer.fill(1, size=wrong))
        for act in acts:
            with pytest.raises(TypeError):
                act()
        assert (buffer.to_host() == 3).all()


@pytest.mark.parametrize("source", [None, 5, "text", np.zeros(4, np.uint8)])
def test_copy_from_takes_spans_only(source: Any) -> None:
    """Anything but a span is refused with what to call instead."""
    with remap.allocate(SIZE) as buffer, pytest.raises(TypeError, match="copy_from_host"):
        buffer.copy_from(source)


def test_copy_from_cuts_nothing_off() -> None:
    """Without a size all of the source is copied, or nothing: what does not fit is refused, naming size=."""
    with remap.allocate(2 * SIZE) as large, remap.allocate(SIZE) as small:
        large.fill(1)
        small.fill(2)
        for part in ({}, {"source_offset": SIZE + 1, "offset": SIZE}, {"offset": 2 * SIZE}):
            with pytest.raises(remap.InvalidValueError, match=r"do not fit into buffer.*size="):
                small.copy_from(large, **part)
        assert (small.to_host() == 2).all()
        small.copy_from(large, source_offset=SIZE)
        assert (small.to_host() == 1).all()
        large.fill(3)
        small.copy_from(large, size=SIZE // 2)
        large.copy_from(small, offset=SIZE)  # what is smaller leaves the rest as it is
        assert large.to_host()[:: SIZE // 2].tolist() == [3, 3, 3, 1]


@pytest.mark.parametrize("dtype", ["S0", "V0", []])
def test_elements_of_no_size(dtype: Any) -> None:
    """How many elements without bytes fit is no question; it was a division by zero."""
    with remap.allocate(SIZE) as buffer, pytest.raises(remap.InvalidValueError, match="size"):
        buffer.to_host(dtype)


@pytest.mark.parametrize("wrong", ["0", "host", b"0", 0.0, (0,), [0]])
def test_what_is_no_device(wrong: Any) -> None:
    """Text, floats and lists are a TypeError wherever one device is asked for, and not an AttributeError."""
    acts: list[Callable[[], object]] = [
        lambda: remap.device(wrong),
        lambda: remap.create(SIZE, at=wrong),
        lambda: remap.Stream(wrong),
    ]
    for act in acts:
        with pytest.raises(TypeError, match="device"):
            act()


@pytest.mark.parametrize("wrong", ["0", "host", b"0", 0.5])
def test_what_is_no_list_of_devices(wrong: Any) -> None:
    """Text is not taken apart into characters, nor bytes into the numbers of devices."""
    for option in ("resident", "accessing"):
        with pytest.raises(TypeError):
            remap.allocate(SIZE, **{option: wrong})


@pytest.mark.parametrize("places", [[0], {0}, np.array([0]), range(1), {0: "anything"}.keys(), np.int64(0)])
def test_any_collection_of_devices(places: Any) -> None:
    """Lists, sets, arrays and ranges name locations, whether they can be hashed or not."""
    with remap.allocate(SIZE, resident=places, accessing=places) as buffer:
        assert buffer.resident == (remap.device(0).location,)


@pytest.mark.parametrize("wrong", ["rw", 5, [(0, "r")], {"0": "r"}, {0.5: "r"}])
def test_access_that_names_no_locations(wrong: Any) -> None:
    """Access is a right for each location; anything else is a TypeError, and changes nothing."""
    with remap.allocate(SIZE, resident=0) as buffer:
        with pytest.raises(TypeError):
            buffer.set_access(wrong)
        buffer.fill(1)


SWAPPED: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "array": (lambda shape, ring: ring.array(shape, "float32"), r"array\(dtype, shape\)"),
    "to_host": (lambda shape, ring: ring.to_host(shape, "float32"), r"to_host\(dtype, shape\)"),
    "window": (lambda shape, ring: ring.window(0, "float32", shape), r"window\(position, shape, dtype\)"),
    "zeroed": (lambda shape, _: remap.DeviceBuffer.zeroed("float32", shape), r"\(shape, dtype\)"),
    "pinned": (lambda shape, _: remap.pinned("float32", shape), r"\(shape, dtype\)"),
}


@pytest.mark.parametrize("what", SWAPPED)
@pytest.mark.parametrize("shape", [4, (2, 3), [np.int64(4)]], ids=str)
def test_type_and_shape_in_the_other_order(what: str, shape: Any) -> None:
    """The order is named where a shape stands in the place of a type, or the other way round."""
    call, order = SWAPPED[what]
    with remap.RingBuffer("2MiB") as made:
        ring: Any = made
        with pytest.raises(TypeError, match=rf"is a shape, and no type of elements: the order is {order}"):
            call(shape, ring)
        with pytest.raises(TypeError, match=r"is a type of elements, and no shape: .*array\(dtype, shape\)"):
            ring.array("uint8", np.float32)
        for wrong in ("4", 4.5, [None]):
            with pytest.raises(TypeError, match="a shape is a number of elements, or one for each axis"):
                ring.array("uint8", wrong)
        with pytest.raises(TypeError, match=r"number of bytes, not 'uint8': the order is window"):
            ring.window("uint8", 4)


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 5000 + "MiB", "1." + "0" * 5000 + "MiB"])
def test_a_size_of_thousands_of_digits(text: str) -> None:
    """It is an InvalidValueError as any other text that is no size."""
    with pytest.raises(remap.InvalidValueError):
        remap.allocate(text)


def test_mappings_of_what_is_no_allocation() -> None:
    """A reservation maps physical allocations; a buffer, a number or None is a TypeError that says so."""
    with remap.reserve(SIZE) as addresses, remap.allocate(SIZE) as buffer:
        for wrong in (None, 5, buffer, addresses):
            with pytest.raises(TypeError, match=r"remap\.create"):
                addresses.map(wrong)  # type: ignore[arg-type]


def test_a_mapping_at_an_unaligned_offset() -> None:
    """It is an AlignmentError that names the nearest offsets that fit, as `map` promises."""
    with remap.create(2 * MiB) as memory, remap.reserve(8 * MiB) as addresses:
        with pytest.raises(remap.AlignmentError, match=f"{2 * MiB} or {4 * MiB}"):
            addresses.map(memory, offset=3 * MiB)
        assert not addresses.mappings


SAID: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "fill": (lambda: remap.allocate(SIZE).fill(1.5), TypeError, "0 to 255, not 1.5.*DeviceBuffer"),  # type: ignore[arg-type]
    "dtype": (lambda: remap.allocate(SIZE).to_host("floaty"), TypeError, "such as 'float32', not 'floaty'"),
    "too much": (
        lambda: remap.allocate(SIZE).copy_from_host(bytes(SIZE + 1)),
        remap.InvalidValueError,
        f"Pass at most {SIZE} bytes from there on",
    ),
    "outside": (
        lambda: remap.allocate(SIZE).fill(1, offset=SIZE + 1, size=1),
        ValueError,
        "offset inside of it",
    ),
    "shareable": (lambda: remap.allocate(SIZE, shareable=True), TypeError, '"posix_fd", .*not True'),  # type: ignore[arg-type]
    "framework": (lambda: remap.allocate(SIZE, resident="cuda:1"), TypeError, "Write resident=1 "),  # type: ignore[arg-type]
    "word": (lambda: remap.allocate(SIZE, accessing="cpu"), TypeError, r"remap\.Host\(\) for the host"),  # type: ignore[arg-type]
    "none": (lambda: remap.allocate(SIZE, resident=[None]), TypeError, "None is neither"),  # type: ignore[list-item]
    "two places": (lambda: remap.allocate(SIZE, device=0, resident=0), ValueError, "give one"),
    "a box of a number": (lambda: remap.DeviceBox(3.0), TypeError, r"Call DeviceBox\.from_host"),  # type: ignore[arg-type]
    "a broken size": (lambda: remap.pinned("6B"), ValueError, "float32 takes 4 bytes"),
    "text for an axis": (lambda: remap.managed(["4"]), TypeError, "number of elements.*dtype='uint8'"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", SAID)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_mistake_is_told_with_its_cure(name: str) -> None:
    """What is no number, type, place or shape is refused in words that say what to write."""
    act, kind, words = SAID[name]
    with pytest.raises(kind, match=words):
        act()
    remap.collect()


def test_a_device_for_one_place() -> None:
    """`device=` is short for `resident=` with one place, as elsewhere."""
    last = remap.devices()[-1]
    with remap.allocate(SIZE, device=last) as buffer, remap.allocate(SIZE, device=last.index) as other:
        assert buffer.resident == other.resident == (last.location,)
        assert buffer.accessing == (last,)


def test_a_closed_object_says_so() -> None:
    """Use after closing says which object, and how it came."""
    buffer = remap.allocate(SIZE)
    buffer.close()
    with pytest.raises(remap.ClosedError, match=r"buffer \d+ of .* was closed, by close\(\) or .*with block"):
        buffer.fill(1)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("memroy", "1MiB", r"option memroy=.*its options are devices, memory, .*Did you mean memory=\?"),
        ("zzz", 1, "option zzz= of the host driver"),
        ("devices", "two", "devices='two': it is the number of devices"),
        ("devices", 0, "1 to 64"),
        ("numa_nodes", None, "numa_nodes=None"),
        ("memory", None, "memory None: it is a whole number of bytes"),
        ("clock_khz", "fast", "a whole number of kHz"),
        ("clock_khz", [1, "fast"], "a whole number of kHz"),
        ("peers", {0: []}, "a list of truth values for each device"),
        ("peers", None, '"all", "none"'),
        ("peers", [[True]], "a matrix of 2 rows"),
        ("capabilities", ["hmm"], "as in {"),
        ("capabilities", {"hmmm": True}, "The names are vmm"),
    ],
)
def test_options_of_the_host_driver(option: str, value: Any, words: str) -> None:
    """An option that there is not, or of no fitting value, is refused by name, and no driver is opened."""
    with pytest.raises((remap.InvalidValueError, TypeError), match=words):
        drivers.open("host", **{option: value})


def test_every_option_of_the_host_driver_is_explained() -> None:
    """help(remap.use) and the page on the host driver name all of them."""
    page = (Path(__file__).parents[2] / "docs/explain/host-driver.md").read_text()
    for option in inspect.signature(HostDriver).parameters:
        assert f"- `{option}` (" in str(remap.use.__doc__)
        assert f"| `{option}` |" in page
