"""Symmetric buffers: all ranks' memory in one range, in agreement or not at all (B9; traps 31, 36, 37)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import remap
from remap import MiB
from remap.sharing.agreement import Agreement, _read
from remap.sharing.settling import _read as read_facts

from . import roles
from .support import run_ranks, values


@pytest.mark.parametrize("ranks", [1, 4])
def test_side_by_side(ranks: int) -> None:
    """Every rank sees every rank's memory, in order, in one range, and closing leaves nothing behind on any."""
    for rank, found in enumerate(values(run_ranks(ranks, roles.side_by_side))):
        size = found["size"][1]
        assert size >= 3 * MiB
        assert found["size"] == (ranks * size, size, size)
        assert found["by rank"] == [other + 1 for other in range(ranks)]
        assert all(found["whole"])
        assert found["addresses"] == [other * size for other in range(ranks)]
        assert found["chunks"] == [(other * size, size) for other in range(ranks)]
        assert (found["own"], found["footprint"], found["array"]) == (rank, size, 16)
        assert found["from neighbour"] == 100 + (rank - 1) % ranks
        assert found["copied across"] == 100 + rank
        assert found["left"] == ""


def test_in_one_process() -> None:
    """A program of one process uses the same code with an exchange of one rank."""
    with remap.SymmetricBuffer(remap.SingleExchange(), MiB) as sym:
        sym.local.fill(7)
        assert sym.to_host("uint8", 4).tolist() == [7] * 4
        assert (sym.ranks, sym.has_multicast) == (1, False)
        assert "rank 0 of 1" in repr(sym)


@pytest.mark.parametrize(
    ("by_rank", "words"),
    [
        ([{"size": MiB}, {"size": 2 * MiB}], ("size must be the same", "rank 0 has 1 MiB, rank 1 2 MiB")),
        ([{"multicast": None}, {}], ("multicast must be the same",)),
        ([{"handle": "posix_fd"}, {}], ("kind of handle must be the same",)),
        ([{}, {"size": 0}], ("rank 1 failed to say what it wants", "0 bytes")),
        ([{"size": -1}, {"size": -1}], ("rank 0 (and 1 more rank) failed",)),
        ([{}, {"size": "much"}], ("rank 1 failed", "it is not a size")),
        ([{"device": 99}, {}], ("rank 0 failed", "device 99")),
        ([{}, {"access": "none"}], ("rank 1 failed", 'access is "r" or "rw"')),
        ([{"handle": "win32"}, {"handle": "win32"}], ("rank 0 (and 1 more rank) failed", "win32")),
        ([{"size": 1 << 61}, {"size": 1 << 61}], ("rank 0",)),
    ],
)
def test_ranks_disagree(by_rank: list[dict[str, object]], words: tuple[str, ...]) -> None:
    """What does not fit on one rank is the same error on all, in which the rank and the reason are named."""
    found = values(run_ranks(2, roles.refused, by_rank))
    assert found[0] == found[1]
    story, left = found[0]
    assert left == ""
    assert story.startswith("a symmetric buffer over 2 ranks: ")
    for word in words:
        assert word in story


def test_no_fabric() -> None:
    """Where fabric handles are asked for and a rank has none, all say so, with the reason and with what to use."""
    if remap.device(0).capabilities["fabric"]:
        pytest.skip("there is a fabric here")
    found = values(run_ranks(2, roles.refused, [{"handle": "fabric"}] * 2))
    assert found[0] == found[1]
    assert remap.device(0).capabilities["fabric"].reason.rstrip(".") in found[0][0]
    assert "NCCL, UCX or MPI" in found[0][0]


def test_two_hosts(tmp_path: Path) -> None:
    """Ranks that cannot hand each other descriptors are told so, with their hosts and the engines that copy data."""
    if remap.device(0).capabilities["fabric"]:
        pytest.skip("there is a fabric here")
    # Two containers have directories of their own, which is what makes them strangers.
    directories = [{"TMPDIR": str(tmp_path / name)} for name in ("one", "two", "two")]
    for one in directories:
        Path(one["TMPDIR"]).mkdir(exist_ok=True)
    found = values(run_ranks(3, roles.asked_wrongly, environment=directories))
    assert len(set(found)) == 1
    assert "the ranks are on 2 of them (0; 1, 2)" in found[0]
    assert "NCCL, UCX or MPI" in found[0]


def test_others_read_only() -> None:
    """With access="r" nobody may write the others' memory, by the library's word and by the driver's, ever."""
    for rank, found in enumerate(values(run_ranks(2, roles.read_only))):
        assert found[:4] == [str(2 - rank), "AccessError", "AccessError", "InvalidValueError"]
        assert found[4:] == ["r", "rw", "r", "rw", "r", "r", "r", "rw"]


def test_no_life_of_its_own() -> None:
    """A rank's part cannot be closed by itself, the whole neither paused nor moved; after closing nothing is usable."""
    for found in values(run_ranks(2, roles.no_life_of_its_own)):
        kinds = [one.partition(":")[0] for one in found]
        assert kinds == [
            "InUseError",
            "InvalidValueError",
            "InvalidValueError",
            "InvalidValueError",
            "InvalidValueError",
            "NotSupportedError",
            "closed",
            "closed",
            "closed",
        ]
        assert "it was not asked for (multicast=True" in found[5]


def test_exported() -> None:
    """A rank exports its own memory to others; that of other ranks, which the driver exports no more, it refuses."""
    for rank, found in enumerate(values(run_ranks(2, roles.exported))):
        assert found == [7 + rank, True, True, True]


def test_closed_in_any_order() -> None:
    """A rank may close when it likes: the others read on; its memory is free when all have closed (traps 36, 37)."""
    assert values(run_ranks(3, roles.closed_in_any_order)) == [(10, True)] * 3


@pytest.mark.parametrize("multicast", [False, True])
def test_every_step_fails(multicast: bool) -> None:
    """Whatever call of the driver fails on whatever rank, all ranks raise the same error and keep nothing."""
    if multicast and not remap.device(0).capabilities["multicast"]:
        pytest.skip(remap.device(0).capabilities["multicast"].reason)
    found = values(run_ranks(3, roles.every_step_fails, multicast))
    for steps in zip(*found, strict=True):
        names, stories, left = zip(*steps, strict=True)
        assert len(set(names)) == 1
        assert left == ("", "", ""), names[0]
        assert len(set(stories)) == 1, names[0]
        rank = names[0].rpartition(" ")[2]
        assert f"rank {rank} failed to" in stories[0], names[0]
        assert "CUDA_ERROR_INVALID_HANDLE" in stories[0]


@pytest.mark.parametrize("step", [1, 3])
def test_a_rank_is_killed(step: int) -> None:
    """A rank killed at any step is an error on all others at once, long before the time limit."""
    outcomes = run_ranks(3, roles.killed, step, False)
    assert outcomes[1].died
    for one in (outcomes[0], outcomes[2]):
        story, took, left = one.value
        assert story
        assert took < 20
        assert left == ""


def test_a_rank_is_killed_in_a_team() -> None:
    """So is one killed while memory is bound to the multicast object; nobody waits for it for ever."""
    if not remap.device(0).capabilities["multicast"]:
        pytest.skip(remap.device(0).capabilities["multicast"].reason)
    outcomes = run_ranks(3, roles.killed, 6, True)
    assert outcomes[1].died
    assert all(one.value[0] and one.value[1] < 20 for one in (outcomes[0], outcomes[2]))


def test_a_rank_does_not_come() -> None:
    """A rank that never comes is an error on all others when the time limit of a step is over."""
    outcomes = run_ranks(3, roles.absent)
    for one in (outcomes[0], outcomes[2]):
        story, took = one.value
        assert story
        assert took < 10
    assert "within 0.5 s" in outcomes[0].value[0]


def test_kernels_take_it() -> None:
    """A kernel reads all ranks through the whole range, and writes through a part and an array of it."""
    assert values(run_ranks(2, roles.launched)) == [[1.0, 3.0], [2.0, 3.0]]


def test_an_interrupt_is_told_to_the_others() -> None:
    """A step that is interrupted raises what interrupted it, and has told the others."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Agreement(remap.SingleExchange(), "a thing", None).step("do it", interrupted)
    alone, absent = remap.ProcessExchange.group(2, timeout=0.05)
    with pytest.raises(KeyboardInterrupt) as caught:  # also where the others do not come to hear of it
        Agreement(alone, "a thing", None).step("do it", interrupted)
    assert "not every rank came" in str(caught.value.__cause__)
    absent.close()


@given(
    st.binary(max_size=200)
    | st.builds(
        lambda value: json.dumps(value).encode(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=9),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
            ),
            max_leaves=9,
        ),
    )
)
def test_what_others_say_is_hostile(data: bytes) -> None:
    """Whatever another rank sends in place of its facts, or of its story, is refused or read as text (invariant 11)."""
    with pytest.raises(remap.DescriptorError, match="rank 3"):
        read_facts(3, data)
    assert isinstance(_read(data), str)
