"""Norms and gathering over multicast memory, by 1 to 8 ranks; and the kernels that do it on GPUs (B6)."""

from __future__ import annotations

import re

import pytest

import remap
from remap.collectives.multicast import PARAMETERS, SOURCE, check_architecture
from remap.collectives.twins import TWINS
from remap.errors import CompileError, NotSupportedError
from remap.kernels import nvrtc
from remap.kernels.compile import compile as compile_source

from ..symmetric.support import run_ranks, values
from . import roles

needs_multicast = pytest.mark.skipif(
    "not __import__('remap').device(0).capabilities['multicast']", reason="multicast is off here"
)
needs_compiler = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")


@needs_multicast
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_rounds(ranks: int) -> None:
    """Every rank has the same norm and the same parts in each round, however far ahead others are."""
    assert values(run_ranks(ranks, roles.rounds, 0, True)) == [[]] * ranks


@needs_multicast
@pytest.mark.parametrize("ranks", [3])
def test_the_counter_wraps_around(ranks: int) -> None:
    """No round is taken for another where the counter of arrivals passes 2**32."""
    first = (1 << 32) // ranks - roles.ROUNDS
    assert values(run_ranks(ranks, roles.rounds, first, True)) == [[]] * ranks


@needs_multicast
def test_a_rank_does_not_come() -> None:
    """A round that a rank does not come to ends by its time limit, and breaks the collectives for good."""
    found = values(run_ranks(2, roles.alone))
    assert len(found[0]) == 3
    assert all("not every rank came to one of its meetings within 0.2 s" in one for one in found[0])


@needs_multicast
def test_asked_wrongly() -> None:
    """Too much to gather and other types are refused before anything is launched; nothing at all is fine."""
    for found in values(run_ranks(2, roles.asked_wrongly)):
        assert "there is room for 1 KiB" in found[0]
        assert "float32" in found[1]
        assert found[2:] == ["(2, 0)", "0.0"]


@needs_multicast
def test_one_rank_without() -> None:
    """Where one rank has no multicast, all ranks say so, and whose it is."""
    if remap.driver().name != "host":
        pytest.skip("only the host driver can be opened without the capability")
    found = values(run_ranks(2, roles.one_without))
    assert found[0] == found[1]
    assert "rank 1 failed to find what multicast needs: NotSupportedError: multicast on device 0" in found[0]


@needs_compiler
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_the_compiled_code(architecture: str) -> None:
    """The kernels compile, and their PTX has the instructions with the orders that the algorithm needs."""
    compiled = nvrtc.run(SOURCE.read_text(), SOURCE.name, [f"--gpu-architecture={architecture}"])
    assert compiled.cubin
    bodies = dict(re.findall(r"\.entry (\w+)\(.*?\)\s*\{(.*?)\n\}", compiled.ptx.decode(), re.DOTALL))
    assert bodies.keys() == PARAMETERS.keys()
    arrive = r"fence\.proxy\.alias;.*multimem\.red\.release\.sys\.global\.add\.u32.*fence\.proxy\.alias;"
    wait = r".*ld\.acquire\.sys\.global\.u32.*fence\.proxy\.alias;"
    assert re.search(arrive + wait, bodies["meet"], re.DOTALL)
    reduce = r".*multimem\.ld_reduce\.relaxed\.sys\.global\.add\.f32"
    assert re.search(arrive + wait + reduce, bodies["reduce_norm"], re.DOTALL)
    store = r"multimem\.st\.relaxed\.sys\.global\.f32.*fence\.proxy\.alias;"
    assert re.search(store, bodies["store_all"], re.DOTALL)
    assert "multimem" not in bodies["add_squares"]


@needs_compiler
def test_the_parameters() -> None:
    """The parameters that the host driver checks are those that the compiled kernels have, and every one has a twin."""
    image = compile_source(SOURCE.read_text(), arch="sm_90")
    entries = {entry.name: entry.parameters for entry in image.entries or ()}
    assert entries.keys() == PARAMETERS.keys() == TWINS.keys()
    for name, types in PARAMETERS.items():
        found = entries[name]
        assert found is not None
        assert [one.size for one in found] == [8 if one in {"pointer", "uint64"} else 4 for one in types]


@needs_compiler
def test_older_code() -> None:
    """Below sm_90 the source does not compile, and says why."""
    with pytest.raises(CompileError, match="multimem instructions need sm_90 or newer"):
        compile_source(SOURCE.read_text(), arch="sm_80")


def test_older_devices() -> None:
    """A device below sm_90 is refused by name, before anything is made."""
    with pytest.raises(NotSupportedError, match=r"device 3: multimem instructions need sm_90 .* it is sm_89"):
        check_architecture((8, 9), "device 3")
    for fitting in ((9, 0), (10, 0), (12, 1)):
        check_architecture(fitting, "device 3")
