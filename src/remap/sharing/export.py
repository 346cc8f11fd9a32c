"""`export`: hand memory to other processes without a copy."""

from __future__ import annotations

import os
import secrets
from typing import Any, NamedTuple, cast

from remap.arrays import DeviceArray
from remap.buffers.base import Buffer
from remap.buffers.forking import ForkingBuffer
from remap.buffers.plain import PlainMemory
from remap.errors import InUseError, InvalidValueError, ShareError, not_supported
from remap.locations import parse_handle_types
from remap.ranges import Chunk
from remap.sharing.channel import Fds
from remap.sharing.descriptor import IDENTITY_BYTES, MOST_CHUNKS, Descriptor, SharedChunk
from remap.sharing.exported import Exported, offer
from remap.sharing.importing import ImportedBuffer, check_shares
from remap.sharing.leases import LIMIT
from remap.spans import Span
from remap.types import Access, AllocationProperties, HandleType, Location, LocationKind


def export(
    memory: Span | DeviceArray,
    *,
    offset: int = 0,
    size: int | None = None,
    access: Access | str = Access.READ_WRITE,
    handle: HandleType | str | None = None,
    receipts: int = 1,
    timeout: float = LIMIT,
) -> Exported:
    """Export a buffer, a mapping, an array or a part of one, for other processes to `remap.open`.

    The result travels through `multiprocessing`, or as `to_bytes()` through anything else. `offset` and `size` choose a
    part in bytes; a chunk is never divided, so the importer maps the whole chunks that it lies in. `access` is the
    most that importers are offered; that binds those who keep to it, as whoever holds a handle can map it read-write.
    `handle` is the kind, `"posix_fd"` where the memory has both.

    Descriptors are duplicated at once, and closed after as many `receipts` by other processes or `timeout` seconds.
    Until then they keep the memory, whatever becomes of the buffer; after that whoever has opened it does. A buffer
    that was exported refuses to pause, migrate and decommit, since others would go on using the old memory.

    Raises `ShareError` for memory that was not made for it, `NotSupportedError` for Win32 handles, `PausedError`,
    `InUseError` while contents arrive and where forks share a part of it (`make_private` first). A failure changes
    nothing. Source: cuMemRetainAllocationHandle, cuMemExportToShareableHandle.
    """
    if not isinstance(memory, Span | DeviceArray):  # pyright: ignore[reportUnnecessaryIsInstance]
        said = f"remap.export takes a buffer, a mapping or an array on one, not {type(memory)}"
        torch = type(memory).__module__.partition(".")[0] == "torch"
        raise TypeError(said + ". Tensors of a pool: remap.torch.export" * torch)
    if isinstance(memory, DeviceArray):
        whole = memory.size * memory.dtype.itemsize
        part = whole - offset if size is None else size
        if not 0 <= offset <= whole or not 0 <= part <= whole - offset:
            raise InvalidValueError(f"export of {part} bytes from {offset}", rule=f"the array has {whole}")
        size = part
        span, start = cast("Span", memory.owner), memory.offset + offset
    else:
        span, start = memory, offset
    start, size = span._part("export", start, size)
    right = Access.parse(access)
    if right is Access.NONE:
        raise InvalidValueError("export with no access", rule='importers are offered "r" or "rw"')
    kind = None if handle is None else _kind(handle)
    driver = span._driver
    if isinstance(span, PlainMemory):
        raise ShareError(
            f"export of {span.describe()}",
            rule="memory of a device's own allocator (cuMemAlloc) has no shareable handle, only legacy IPC ones",
            next_step=f"Use remap.allocate{_HOW}",
        )
    check_shares(driver, "export")
    counted: list[Buffer] = []
    try:
        shared, handles = _take(span, start, size, kind, counted)
        descriptor = Descriptor(
            driver=driver.name,
            kind=shared.kind,
            chunks=tuple(SharedChunk(chunk.size, chunk.location) for chunk in shared.chunks),
            offset=shared.offset,
            size=size,
            access=right,
            identity=span._identity,
            generation=getattr(span, "generation", 0) % (1 << 64),
            address=span._address + start if size else 0,
            compressible=shared.properties.compressible,
            rdma=shared.properties.rdma,
        )
        if not isinstance(handles, Fds) or not shared.chunks:
            return Exported(descriptor, handles=() if isinstance(handles, Fds) else handles)
        return offer(descriptor, handles, receipts=receipts, limit=timeout)
    except BaseException:
        for one in counted:
            one._shared = False
        raise


class _Taken(NamedTuple):
    """The chunks that a part of a span lies in, where in the first it begins, and what they can be exported as."""

    chunks: tuple[Chunk, ...]
    offset: int
    kind: HandleType
    properties: AllocationProperties


def _take(
    span: Span, start: int, size: int, kind: HandleType | None, counted: list[Buffer]
) -> tuple[_Taken, Fds | tuple[bytes, ...]]:
    """Return the chunks of a part of a span and a new handle for each.

    A buffer counts as shared from here on, and is added to `counted` if it did not before.
    """
    driver: Any = span._driver
    retained: list[int] = []
    try:
        with driver.lock:
            span._check_there("export")
            if isinstance(span, Buffer) and span._arriving is not None:  # importers could not wait for it
                raise InUseError(
                    f"export of {span.describe()}",
                    rule="its contents are still arriving",
                    next_step="Close what remap.resume returned",
                )
            if isinstance(span, ForkingBuffer) and span._still_shared(0, span.capacity):
                raise InUseError(
                    f"export of {span.describe()}",
                    rule="it shares chunks with forks, which importers would go on using when those write or move",
                    next_step="Call make_private() first, or close the forks",
                )
            chunks, offset, first = _chunks_of(span, start, size)
            span._identity = span._identity or secrets.token_bytes(IDENTITY_BYTES)
            if isinstance(span, Buffer) and not span._shared:
                counted.append(span)
                span._shared = True
            imported = span if isinstance(span, ImportedBuffer) else None
            again = imported._handles_again(first, len(chunks)) if imported is not None else None
            if imported is not None and again is not None:
                shared = imported.descriptor
                if kind not in {None, shared.kind}:
                    raise _not_made_for(span, str(kind), f"it was imported as {shared.kind}")
                return _Taken(chunks, offset, shared.kind, imported.properties), again
            for address in (chunk.address for chunk in chunks):
                retained.append(driver.retain(address))  # noqa: PERF401 (those before a failure are given back)
        found = [driver.properties_of(handle) for handle in retained]
        properties = found[0] if found else getattr(span, "properties", _NOTHING)
        kind = _choose(span, properties, kind)
        for one in found[1:]:  # ranks' memory side by side: some is this process's, some another's
            _choose(span, one, kind)
        return _Taken(chunks, offset, kind, properties), _handles(driver, retained, kind)
    finally:
        for handle in retained:
            driver.release(handle)


def _chunks_of(span: Span, start: int, size: int) -> tuple[tuple[Chunk, ...], int, int]:
    """Return the chunks that a part lies in, where in the first it begins, and how many come before that."""
    if not size:
        return (), 0, 0
    begin = span._address + start
    every = span.chunks
    found = tuple(one for one in every if one.address < begin + size and begin < one.address + one.size)
    if len(found) > MOST_CHUNKS:
        raise InvalidValueError(
            f"export of {len(found)} chunks",
            rule=f"shared memory has {MOST_CHUNKS} at most, as each needs a handle of its own",
            next_step="Allocate it with fewer, larger chunks",
        )
    at = found[0].address if found else begin
    for one in found:
        if one.address != at:
            break
        at += one.size
    if not found or found[0].address > begin or at < begin + size:
        raise ShareError(
            f"export of {size} bytes of {span.describe()}",
            rule="a part of it has no memory behind it",
            next_step="Commit the whole part first, or export a smaller one",
        )
    return found, begin - found[0].address, every.index(found[0])


def _choose(span: Span, properties: AllocationProperties, kind: HandleType | None) -> HandleType:
    made_for = properties.handle_types
    if kind is None and not made_for and not span.size:
        return HandleType.POSIX_FD
    if kind is None:
        kind = HandleType.POSIX_FD if HandleType.POSIX_FD in made_for else next(iter(made_for), None)
    if kind is None or kind not in made_for:
        rule = f"its handle types were fixed when it was created: {' and '.join(sorted(made_for))}"
        if not made_for:
            rule = (
                "it has no shareable handle: one is asked for when memory is created, and what another process made "
                "has none here"
            )
        raise _not_made_for(span, str(kind or "any handle"), rule)
    return kind


def _handles(driver: Any, retained: list[int], kind: HandleType) -> Fds | tuple[bytes, ...]:
    if kind is HandleType.FABRIC:
        return tuple(bytes(driver.export_handle(handle, kind)) for handle in retained)
    fds = Fds()
    try:
        for handle in retained:
            fds.add(driver.export_handle(handle, kind))
            os.set_inheritable(fds.numbers[-1], False)
    except BaseException:
        fds.close()
        raise
    return fds


def _kind(handle: HandleType | str) -> HandleType:
    (kind,) = parse_handle_types(handle)
    if kind is HandleType.WIN32:
        raise not_supported(
            "cuMemExportToShareableHandle",
            "export as win32",
            "Win32 handles exist on Windows only, and remap shares memory on Linux",
            'Use handle="posix_fd"',
            capability="win32",
        )
    return kind


_HOW = '(..., shareable="posix_fd"), or "fabric" between machines'
_NOTHING = AllocationProperties(Location(LocationKind.DEVICE), frozenset({HandleType.POSIX_FD}))


def _not_made_for(span: Span, kind: str, rule: str) -> ShareError:
    return ShareError(
        f"export of {span.describe()} as {kind}",
        rule=rule,
        next_step=f"Allocate it with remap.allocate{_HOW}",
    )
