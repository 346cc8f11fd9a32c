"""Handing physical allocations to other processes, and taking theirs (T14, T17)."""

from __future__ import annotations

import os
import stat

from remap.drivers.host.allocations import Allocation, Allocations
from remap.drivers.host.backing import Extent, Files, inspect
from remap.drivers.host.devices import Devices
from remap.drivers.host.machine import Machine
from remap.drivers.host.multicast import Teams
from remap.drivers.host.refusals import invalid, system_error
from remap.drivers.host.team import Team
from remap.errors import CudaResult, DriverError, driver_error
from remap.types import AllocationProperties, HandleType

_IMPORT = "cuMemImportFromShareableHandle"


class Sharing:
    """The calls that make descriptors of allocations and allocations of descriptors.

    The shareable handle is the memory file itself. Its name tells the importer the location, its seals that it will
    stay as large as it is. An import takes nothing from the importer's budget: the memory is the exporter's, and is
    counted there as long as anybody holds it. (Only where processes share a ledger does the importer appear in it too,
    so that the memory stays counted when the exporter dies.)
    """

    def __init__(
        self, machine: Machine, devices: Devices, allocations: Allocations, files: Files, teams: Teams
    ) -> None:
        self._teams = teams
        self._machine = machine
        self._devices = devices
        self._allocations = allocations
        self._files = files

    def export_handle(self, handle: int, kind: HandleType) -> int:
        """Return a new descriptor of an allocation that was created for it; the caller closes it."""
        call = "cuMemExportToShareableHandle"
        with self._machine.lock:
            allocation = self._allocations.find(call, handle)
            if isinstance(allocation, Team):
                return self._teams.export(allocation, kind)
            if kind not in allocation.properties.handle_types or allocation.file is None:
                rule = "the handle type is fixed at create, and this allocation was not created for it"
                step = f"Create it with the handle type {kind.value}; an import cannot be exported again"
                raise invalid(call, f"{kind.value} of allocation {handle}", rule, step)
            try:
                return self._files.export(allocation.file)
            except OSError as error:
                raise system_error(call, error) from error

    def import_handle(self, shareable: int | bytes, kind: HandleType) -> int:
        """Return a handle for the allocation behind a descriptor, which stays the caller's."""
        self._devices.require(_IMPORT, kind.value)
        if kind is not HandleType.POSIX_FD or not isinstance(shareable, int):
            raise invalid(
                _IMPORT, f"{type(shareable).__name__} as {kind.value}", "it is a file descriptor's number"
            )
        try:
            if stat.S_ISSOCK(os.fstat(shareable).st_mode):
                return self._teams.adopt(shareable)
        except (OSError, ValueError, OverflowError) as error:
            raise _foreign(shareable, error) from error
        with self._machine.lock:
            try:
                location, size = inspect(shareable, self._machine.options.granularity)
                if not self._machine.bit(location):
                    raise ValueError(f"the memory is on {location}, which this machine does not have")
                file = self._files.adopt(shareable, location, size)
            except (OSError, ValueError, OverflowError) as error:
                raise _foreign(shareable, error) from error
            if file.imported and file.users == 1:
                self._machine.budget(location).hold(size, file.inode)
            handle = next(self._machine.handles)
            allocation = Allocation(
                handle,
                size,
                AllocationProperties(location),
                Extent(file.fd, 0),
                self._allocations.allowed(location),
                file,
            )
            self._allocations.by_handle[handle] = allocation
        return handle


def _foreign(fd: int, error: Exception) -> DriverError:
    rule = str(error.strerror if isinstance(error, OSError) else error)
    step = "Import what export_handle gave, received over a Unix socket, and not closed yet"
    return driver_error(_IMPORT, CudaResult.UNKNOWN, asked=f"descriptor {fd}", rule=rule, next_step=step)
