"""Snapshots: a frozen picture of all that is alive, who holds which bytes at which addresses, and with what rights.

`remap.snapshot()` takes one. It can be printed, shown in a notebook, drawn as a page, kept as JSON, and compared with
another one of the same process. Nothing in it changes any more, and it keeps no object alive.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remap import drivers, lifetime
from remap.drivers.graph_powers import SupportsGraphMemory
from remap.drivers.powers import SupportsPools
from remap.errors import InvalidValueError, RemapError
from remap.lifetime import Resource, drain, queued
from remap.locations import Device, devices
from remap.observe.reading import FileLike, printable
from remap.sizes import counted, format_size
from remap.types import Access, Description, Held, Location, LocationKind


@dataclass(frozen=True, slots=True)
class Piece:
    """Physical bytes that an item holds. `address` is None for bytes that are mapped nowhere.

    Pieces with the same `memory` are the same bytes (aliases). `source` says who counts them: "own"; "pool" and
    "graph" for a part of a device's pool, which is counted as a whole; "foreign" for another process.
    """

    address: int | None
    size: int
    location: Location
    memory: int
    rights: tuple[tuple[Location, Access], ...] = ()
    source: str = "own"

    @property
    def right(self) -> Access:
        """The most that any location may do with it."""
        order = list(Access)
        return max((right for _, right in self.rights), key=order.index, default=Access.NONE)


@dataclass(frozen=True, slots=True)
class Item:
    """One live object. `reserved` is the (address, size) of the addresses that it keeps; `kept` its backup's bytes."""

    kind: str
    serial: int
    size: int
    address: int | None
    detail: str
    reserved: tuple[int, int] | None = None
    pieces: tuple[Piece, ...] = ()
    paused: str = ""
    shared: bool = False
    kept: int = 0
    groups: tuple[str, ...] = ()
    site: tuple[str, ...] = ()

    @property
    def held(self) -> int:
        """The physical bytes that this item holds or has mapped, its own aliases counted once."""
        return sum({piece.memory: piece.size for piece in self.pieces}.values())

    def __str__(self) -> str:
        """Return what it is in one line."""
        return str(Description(self.kind, self.serial, self.size, self.address, ""))


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One device as its driver reports it; None and 0 where no context of it is in use, as asking would make one."""

    index: int
    name: str
    free: int | None = None
    total: int | None = None
    pool_reserved: int = 0
    pool_used: int = 0
    graph_reserved: int = 0
    graph_used: int = 0

    @property
    def location(self) -> Location:
        """The device as a place."""
        return Location(LocationKind.DEVICE, self.index)

    @property
    def used(self) -> int | None:
        """The bytes that are not free, whoever holds them."""
        return None if self.free is None or self.total is None else self.total - self.free


@dataclass(frozen=True, slots=True)
class Share:
    """How the bytes of one location add up: mapped - aliases + unmapped + pools + graphs = footprint."""

    mapped: int = 0
    aliases: int = 0
    unmapped: int = 0
    pools: int = 0
    graphs: int = 0

    @property
    def footprint(self) -> int:
        """The physical bytes, each counted once."""
        return self.mapped - self.aliases + self.unmapped + self.pools + self.graphs


@dataclass(frozen=True, slots=True, repr=False)
class Snapshot:
    """Everything that was alive in one process at one moment."""

    taken: str
    process: int
    driver: str
    driver_version: str
    devices: tuple[DeviceState, ...]
    items: tuple[Item, ...]

    def shares(self) -> dict[Location, Share]:
        """Return for each location how its bytes add up. Memory of other processes counts nowhere."""
        mapped: dict[Location, int] = {}
        aliases: dict[Location, int] = {}
        unmapped: dict[Location, int] = {}
        seen: set[int] = set()
        loose: dict[int, Piece] = {}
        for piece in self._own():
            if piece.address is None:
                loose[piece.memory] = piece
                continue
            mapped[piece.location] = mapped.get(piece.location, 0) + piece.size
            if piece.memory in seen:
                aliases[piece.location] = aliases.get(piece.location, 0) + piece.size
            seen.add(piece.memory)
        for memory, piece in loose.items():
            if memory not in seen:
                unmapped[piece.location] = unmapped.get(piece.location, 0) + piece.size
        state = {one.location: one for one in self.devices}
        places = [one.location for one in self.devices]
        places += sorted((mapped.keys() | unmapped.keys()) - state.keys())
        return {
            place: Share(
                mapped.get(place, 0),
                aliases.get(place, 0),
                unmapped.get(place, 0),
                state[place].pool_reserved if place in state else 0,
                state[place].graph_reserved if place in state else 0,
            )
            for place in places
        }

    def footprint(self) -> dict[Location, int]:
        """Return the physical bytes of this process's objects by location, aliases counted once, pools as a whole."""
        return {place: share.footprint for place, share in self.shares().items() if share.footprint}

    @property
    def kept(self) -> int:
        """The bytes of host memory that backups of paused buffers take."""
        return sum(item.kept for item in self.items)

    def find(self, serial: int) -> Item | None:
        """Return the item with a number."""
        return next((item for item in self.items if item.serial == serial), None)

    def difference(self, earlier: Snapshot) -> Difference:
        """Return what happened since an earlier snapshot of the same process; raises `InvalidValueError` for others."""
        return compare(earlier, self)

    def __sub__(self, earlier: Snapshot) -> Difference:
        """Return `difference(earlier)`."""
        return self.difference(earlier)

    def to_json(self) -> str:
        """Return it as JSON text, with the version of the format."""
        from remap.observe.stored import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> Snapshot:
        """Return what `to_json` wrote; raises `InvalidValueError` for anything else."""
        from remap.observe.stored import from_json

        return from_json(text)

    def save(self, path: FileLike) -> Path:
        """Write it to a file and return its path: a page if the name ends in `.html`, else JSON."""
        from remap.observe.stored import save

        return save(self, path)

    @staticmethod
    def load(path: FileLike) -> Snapshot:
        """Read a JSON file that `save` wrote; raises `InvalidValueError` for any other."""
        from remap.observe.stored import load

        return load(path)

    def to_html(self) -> str:
        """Return it as one page that needs nothing else: lanes of addresses, physical memory, search and a table."""
        from remap.observe.render.page import page

        return page(self)

    def __repr__(self) -> str:
        """Return how much is in it: all of it is what `str` and `print` draw."""
        return f"<remap.Snapshot of {counted(len(self.items), 'object')} at {self.taken}>"

    def __str__(self) -> str:
        """Return it as a map of text, 100 columns wide and without colour."""
        from remap.observe.render.terminal import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        """Return it for a notebook, without JavaScript."""
        from remap.observe.render.still import still

        return still(self)

    def _own(self) -> Iterator[Piece]:
        for item in self.items:
            for piece in item.pieces:
                if piece.source == "own":
                    yield piece


@dataclass(frozen=True, slots=True)
class Difference:
    """What happened between two snapshots of one process: items made, gone and changed, and bytes by location."""

    made: tuple[Item, ...]
    gone: tuple[Item, ...]
    changed: tuple[tuple[Item, Item], ...]
    footprint: dict[Location, int]

    def __bool__(self) -> bool:
        """Tell whether anything differs."""
        return bool(self.made or self.gone or self.changed or self.footprint)

    def __str__(self) -> str:
        """Return it line by line."""
        lines = [f"+ {item}" + _site(item) for item in self.made]
        lines += [f"- {item}" for item in self.gone]
        lines += [
            f"~ {after} (it was {_state(before)}, it is {_state(after)})" for before, after in self.changed
        ]
        lines += [
            f"{place}: {'+' if change > 0 else '-'}{format_size(abs(change))}"
            for place, change in self.footprint.items()
        ]
        return "\n".join(map(printable, lines)) or "nothing changed"


def snapshot() -> Snapshot:
    """Return a frozen picture of everything alive in this process.

    Asks the driver for the memory of those devices whose context remap uses already. What was collected unclosed is
    given back first, which may wait for work that still uses it. While a stream is captured it cannot be: then it is
    not in the picture, though its bytes are still taken.
    """
    driver = drivers.current()
    if queued:
        drain()
    numbers: dict[object, int] = {}
    with driver.lock:
        items = tuple(item_of(thing, numbers) for thing in lifetime.live())
    return Snapshot(
        datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        os.getpid(),
        driver.name,
        driver.version(),
        tuple(_state_of(one, driver) for one in devices()),
        items,
    )


def compare(earlier: Snapshot, later: Snapshot) -> Difference:
    """Return what differs; raises `InvalidValueError` for snapshots of two processes."""
    if not isinstance(earlier, Snapshot):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"the difference is that to an earlier snapshot, not to {type(earlier)}. For what lives since then: "
            "remap.leaks(since=snapshot)"
        )
    if earlier.process != later.process:
        raise InvalidValueError(
            f"the difference of snapshots of processes {earlier.process} and {later.process}",
            rule="objects are known by their numbers, which each process counts for itself",
        )
    before = {item.serial: item for item in earlier.items}
    after = {item.serial: item for item in later.items}
    old, new = earlier.footprint(), later.footprint()
    moved = {place: new.get(place, 0) - old.get(place, 0) for place in {**old, **new}}
    return Difference(
        tuple(item for serial, item in after.items() if serial not in before),
        tuple(item for serial, item in before.items() if serial not in after),
        tuple(
            (before[serial], item)
            for serial, item in after.items()
            if serial in before and _without_numbers(before[serial]) != _without_numbers(item)
        ),
        {place: change for place, change in moved.items() if change},
    )


def item_of(thing: Resource, numbers: dict[object, int]) -> Item:
    """Return what a live object says of itself; `numbers` has one for each memory, and grows."""
    said, facts = thing.describe(), thing._facts()
    pieces = tuple(_piece(held, numbers) for held in facts.held)
    return Item(
        said.kind,
        said.serial,
        said.size,
        said.address,
        said.detail,
        facts.reserved,
        pieces,
        facts.paused,
        facts.shared,
        facts.kept,
        facts.groups,
        thing.site,
    )


def _piece(held: Held, numbers: dict[object, int]) -> Piece:
    known = object() if held.memory is None else held.memory
    number = numbers.setdefault(known, len(numbers) + 1)
    return Piece(held.address, held.size, held.location, number, held.rights, held.source)


def _state_of(one: Device, driver: Any) -> DeviceState:
    if not one._context:
        return DeviceState(one.index, one.name)
    info = one.memory()
    pool = graph = (0, 0)
    with suppress(RemapError):  # a picture with less in it is better than none
        if isinstance(driver, SupportsPools) and one.capabilities["memory_pools"]:
            figures = driver.pool_figures(one.index)
            pool = (figures.reserved, figures.used)
            if isinstance(driver, SupportsGraphMemory):
                memory = driver.graph_figures(one.index)
                graph = (memory.reserved, memory.used)
    return DeviceState(one.index, one.name, info.free, info.total, *pool, *graph)


def _without_numbers(item: Item) -> tuple[Any, ...]:
    pieces = [(piece.address, piece.size, piece.location, piece.rights) for piece in item.pieces]
    return item.size, item.reserved, pieces, item.paused, item.shared, item.kept, item.groups


def _state(item: Item) -> str:
    held = sum_by_location(item.pieces)
    said = ", ".join(f"{format_size(size)} on {place}" for place, size in held.items()) or "nothing held"
    said = f"{format_size(item.size)}, {said}"
    return f"{said}, paused ({item.paused})" if item.paused else said


def sum_by_location(pieces: Iterable[Piece]) -> dict[Location, int]:
    """Return the bytes of pieces by location, aliases counted once."""
    total: dict[Location, int] = {}
    for piece in {piece.memory: piece for piece in pieces}.values():
        total[piece.location] = total.get(piece.location, 0) + piece.size
    return total


def _site(item: Item) -> str:
    return f", made at {item.site[0]}" if item.site else ""
