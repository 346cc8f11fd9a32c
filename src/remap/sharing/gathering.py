"""How the memory of all ranks comes into one range, and into one multicast team, step by step and in agreement."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

from remap.buffers.placement import check_reach
from remap.errors import DescriptorError
from remap.handles import create_handle, reserve_range
from remap.lifetime import Rollback
from remap.sharing.agreement import Agreement
from remap.sharing.channel import LONGEST_LIMIT, Fds
from remap.sharing.descriptor import IDENTITY_BYTES, Descriptor, SharedChunk
from remap.sharing.exported import PATIENCE, Exported, offer, receive
from remap.sharing.importing import checked_place, map_whole
from remap.sharing.multicast import MulticastObject, MulticastView
from remap.sharing.settling import Plan
from remap.sizes import format_size
from remap.spans import Chunk
from remap.types import Access, HandleType


@dataclass(slots=True)
class Gathered:
    """The range with every rank's memory, and the handle of this rank's own, which somebody has to release."""

    address: int = 0
    chunks: tuple[Chunk, ...] = ()
    own: int = 0

    def give_back(self, driver: Any, size: int) -> None:
        """Unmap what is mapped, and free the range, if there is one."""
        if self.address:
            try:
                driver.unmap(self.address, size)  # holes do not matter (T7)
            finally:
                driver.free_range(self.address, size)


def gather(driver: Any, agreement: Agreement, plan: Plan, rollback: Rollback) -> Gathered:
    """Create this rank's memory and map that of all ranks; `rollback` gives it back if its block fails."""
    exchange = agreement.exchange
    created: list[int] = []
    offered: list[Exported] = []

    def create() -> bytes:
        own = create_handle(
            driver, plan.stride, plan.properties, f" for rank {exchange.rank} of a symmetric buffer"
        )
        created.append(own)
        offered.append(_offer(driver, plan, own, plan.stride, exchange.size - 1))
        return offered[0].to_bytes()

    found = Gathered()
    # First: an interrupt comes as a call returns, and what it made would be nobody's.
    rollback.undo(found.give_back, driver, plan.stride * exchange.size)

    def map_all() -> None:
        _map_all(driver, plan, exchange.rank, told, created[0], found)

    try:
        told = agreement.step("create its memory", create)
        agreement.step("map the memory of all ranks", map_all)
        _withdraw(offered)
    except BaseException:
        _withdraw(offered)
        for handle in created:
            driver.release(handle)
        raise
    found.own = created[0]
    return found


def _offer(driver: Any, plan: Plan, handle: int, size: int, receipts: int) -> Exported:
    """Return memory, or a multicast object, on its way to so many ranks."""
    descriptor = Descriptor(
        driver=driver.name,
        kind=plan.kind,
        chunks=(SharedChunk(size, plan.device.location),),
        offset=0,
        size=size,
        access=Access.READ_WRITE,
        identity=secrets.token_bytes(IDENTITY_BYTES),
    )
    if plan.kind is HandleType.FABRIC:
        return Exported(descriptor, handles=(bytes(driver.export_handle(handle, plan.kind)),))
    fds = Fds()
    fds.add(driver.export_handle(handle, plan.kind))
    os.set_inheritable(fds.numbers[0], False)
    # Its time is that of the steps, whatever limits those have: whoever offers it closes it after them.
    return offer(descriptor, fds, receipts=max(receipts, 1), limit=LONGEST_LIMIT)


def _withdraw(offered: list[Exported]) -> None:
    for one in offered:
        one.close()


def _take(data: bytes, plan: Plan, size: int) -> Exported:
    """Fetch what another rank offers, and check that it is what was settled."""
    exported = receive(data, timeout=PATIENCE)
    descriptor = exported.descriptor
    if (descriptor.kind, descriptor.size, len(descriptor.chunks)) != (plan.kind, size, 1):
        exported.close()
        raise DescriptorError(
            f"memory of {format_size(descriptor.size)} in {len(descriptor.chunks)} chunks as {descriptor.kind}",
            rule=f"{format_size(size)} in one chunk as {plan.kind} was settled",
        )
    return exported


def _import(driver: Any, exported: Exported, imported: list[int]) -> None:
    """Import what was fetched, and close the descriptors."""
    with exported:
        handles = exported.handles()
        if not isinstance(handles, Fds):
            imported.append(driver.import_handle(handles[0], exported.descriptor.kind))
            return
        with handles:
            imported.append(driver.import_handle(handles.numbers[0], exported.descriptor.kind))


def _map_all(driver: Any, plan: Plan, rank: int, told: list[bytes], own: int, found: Gathered) -> None:
    stride = plan.stride
    chunks: list[Chunk] = []
    found.address = reserve_range(driver, stride * len(told))
    for number, data in enumerate(told):
        at = found.address + number * stride
        if number == rank:
            driver.map(at, stride, own)
            place = plan.device.location
        else:
            exported, imported = _take(data, plan, stride), list[int]()
            try:
                _import(driver, exported, imported)
                place = checked_place(driver, imported[0], exported.descriptor.chunks[0], exported.descriptor)
                check_reach(driver, (plan.device.location,), (place,))
                map_whole(driver, at, stride, imported[0])
            finally:
                for handle in imported:  # the mapping alone keeps it
                    driver.release(handle)
        right = Access.READ_WRITE if number == rank else plan.access
        driver.set_access(at, stride, ((plan.device.location, right),))
        chunks.append(Chunk(at, stride, place))
    found.chunks = tuple(chunks)


def join_team(
    driver: Any, agreement: Agreement, plan: Plan, found: Gathered, rollback: Rollback
) -> MulticastView:
    """Join all ranks' memory to one multicast object and map it, each step when all ranks have done the one before.

    The order matters beyond errors: CUDA blocks for ever where memory is bound while a device is missing.
    """
    exchange = agreement.exchange
    held: list[MulticastObject] = []
    offered: list[Exported] = []
    views: list[MulticastView] = []

    def create() -> bytes:
        if exchange.rank:
            return b""
        team = MulticastObject.create(plan.stride, devices=exchange.size, shareable=plan.kind)
        held.append(team)
        offered.append(_offer(driver, plan, team._handle, team.size, exchange.size - 1))
        return offered[0].to_bytes()

    def join() -> None:
        if exchange.rank:
            held.append(_open_team(told[0], plan, exchange.size))
        held[0].add(plan.device)

    def bind() -> None:
        held[0].complete()
        handle = driver.retain(own_address)
        try:
            held[0]._bind(handle, plan.device, 0, 0, plan.stride)
        finally:
            driver.release(handle)

    def map_view() -> None:
        views.append(held[0].map())
        rollback.undo(views[0].close)

    own_address = found.chunks[exchange.rank].address
    try:
        told = agreement.step("create the multicast object", create)
        agreement.step("add its device to the multicast object", join)
        agreement.step("bind its memory to the multicast object", bind)
        agreement.step("map the multicast object", map_view)
        _withdraw(offered)
        return views[0]
    except BaseException:
        _withdraw(offered)
        raise
    finally:
        for team in held:  # the mapping keeps it
            team.close()


def _open_team(data: bytes, plan: Plan, ranks: int) -> MulticastObject:
    with _take(data, plan, plan.stride) as exported:
        handles = exported.handles()
        if not isinstance(handles, Fds):
            return MulticastObject.open(handles[0], size=plan.stride, devices=ranks, kind=plan.kind)
        with handles:
            return MulticastObject.open(handles.numbers[0], size=plan.stride, devices=ranks, kind=plan.kind)
