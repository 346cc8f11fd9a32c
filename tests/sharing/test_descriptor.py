"""Descriptors: what is written is read, and nothing else is (invariant 11, trap 31)."""

from __future__ import annotations

import struct

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import remap
from remap.sharing.descriptor import MOST_CHUNKS, Descriptor, SharedChunk
from remap.sharing.exported import Exported, receive
from remap.types import Access, HandleType, Location, LocationKind

PLACES = st.one_of(
    st.builds(
        Location, st.sampled_from([LocationKind.DEVICE, LocationKind.HOST_NUMA]), st.integers(0, 65535)
    ),
    st.just(Location(LocationKind.HOST)),
)


@st.composite
def descriptors(draw: st.DrawFn) -> Descriptor:
    """Any descriptor that an export can make."""
    chunks = draw(st.lists(st.builds(SharedChunk, st.integers(1, 1 << 40), PLACES), max_size=5))
    offset = draw(st.integers(0, chunks[0].size - 1)) if chunks else 0
    total = sum(chunk.size for chunk in chunks)
    first_in_last = max(total - chunks[-1].size - offset + 1, 1) if chunks else 0
    size = draw(st.integers(first_in_last, total - offset)) if chunks else 0
    return Descriptor(
        driver=draw(st.sampled_from(["cuda", "host"])),
        kind=draw(st.sampled_from([HandleType.POSIX_FD, HandleType.FABRIC])),
        chunks=tuple(chunks),
        offset=offset,
        size=size,
        access=draw(st.sampled_from([Access.READ, Access.READ_WRITE])),
        identity=draw(st.binary(min_size=16, max_size=16)),
        generation=draw(st.integers(0, 2**64 - 1)),
        address=draw(st.integers(0, 2**62)),
        compressible=draw(st.booleans()),
        rdma=draw(st.booleans()),
    )


def simple(**changes: object) -> Descriptor:
    """Return a descriptor of one chunk of 4 MiB, with changes."""
    fields: dict[str, object] = {
        "driver": "host",
        "kind": HandleType.POSIX_FD,
        "chunks": (SharedChunk(4 << 20, Location(LocationKind.DEVICE)),),
        "offset": 0,
        "size": 4 << 20,
        "access": Access.READ,
        "identity": bytes(16),
    }
    return Descriptor(**{**fields, **changes})  # type: ignore[arg-type]


@given(descriptors())
def test_what_is_written_is_read(one: Descriptor) -> None:
    """A descriptor survives its journey, and is within its bound."""
    data = one.to_bytes()
    assert Descriptor.from_bytes(data) == one
    assert len(data) <= Descriptor.LARGEST


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    """Bytes that nobody wrote raise `DescriptorError` and nothing else, as descriptors and as tickets."""
    for read in (Descriptor.from_bytes, receive):
        with pytest.raises(remap.DescriptorError):
            read(data)


@given(descriptors(), st.data())
def test_changed_bytes_are_refused_or_sound(one: Descriptor, data: st.DataObject) -> None:
    """A changed descriptor is refused, or says something that can be."""
    changed = bytearray(one.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = Descriptor.from_bytes(bytes(changed))
    except remap.DescriptorError:
        return
    assert found.offset + found.size <= found.mapped_size < 2**63
    assert all(chunk.size for chunk in found.chunks)
    assert Descriptor.from_bytes(found.to_bytes()) == found


@given(descriptors(), st.data())
def test_cut_bytes_are_refused(one: Descriptor, data: st.DataObject) -> None:
    """Every truncation, and everything appended, is refused."""
    whole = one.to_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    more = data.draw(st.binary(min_size=1, max_size=20))
    for wrong in (whole[:cut], whole + more):
        with pytest.raises(remap.DescriptorError):
            Descriptor.from_bytes(wrong)


@pytest.mark.parametrize("count", [MOST_CHUNKS + 1, 2**31, 2**32 - 1])
def test_a_huge_count_takes_no_memory(count: int) -> None:
    """A count is checked before anything is made of it."""
    data = bytearray(simple().to_bytes())
    struct.pack_into("<I", data, 14, count)
    with pytest.raises(remap.DescriptorError, match=str(count)):
        Descriptor.from_bytes(bytes(data))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"size": 0}, "do not lie within"),
        ({"size": (4 << 20) + 1}, "do not lie within"),
        ({"offset": 4 << 20, "size": 1}, "do not lie within"),
        ({"offset": 2**63, "size": 2**63}, "do not lie within"),
        ({"address": 2**63}, "beyond every address space"),
        ({"chunks": (), "size": 1}, "in no chunk"),
        ({"chunks": (SharedChunk(0, Location(LocationKind.DEVICE)),)}, "no bytes"),
        ({"chunks": (SharedChunk(2**63, Location(LocationKind.DEVICE)),)}, "beyond every address space"),
        ({"chunks": (SharedChunk(8 << 20, Location(LocationKind.DEVICE)),) * 2}, "beyond its end"),
        ({"chunks": (SharedChunk(4 << 20, Location(LocationKind.HOST, 3)),)}, "no number"),
        ({"access": Access.NONE}, "no meaning"),
    ],
)
def test_numbers_that_do_not_fit(change: dict[str, object], rule: str) -> None:
    """Numbers that contradict each other are refused with the rule."""
    with pytest.raises(remap.DescriptorError, match=rule):
        Descriptor.from_bytes(simple(**change).to_bytes())


def test_another_version_says_so() -> None:
    """A descriptor of another version names both, and is not read further."""
    data = bytearray(simple().to_bytes())
    struct.pack_into("<H", data, 8, 7)
    with pytest.raises(remap.DescriptorError, match=r"version 7.*reads version 1"):
        Descriptor.from_bytes(bytes(data))


@given(st.integers(0, 2**70))
def test_the_generation_wraps_around(generation: int) -> None:
    """A counter beyond 64 bits goes on from 0, and neighbouring generations stay different."""
    here = Descriptor.from_bytes(simple(generation=generation).to_bytes()).generation
    following = Descriptor.from_bytes(simple(generation=generation + 1).to_bytes()).generation
    assert here == generation % 2**64
    assert following == (here + 1) % 2**64
    assert following != here


def test_too_many_chunks_are_refused_by_the_exporter() -> None:
    """What no importer would take is not written."""
    chunks = (SharedChunk(2 << 20, Location(LocationKind.DEVICE)),) * (MOST_CHUNKS + 1)
    with pytest.raises(remap.InvalidValueError, match="fewer, larger chunks"):
        simple(chunks=chunks).to_bytes()


@given(st.binary(min_size=64, max_size=64))
def test_a_legacy_handle_is_recognised(data: bytes) -> None:
    """64 bytes of cuIpcGetMemHandle are refused with what to use instead (trap 32)."""
    assume(not data.startswith(b"remaptkt"))
    with pytest.raises(remap.DescriptorError, match="cuIpcGetMemHandle"):
        receive(data)


@given(st.lists(st.binary(min_size=64, max_size=64), max_size=4), st.binary(max_size=70))
def test_fabric_handles_travel_as_bytes(handles: list[bytes], more: bytes) -> None:
    """With fabric handles the bytes are all that is needed, and only whole ones are taken (B5)."""
    chunks = (SharedChunk(4 << 20, Location(LocationKind.DEVICE)),) * len(handles)
    one = simple(kind=HandleType.FABRIC, chunks=chunks, size=len(handles) * (4 << 20))
    data = Exported(one, handles=tuple(handles)).to_bytes()
    found = receive(data)
    assert (found.descriptor, found.handles()) == (one, tuple(handles))
    for wrong in (data[:-1], data + more) if more else (data[:-1],):
        with pytest.raises(remap.DescriptorError):
            receive(wrong)
