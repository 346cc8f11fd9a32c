"""What a newcomer is told: each message names what was asked, the rule that holds there, and a step that helps."""

from __future__ import annotations

import re

import pytest

import remap
from remap.errors import OutOfMemoryError
from remap.sizes import format_size


def whole() -> int:
    """Return the bytes of a device."""
    return remap.device().memory().total


@pytest.mark.parametrize("make", ["allocate", "create", "DeviceBuffer", "plain", "DeviceBox", "RingBuffer"])
def test_more_than_the_device_has(make: str) -> None:
    """What no closing and pausing could make room for is told apart from what they could."""
    granule = remap.device().granularity().recommended
    size = -(-2 * whole() // granule) * granule
    calls = {
        "allocate": lambda: remap.allocate(size),
        "create": lambda: remap.create(size, at=remap.device()),
        "DeviceBuffer": lambda: remap.DeviceBuffer.empty(size, "uint8"),
        "plain": lambda: remap.DeviceBuffer.empty(size, "uint8", source="plain"),
        "DeviceBox": lambda: remap.DeviceBox.empty(size, "uint8"),
        "RingBuffer": lambda: remap.RingBuffer(size),
    }
    with pytest.raises(OutOfMemoryError) as caught:
        calls[make]()
    assert format_size(size) in caught.value.asked
    assert format_size(whole()) in caught.value.rule
    assert "pause" not in caught.value.next_step
    if remap.driver().name == "host":
        named = re.search(r'remap\.use\("host", memory="(\w+)"\)', caught.value.next_step)
        assert named
        assert remap.sizes.parse_size(named[1]) >= size


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
