"""`Descriptor`: what shared memory is, as a value that travels beside its handles.

A handle says neither how large its memory is nor who may use it (T17), so all of that is written down here: one
version, little-endian, every field of a fixed width and bounded, and exactly as long as its fields say. Whoever reads
one may be lied to: `Descriptor.from_bytes` refuses what cannot be, and importing checks the rest against the driver.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar

from remap.errors import DescriptorError, InvalidValueError
from remap.sizes import LARGEST, format_size
from remap.types import Access, HandleType, Location, LocationKind

VERSION = 1

MOST_CHUNKS = 4096
"""How many chunks shared memory may have; each travels with a handle of its own."""

FABRIC_BYTES = 64
"""The size of a fabric handle."""

IDENTITY_BYTES = 16

_MAGIC = b"remapmem"
# magic, version, driver, handle kind, access, flags, chunks, identity, generation, address, offset, size
_HEAD = struct.Struct("<8sHBBBBI16sQQQQ")
_CHUNK = struct.Struct("<QBH")
_COMPRESSIBLE, _RDMA = 1, 2
_DRIVERS = ("cuda", "host")
_KINDS = (HandleType.POSIX_FD, HandleType.FABRIC)
_ACCESS = (Access.NONE, Access.READ, Access.READ_WRITE)
_PLACES = (LocationKind.DEVICE, LocationKind.HOST, LocationKind.HOST_NUMA)


@dataclass(frozen=True, slots=True)
class SharedChunk:
    """One physical allocation of shared memory: its bytes, and the location that holds them."""

    size: int
    location: Location


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What shared memory is: a range of `size` bytes that begins `offset` bytes into the first of its chunks.

    `driver` is the name of the driver that made it, `kind` what its handles are. `access` is the most that importers
    are offered. `identity` tells one buffer from every other, and all exports of it have the same; `generation` counts
    the changes of what stands behind its address (modulo 2**64). `address` is where the exporter has the range, and so
    where programs that keep pointers in it want it again.
    """

    driver: str
    kind: HandleType
    chunks: tuple[SharedChunk, ...]
    offset: int
    size: int
    access: Access
    identity: bytes
    generation: int = 0
    address: int = 0
    compressible: bool = False
    rdma: bool = False

    LARGEST: ClassVar[int] = _HEAD.size + MOST_CHUNKS * _CHUNK.size
    """How many bytes the longest descriptor has."""

    @property
    def mapped_size(self) -> int:
        """The bytes of all chunks together: the size of the range that an importer reserves."""
        return sum(chunk.size for chunk in self.chunks)

    def to_bytes(self) -> bytes:
        """Return it as bytes, for `from_bytes`. Raises `InvalidValueError` for more than 4096 chunks."""
        if len(self.chunks) > MOST_CHUNKS:
            raise InvalidValueError(
                f"sharing memory of {len(self.chunks)} chunks",
                rule=f"shared memory has {MOST_CHUNKS} chunks at most, as each needs a handle of its own",
                next_step="Allocate it with fewer, larger chunks",
            )
        head = _HEAD.pack(
            _MAGIC,
            VERSION,
            _DRIVERS.index(self.driver),
            _KINDS.index(self.kind),
            _ACCESS.index(self.access),
            _COMPRESSIBLE * self.compressible | _RDMA * self.rdma,
            len(self.chunks),
            self.identity,
            self.generation % (1 << 64),
            self.address,
            self.offset,
            self.size,
        )
        chunks = (
            _CHUNK.pack(chunk.size, _PLACES.index(chunk.location.kind), chunk.location.index)
            for chunk in self.chunks
        )
        return b"".join((head, *chunks))

    @classmethod
    def from_bytes(cls, data: bytes) -> Descriptor:
        """Return the descriptor that `to_bytes` wrote; raises `DescriptorError` for anything else.

        The bytes are hostile input: nothing is believed that is not bounded and does not add up.
        """
        if len(data) < _HEAD.size or not data.startswith(_MAGIC):
            raise _bad("the bytes do not begin as a descriptor does")
        driver: int
        kind: int
        access: int
        fields: tuple[Any, ...] = _HEAD.unpack_from(data)
        _, version, driver, kind, access, flags, count, identity, generation, address, offset, size = fields
        if version != VERSION:
            raise DescriptorError(
                f"a descriptor of version {version}",
                rule=f"this release of remap reads version {VERSION}",
                next_step="Use the same release at both ends",
            )
        if driver >= len(_DRIVERS) or kind >= len(_KINDS) or not 1 <= access < len(_ACCESS):
            raise _bad("its driver, handle kind or access has no meaning")
        if flags & ~(_COMPRESSIBLE | _RDMA):
            raise _bad(f"its flags {flags:#x} have no meaning")
        if count > MOST_CHUNKS:
            raise _bad(f"it claims {count} chunks, and {MOST_CHUNKS} is the most")
        if len(data) != _HEAD.size + count * _CHUNK.size:
            raise _bad(f"{count} chunks make {_HEAD.size + count * _CHUNK.size} bytes, not {len(data)}")
        chunks = tuple(
            SharedChunk(length, _location(place, index))
            for length, place, index in _CHUNK.iter_unpack(data[_HEAD.size :])
        )
        found = cls(
            driver=_DRIVERS[driver],
            kind=_KINDS[kind],
            chunks=chunks,
            offset=offset,
            size=size,
            access=_ACCESS[access],
            identity=identity,
            generation=generation,
            address=address,
            compressible=bool(flags & _COMPRESSIBLE),
            rdma=bool(flags & _RDMA),
        )
        found._check()
        return found

    @staticmethod
    def count_chunks(data: bytes) -> int:
        """Return how many chunks, and so handles, a descriptor claims at the beginning of `data`; 0 if it is none."""
        claimed = int(_HEAD.unpack_from(data)[6]) if len(data) >= _HEAD.size else 0
        return min(claimed, MOST_CHUNKS)

    def _check(self) -> None:
        """Raise `DescriptorError` unless the numbers fit each other."""
        total = self.mapped_size
        if total > LARGEST or self.address > LARGEST:
            raise _bad("it reaches beyond every address space")
        if not self.chunks:
            if self.offset or self.size:
                raise _bad(f"it claims {self.size} bytes in no chunk")
            return
        if any(chunk.size == 0 for chunk in self.chunks):
            raise _bad("one of its chunks has no bytes")
        if not self.size or self.offset >= self.chunks[0].size or self.offset + self.size > total:
            raise _bad(
                f"{format_size(self.size)} from offset {self.offset} do not lie within {format_size(total)}"
            )
        if self.offset + self.size <= total - self.chunks[-1].size:
            raise _bad("its last chunk lies beyond its end")


def _location(place: int, index: int) -> Location:
    if place >= len(_PLACES):
        raise _bad(f"location kind {place} has no meaning")
    kind = _PLACES[place]
    if kind is LocationKind.HOST and index:
        raise _bad(f"the host has no number, and it is given {index}")
    return Location(kind, index)


def _bad(rule: str) -> DescriptorError:
    return DescriptorError(
        "a descriptor of shared memory", rule=rule, next_step="Pass on what remap.export gave, unchanged"
    )
