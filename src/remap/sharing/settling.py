"""What the ranks of a symmetric buffer settle before any memory is made: size, device, kind of handle, multicast.

Each rank tells the others what it wants and what it can; all of them then draw the same conclusions from the same
facts, so that a refusal is the same everywhere without another word.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from remap.buffers.placement import granule
from remap.drivers.multicast_power import MulticastProperties
from remap.drivers.protocol import SupportsSharing
from remap.errors import DescriptorError, InvalidValueError
from remap.locations import Device, DeviceLike, device, parse_handle_types
from remap.sharing.agreement import Agreement
from remap.sharing.exchange import host_identity
from remap.sharing.multicast import why_no_multicast
from remap.sizes import LARGEST, Size, format_size, parse_size, round_up
from remap.types import Access, AllocationProperties, HandleType

_KINDS = (HandleType.FABRIC, HandleType.POSIX_FD)  # the first that serves all ranks is taken
_ENGINES = "Between such ranks data has to be copied: use NCCL, UCX or MPI"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller of one rank asked for, as it was given."""

    size: Size
    device: DeviceLike | None
    access: Access | str
    handle: HandleType | str | None
    multicast: bool | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What was settled: the same on every rank but for `device` and `access`."""

    device: Device
    access: Access
    kind: HandleType
    stride: int
    multicast: bool
    why_no_multicast: str

    @property
    def properties(self) -> AllocationProperties:
        """What each rank creates for itself."""
        return AllocationProperties(self.device.location, frozenset({self.kind}))


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one rank has told: `why` says for each kind of handle why it cannot be used there."""

    size: int
    driver: str
    host: str
    why: dict[str, str]
    handle: str
    multicast: bool | None
    no_multicast: str
    granule: int


def settle(driver: Any, agreement: Agreement, wish: Wish) -> Plan:
    """Return what all ranks settle on; raises the same `ShareError` on each if they cannot."""
    own: list[tuple[Device, Access]] = []

    def tell() -> bytes:
        chosen = device(wish.device)
        right = Access.parse(wish.access)
        if right is Access.NONE:
            raise InvalidValueError("a symmetric buffer with no access", rule='access is "r" or "rw"')
        own.append((chosen, right))
        return json.dumps(_facts(driver, chosen, wish, agreement.exchange.size)).encode()

    told = [_read(rank, one) for rank, one in enumerate(agreement.step("say what it wants", tell))]
    first = told[0]
    _check_same(agreement, "size", [format_size(one.size) for one in told])
    _check_same(agreement, "driver", [one.driver for one in told])
    _check_same(agreement, "kind of handle", [one.handle or "any" for one in told])
    _check_same(agreement, "multicast", [str(one.multicast) for one in told])
    kind = _choose(agreement, told)
    why = _missing_multicast(told)
    if first.multicast and why:
        raise agreement.refusal(
            f"there is no multicast: {why}",
            "Pass multicast=None to take it where there is one, or leave it out",
        )
    stride = round_up(first.size, max(one.granule for one in told))
    if stride * len(told) > LARGEST:
        raise agreement.refusal(f"{len(told)} × {format_size(first.size)} fit into no address space")
    chosen, right = own[0]
    return Plan(chosen, right, kind, stride, multicast=not why, why_no_multicast=why)


def _facts(driver: Any, chosen: Device, wish: Wish, ranks: int) -> dict[str, Any]:
    size = parse_size(wish.size)
    if not size:
        raise InvalidValueError("a symmetric buffer of 0 bytes", rule="each rank has at least one")
    if size > LARGEST // 2:
        raise InvalidValueError(f"a symmetric buffer of {size} bytes", rule="no address space is that large")
    handle = next(iter(parse_handle_types(wish.handle)), None)
    if handle not in {None, *_KINDS}:
        raise InvalidValueError(f"handle={handle}", rule='ranks share memory by "posix_fd" or "fabric"')
    shares = isinstance(driver, SupportsSharing)
    why = {kind.value: chosen.capabilities[kind.value].reason for kind in _KINDS if shares}
    usable = [kind for kind in _KINDS if shares and not why[kind.value]]
    properties = AllocationProperties(chosen.location, frozenset(usable[-1:]))
    unit = granule(driver, properties)
    no_multicast = _NOT_ASKED
    if wish.multicast is not False:
        no_multicast = why_no_multicast(chosen)
        if not no_multicast:
            kinds = frozenset(usable[-1:])
            unit = max(unit, driver.multicast_granularity(MulticastProperties(ranks, size, kinds)).minimum)
    return {
        "size": size,
        "driver": driver.name,
        "host": host_identity().hex(),
        "why": why or dict.fromkeys(_KINDS, f"the {driver.name} driver shares no memory"),
        "handle": handle or "",
        "multicast": wish.multicast,
        "no_multicast": no_multicast,
        "granule": unit,
    }


_NOT_ASKED = "it was not asked for (multicast=True, or None to take it where there is one)"


def _check_same(agreement: Agreement, what: str, said: list[str]) -> None:
    if len(set(said)) > 1:
        odd = next(rank for rank, one in enumerate(said) if one != said[0])
        raise agreement.refusal(
            f"its {what} must be the same on every rank: rank 0 has {said[0]}, rank {odd} {said[odd]}"
        )


def _choose(agreement: Agreement, told: list[_Facts]) -> HandleType:
    """Return the kind of handle that serves all ranks."""
    wanted = (HandleType(told[0].handle),) if told[0].handle else _KINDS
    hosts = {one.host for one in told}
    reasons: list[str] = []
    for kind in wanted:
        reason = next((f"rank {rank}: {one.why[kind]}" for rank, one in enumerate(told) if one.why[kind]), "")
        if kind is HandleType.POSIX_FD and len(hosts) > 1:
            ranks = [
                [rank for rank, one in enumerate(told) if one.host == host]
                for host in dict.fromkeys(one.host for one in told)
            ]
            parts = "; ".join(
                ", ".join(map(str, some[:8])) + (", …" if len(some) > 8 else "") for some in ranks[:4]
            )
            reason = f"descriptors do not leave a host, and the ranks are on {len(hosts)} of them ({parts})"
        if not reason:
            return kind
        reasons.append(f"{kind} ({reason})")
    raise agreement.refusal(f"no kind of handle serves all ranks: {'; '.join(reasons)}", _ENGINES)


def _missing_multicast(told: list[_Facts]) -> str:
    return next((f"rank {rank}: {one.no_multicast}" for rank, one in enumerate(told) if one.no_multicast), "")


_SHAPES: dict[str, Callable[[Any], bool]] = {
    "size": lambda value: type(value) is int and 0 < value <= LARGEST // 2,
    "driver": lambda value: isinstance(value, str),
    "host": lambda value: isinstance(value, str),
    "why": lambda value: (
        isinstance(value, dict)
        and all(isinstance(cast("dict[str, object]", value).get(kind), str) for kind in _KINDS)
    ),
    "handle": lambda value: value in {"", *_KINDS},
    "multicast": lambda value: value is None or isinstance(value, bool),
    "no_multicast": lambda value: isinstance(value, str),
    "granule": lambda value: type(value) is int and 0 < value <= 1 << 40,
}


def _read(rank: int, data: bytes) -> _Facts:
    """Return what a rank has told; raises `DescriptorError` for what no rank of ours says (invariant 11)."""
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    fields = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if fields.keys() != _SHAPES.keys() or not all(fits(fields[name]) for name, fits in _SHAPES.items()):
        raise DescriptorError(
            f"what rank {rank} said of a symmetric buffer",
            rule="it does not say what a rank of remap says",
            next_step="Use the same release on every rank",
        )
    return _Facts(**fields)
