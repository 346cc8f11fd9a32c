"""remap: GPU memory whose address never changes while everything behind it may.

Importing it loads no driver and no wing; each name loads its room on first use. Start with `remap.device`,
`remap.allocate`, and the four things called memory in `remap.handles`.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from remap.loading import loading as _loading

if TYPE_CHECKING:
    __version__: str
    from remap.arrays import DeviceArray as DeviceArray
    from remap.buffers.advise import Advice as Advice
    from remap.buffers.advise import advise as advise
    from remap.buffers.base import Buffer as Buffer
    from remap.buffers.base import allocate as allocate
    from remap.buffers.box import DeviceBox as DeviceBox
    from remap.buffers.chains import Chain as Chain
    from remap.buffers.chains import chain as chain
    from remap.buffers.device import DeviceBuffer as DeviceBuffer
    from remap.buffers.elastic import ElasticBuffer as ElasticBuffer
    from remap.buffers.managed import Managed as Managed
    from remap.buffers.managed import managed as managed
    from remap.buffers.pinned import Pinned as Pinned
    from remap.buffers.pinned import pinned as pinned
    from remap.buffers.pinned import register as register
    from remap.buffers.registrations import Registration as Registration
    from remap.buffers.ring import RingBuffer as RingBuffer
    from remap.chunks.pool import ChunkPool as ChunkPool
    from remap.chunks.pool import chunk_pool as chunk_pool
    from remap.collectives import MulticastCollectives as MulticastCollectives
    from remap.drivers import current
    from remap.drivers import use as use
    from remap.errors import AccessError as AccessError
    from remap.errors import AlignmentError as AlignmentError
    from remap.errors import BufferNotFoundError as BufferNotFoundError
    from remap.errors import ClosedError as ClosedError
    from remap.errors import CompileError as CompileError
    from remap.errors import ContextLostError as ContextLostError
    from remap.errors import DescriptorError as DescriptorError
    from remap.errors import DriverError as DriverError
    from remap.errors import DriverNotFoundError as DriverNotFoundError
    from remap.errors import ForkedError as ForkedError
    from remap.errors import IllegalAddressError as IllegalAddressError
    from remap.errors import InUseError as InUseError
    from remap.errors import InvalidValueError as InvalidValueError
    from remap.errors import KernelError as KernelError
    from remap.errors import LaunchError as LaunchError
    from remap.errors import NotPermittedError as NotPermittedError
    from remap.errors import NotSupportedError as NotSupportedError
    from remap.errors import OutOfAddressSpaceError as OutOfAddressSpaceError
    from remap.errors import OutOfMemoryError as OutOfMemoryError
    from remap.errors import PausedError as PausedError
    from remap.errors import RemapError as RemapError
    from remap.errors import RemapWarning as RemapWarning
    from remap.errors import ShareError as ShareError
    from remap.exports import ExportError as ExportError
    from remap.foreign import ForeignArray as ForeignArray
    from remap.foreign import SizeOverflowError as SizeOverflowError
    from remap.foreign import as_array as as_array
    from remap.foreign import from_dlpack as from_dlpack
    from remap.graphs import Executable as Executable
    from remap.graphs import Graph as Graph
    from remap.graphs import GraphMemory as GraphMemory
    from remap.graphs import capture as capture
    from remap.graphs import graph_memory as graph_memory
    from remap.handles import Mapping as Mapping
    from remap.handles import PhysicalAllocation as PhysicalAllocation
    from remap.handles import Reservation as Reservation
    from remap.handles import create as create
    from remap.handles import reserve as reserve
    from remap.integrations import torch as torch
    from remap.kernels import DisjointSlice as DisjointSlice
    from remap.kernels import Image as Image
    from remap.kernels import Kernel as Kernel
    from remap.kernels import Module as Module
    from remap.kernels import Pointer as Pointer
    from remap.kernels import PythonKernel as PythonKernel
    from remap.kernels import Slice as Slice
    from remap.kernels import alias_fence as alias_fence
    from remap.kernels import atomic_add as atomic_add
    from remap.kernels import atomic_cas as atomic_cas
    from remap.kernels import atomic_exchange as atomic_exchange
    from remap.kernels import atomic_max as atomic_max
    from remap.kernels import atomic_min as atomic_min
    from remap.kernels import barrier as barrier
    from remap.kernels import block as block
    from remap.kernels import block_size as block_size
    from remap.kernels import dynamic_shared as dynamic_shared
    from remap.kernels import fma as fma
    from remap.kernels import grid_size as grid_size
    from remap.kernels import index_1d as index_1d
    from remap.kernels import index_2d as index_2d
    from remap.kernels import kernel as kernel
    from remap.kernels import load as load
    from remap.kernels import shared_array as shared_array
    from remap.kernels import source as source
    from remap.kernels import thread as thread
    from remap.kernels import unchecked as unchecked
    from remap.kernels import warp_index as warp_index
    from remap.kernels.compile import compile as compile
    from remap.lifetime import collect as collect
    from remap.locations import Device as Device
    from remap.locations import device as device
    from remap.locations import devices as devices
    from remap.observe.leaks import leaks as leaks
    from remap.observe.leaks import no_leaks as no_leaks
    from remap.observe.leaks import record_sites as record_sites
    from remap.observe.progress import ProgressBar as ProgressBar
    from remap.observe.progress import progress_bar as progress_bar
    from remap.observe.snapshot import Snapshot as Snapshot
    from remap.observe.snapshot import snapshot as snapshot
    from remap.observe.trace import trace as trace
    from remap.residency import ChunkEvent as ChunkEvent
    from remap.residency import DiskError as DiskError
    from remap.residency import Group as Group
    from remap.residency import HostPool as HostPool
    from remap.residency import Moved as Moved
    from remap.residency import Waking as Waking
    from remap.residency import backup as backup
    from remap.residency import footprint as footprint
    from remap.residency import group as group
    from remap.residency import groups as groups
    from remap.residency import host_pool as host_pool
    from remap.residency import migrate as migrate
    from remap.residency import pause as pause
    from remap.residency import resume as resume
    from remap.sharing.broker import serve as serve
    from remap.sharing.client import BrokerClient as BrokerClient
    from remap.sharing.client import connect as connect
    from remap.sharing.events import SharedEvent as SharedEvent
    from remap.sharing.exchange import Exchange as Exchange
    from remap.sharing.exchange import ProcessExchange as ProcessExchange
    from remap.sharing.exchange import SingleExchange as SingleExchange
    from remap.sharing.export import export as export
    from remap.sharing.exported import Exported as Exported
    from remap.sharing.importing import ImportedBuffer as ImportedBuffer
    from remap.sharing.importing import open as open
    from remap.sharing.multicast import MulticastObject as MulticastObject
    from remap.sharing.multicast import MulticastView as MulticastView
    from remap.sharing.ranks import MpiExchange as MpiExchange
    from remap.sharing.ranks import TorchExchange as TorchExchange
    from remap.sharing.symmetric import SymmetricBuffer as SymmetricBuffer
    from remap.sizes import GiB as GiB
    from remap.sizes import KiB as KiB
    from remap.sizes import MiB as MiB
    from remap.sizes import TiB as TiB
    from remap.streams import Event as Event
    from remap.streams import Stream as Stream
    from remap.streams import default_stream as default_stream
    from remap.types import Access as Access
    from remap.types import Capability as Capability
    from remap.types import HandleType as HandleType
    from remap.types import Host as Host
    from remap.types import HostNuma as HostNuma
    from remap.types import Location as Location
    from remap.types import MemoryInfo as MemoryInfo
    from remap.types import MemoryType as MemoryType

    driver = current

# name: (module, name there)
_ROOMS: dict[str, tuple[str, ...]] = {
    "sizes": ("KiB", "MiB", "GiB", "TiB"),
    "types": (
        "Access",
        "Capability",
        "HandleType",
        "Host",
        "HostNuma",
        "Location",
        "MemoryInfo",
        "MemoryType",
    ),
    "errors": (
        "AccessError",
        "AlignmentError",
        "BufferNotFoundError",
        "ClosedError",
        "CompileError",
        "ContextLostError",
        "DescriptorError",
        "DriverError",
        "DriverNotFoundError",
        "ForkedError",
        "IllegalAddressError",
        "InUseError",
        "InvalidValueError",
        "KernelError",
        "LaunchError",
        "NotPermittedError",
        "NotSupportedError",
        "OutOfAddressSpaceError",
        "OutOfMemoryError",
        "PausedError",
        "RemapError",
        "RemapWarning",
        "ShareError",
    ),
    "lifetime": ("collect",),
    "drivers": ("use",),
    "locations": ("Device", "device", "devices"),
    "streams": ("Event", "Stream", "default_stream"),
    "arrays": ("DeviceArray",),
    "exports": ("ExportError",),
    "foreign": ("ForeignArray", "SizeOverflowError", "as_array", "from_dlpack"),
    "handles": ("Mapping", "PhysicalAllocation", "Reservation", "create", "reserve"),
    "buffers.base": ("Buffer", "allocate"),
    "buffers.device": ("DeviceBuffer",),
    "buffers.box": ("DeviceBox",),
    "buffers.pinned": ("Pinned", "pinned", "register"),
    "buffers.managed": ("Managed", "managed"),
    "buffers.advise": ("Advice", "advise"),
    "buffers.chains": ("Chain", "chain"),
    "buffers.elastic": ("ElasticBuffer",),
    "buffers.registrations": ("Registration",),
    "buffers.ring": ("RingBuffer",),
    "chunks.pool": ("ChunkPool", "chunk_pool"),
    "graphs": ("Executable", "Graph", "GraphMemory", "capture", "graph_memory"),
    "kernels": (
        "DisjointSlice",
        "Image",
        "Kernel",
        "Module",
        "Pointer",
        "PythonKernel",
        "Slice",
        "alias_fence",
        "atomic_add",
        "atomic_cas",
        "atomic_exchange",
        "atomic_max",
        "atomic_min",
        "barrier",
        "block",
        "block_size",
        "compile",
        "dynamic_shared",
        "fma",
        "grid_size",
        "index_1d",
        "index_2d",
        "kernel",
        "load",
        "shared_array",
        "source",
        "thread",
        "unchecked",
        "warp_index",
    ),
    "collectives": ("MulticastCollectives",),
    "sharing.broker": ("serve",),
    "sharing.client": ("BrokerClient", "connect"),
    "sharing.events": ("SharedEvent",),
    "sharing.exchange": ("Exchange", "ProcessExchange", "SingleExchange"),
    "sharing.export": ("export",),
    "sharing.exported": ("Exported",),
    "sharing.importing": ("ImportedBuffer", "open"),
    "sharing.multicast": ("MulticastObject", "MulticastView"),
    "sharing.ranks": ("MpiExchange", "TorchExchange"),
    "sharing.symmetric": ("SymmetricBuffer",),
    "observe.leaks": ("leaks", "no_leaks", "record_sites"),
    "observe.progress": ("ProgressBar", "progress_bar"),
    "observe.snapshot": ("Snapshot", "snapshot"),
    "observe.trace": ("trace",),
    "residency": (
        "ChunkEvent",
        "DiskError",
        "Group",
        "HostPool",
        "Moved",
        "Waking",
        "backup",
        "footprint",
        "group",
        "groups",
        "host_pool",
        "migrate",
        "pause",
        "resume",
    ),
}
_NAMES = {name: (module, name) for module, names in _ROOMS.items() for name in names}
_NAMES["driver"] = ("drivers", "current")

# Modules that go by a short name. They are not in `__all__`, as what they need may not be installed.
_MODULES = {"torch": "integrations.torch"}

__all__ = list(_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Load the room that `name` lives in, and keep the name here."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("remap")
        except PackageNotFoundError:  # run from a source tree that was not installed
            return "unknown"
    if name in _MODULES:
        try:
            with _loading():
                return importlib.import_module(f"remap.{_MODULES[name]}")
        except ImportError as error:
            # Whoever looks around (help, hasattr, inspect) expects this one; `import remap.torch` raises the first.
            raise AttributeError(str(error)) from error
    try:
        module, there = _NAMES[name]
    except KeyError:
        raise AttributeError(f"module 'remap' has no attribute {name!r}{_hint(name)}") from None
    with _loading():
        value = getattr(importlib.import_module(f"remap.{module}"), there)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Return what a name that does not exist may have meant, as the rest of a message."""
    if name.startswith("_") or not name.isidentifier():  # asked for by tools, which catch it
        return ""
    from difflib import get_close_matches
    from importlib.util import find_spec

    if find_spec(f"remap.{name}"):
        return f"; it is a module of its own: import remap.{name}"
    by_lower = {one.lower(): one for one in (*__all__, *_MODULES)}
    near = [by_lower[one] for one in get_close_matches(name.lower(), by_lower, n=2, cutoff=0.7)]
    return f"; did you mean {' or '.join(f'remap.{one}' for one in near)}?" if near else ""


def __dir__() -> list[str]:
    """Return every public name."""
    return [*__all__, *_MODULES, "__version__"]


def _trace_all() -> None:
    from remap.observe.trace import from_environment

    from_environment()


if os.environ.get("REMAP_TRACE"):
    _trace_all()
