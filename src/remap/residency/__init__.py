"""Residency: memory that goes to sleep, wakes and moves while its addresses stay.

`pause` copies what stands behind buffers to host memory or a file, or drops it, and gives the device memory back;
`resume` puts memory there again; `migrate` moves it. All of them have two phases: what can fail comes first, and
memory is given back only when it has succeeded for every buffer of the call (invariant 5).
"""

from remap.residency.disk import DiskError
from remap.residency.hostpool import HostPool
from remap.residency.migration import migrate
from remap.residency.pausing import backup, pause
from remap.residency.present import host_pool
from remap.residency.results import HostPoolFigures, Moved
from remap.residency.resuming import resume
from remap.residency.tags import Group, footprint, group, groups
from remap.residency.waking import ChunkEvent, Waking

__all__ = [
    "ChunkEvent",
    "DiskError",
    "Group",
    "HostPool",
    "HostPoolFigures",
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
]
