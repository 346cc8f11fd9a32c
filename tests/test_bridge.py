"""The bridge table (E1): what it names exists; what the founding material calls, and what remap calls, is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import remap

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in (ROOT / "docs" / "bridge.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| CUDA")
]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`(remap\.[\w.]+)`", row[1])})
CALLS = {call for row in ROWS for call in re.findall(r"`((?:cu|nv)\w+)`", row[0])}

# The calls of the founding material, by where they stand.
MATERIAL = {
    "the programming guide on virtual memory management": """
        cuDeviceGetAttribute cuMemCreate cuMemRelease cuMemAddressReserve cuMemAddressFree cuMemMap cuMemUnmap
        cuMemSetAccess cuMemGetAccess cuMemGetAllocationGranularity cuMemGetAllocationPropertiesFromHandle
        cuMemRetainAllocationHandle cuMemExportToShareableHandle cuMemImportFromShareableHandle cuMemMapArrayAsync
        cuMulticastCreate cuMulticastAddDevice cuMulticastBindMem cuMulticastBindAddr cuMulticastUnbind
        cuMulticastGetGranularity cudaIpcGetMemHandle cudaIpcOpenMemHandle cudaIpcCloseMemHandle cuIpcGetMemHandle
        cuIpcOpenMemHandle cuIpcCloseMemHandle cudaIpcGetEventHandle cudaIpcOpenEventHandle cudaMalloc cudaFree
        cudaDeviceEnablePeerAccess cuDeviceCanAccessPeer cuMemAlloc cuMemFree
        """,
    "the striped vector add": """
        cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceComputeCapability
        cuDeviceGetAttribute cuDeviceCanAccessPeer cuCtxCreate cuCtxDestroy cuCtxSynchronize cuModuleLoadData
        cuModuleLoad cuModuleGetFunction cuModuleUnload cuMemcpyHtoD cuMemcpyDtoH cuLaunchKernel cuMemAlloc cuMemFree
        cuMemGetAllocationGranularity cuMemAddressReserve cuMemCreate cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap
        cuMemAddressFree
        """,
    "graphs and their memory": """
        cudaGraphCreate cudaGraphDestroy cudaGraphAddMemAllocNode cudaGraphAddMemFreeNode cudaGraphAddKernelNode
        cudaGraphAddMemcpyNode cudaGraphAddMemsetNode cudaGraphAddHostNode cudaGraphAddChildGraphNode cudaGraphClone
        cudaGraphInstantiate cudaGraphInstantiateWithFlags cudaGraphUpload cudaGraphLaunch cudaGraphExecUpdate
        cudaGraphExecDestroy cudaStreamBeginCapture cudaStreamEndCapture cudaStreamCreate cudaStreamCreateWithFlags
        cudaStreamSynchronize cudaStreamDestroy cudaStreamWaitEvent cudaEventCreate cudaEventCreateWithFlags
        cudaEventRecord cudaEventDestroy cudaMallocAsync cudaFreeAsync cudaMalloc cudaFree cudaMemcpyAsync
        cudaDeviceGraphMemTrim cudaDeviceGetGraphMemAttribute cudaDeviceSetGraphMemAttribute cudaDeviceGetAttribute
        cudaDriverGetVersion cudaSetDevice cudaGetDevice cudaGetLastError cudaDeviceReset
        """,
    "memory and data movement": """
        cudaMalloc cudaFree cudaMemcpy cudaMemcpyAsync cudaMemset cudaMemsetAsync cudaHostAlloc cudaMallocHost
        cudaFreeHost cudaHostRegister cudaHostUnregister cudaHostGetDevicePointer cudaMallocManaged
        cudaMemPrefetchAsync cudaMemAdvise cudaMemGetInfo cudaPointerGetAttributes cudaMallocAsync cudaFreeAsync
        cudaMemPoolTrimTo cudaMemPoolSetAttribute cudaDeviceGetDefaultMemPool cudaStreamCreate cudaStreamDestroy
        cudaStreamSynchronize cudaStreamQuery cudaEventCreate cudaEventRecord cudaEventSynchronize cudaEventQuery
        cudaEventElapsedTime cudaDeviceSynchronize cudaLaunchKernel cudaLaunchHostFunc cudaGetDeviceProperties
        cudaGetDeviceCount cuMemAlloc cuMemAllocAsync cuMemFreeAsync cuMemHostAlloc cuMemAllocHost cuMemFreeHost
        cuMemHostRegister cuMemHostUnregister cuMemAllocManaged cuMemPrefetchAsync cuMemAdvise cuMemcpyHtoDAsync
        cuMemcpyDtoHAsync cuMemcpyDtoDAsync cuMemsetD8Async cuDevicePrimaryCtxRetain cuStreamCreate cuEventCreate
        """,
}


def test_the_table_is_read() -> None:
    """The table has rows of three cells, with many calls and names."""
    assert len(ROWS) > 100
    assert all(len(row) == 3 for row in ROWS)
    assert len(CALLS) > 200


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name: str) -> None:
    """What the table offers in place of a call can be imported, and is documented."""
    found: object = remap
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert found.__doc__, name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_every_row_answers(row: list[str]) -> None:
    """A row names something of remap, or says that there is nothing and why."""
    assert "`remap." in row[1] or (row[1] == "none" and row[2]), row


@pytest.mark.parametrize("where", MATERIAL)
def test_every_call_of_the_material_is_in_the_table(where: str) -> None:
    """Each call that the founding material makes has its row (E1)."""
    assert set(MATERIAL[where].split()) <= CALLS


def test_every_call_of_remap_is_in_the_table() -> None:
    """Each CUDA function that the protocols of drivers name, or that the CUDA driver calls, has its row."""
    drivers = ROOT / "src" / "remap" / "drivers"
    protocols = [drivers / f"{name}.py" for name in ("protocol", "powers", "graph_powers", "multicast_power")]
    named = {call for path in protocols for call in re.findall(r"\b(cu[A-Z]\w+)", path.read_text())}
    called = {
        call
        for path in (drivers / "cuda").glob("*.py")
        for call in re.findall(r"\bcuda\.(cu[A-Z]\w+)", path.read_text())
    }
    assert len(named) > 90
    assert len(called) > 90
    assert not (named | called) - CALLS
