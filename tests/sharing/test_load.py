"""The broker under load: many clients, many cycles, restarts in between, and nothing left of it all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import remap
from remap import MiB
from remap.sharing.channel import Fds
from remap.sharing.sockets import connect as connect_channel
from remap.testing.bench import wait_until

from . import roles
from .support import BrokerProcess, Child, ServiceManager
from .test_channel import soon

SIZE = 4 * MiB
CLIENTS, CYCLES = 64, 10_000


def memory_of(process: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_many_clients_and_cycles(broker: BrokerProcess, nothing_left: None) -> None:
    """64 clients open and close a buffer 10,000 times in all: no descriptor, memory or lock is left at either end."""
    del nothing_left
    with remap.connect(broker.path) as client:
        client.create("a", SIZE, resident=0).close()
        for _ in range(200):  # what is set up once is no leak
            client.open("a").close()
        fds, memory = broker.fds(), memory_of(broker.process.pid)
        share = CLIENTS // 4
        children = [
            Child(roles.many_clients, str(broker.path), "a", share, CYCLES // CLIENTS + 1) for _ in range(4)
        ]
        try:
            assert [child.hear() for child in children] == [0] * 4
        finally:
            for child in children:
                child.end()
        assert wait_until(lambda: broker.fds() == fds)
        (entry,) = client.list()
        assert entry.open == 0
        client.open("a", access="rw").close()
        assert client.status().requests > 2 * CYCLES
        assert memory_of(broker.process.pid) - memory < 8 * MiB
        client.drop("a")


def test_restarts_under_load(tmp_path: Path) -> None:
    """Clients that open and close all the time see none of the restarts of a broker whose buffers are kept."""
    with ServiceManager(tmp_path / "notify") as manager:
        broker = manager.run(tmp_path / "broker")
        try:
            with remap.connect(broker.path) as client:
                client.create("a", SIZE, resident=0, poison=True).close()
                children = [Child(roles.cycle, str(broker.path), "a", 1000) for _ in range(3)]
                for child in children:
                    assert child.hear() == "connected"
                    child.tell("go")
                for _ in range(5):
                    asked = client.status().requests
                    assert wait_until(lambda asked=asked: client.status().requests > asked + 200)  # type: ignore[misc]
                    broker.kill()
                    broker = manager.run(tmp_path / "broker")
                for child in children:
                    assert child.hear() == "done"
                    child.end()
                with client.open("a", access="rw", wait=30) as buffer:
                    assert (buffer.to_host() == 0xCB).all()
        finally:
            broker.kill()


@pytest.fixture(name="shared_broker", scope="module")
def _shared_broker(tmp_path_factory: pytest.TempPathFactory) -> object:
    with BrokerProcess(tmp_path_factory.mktemp("fuzz") / "broker") as broker:
        yield broker


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        ["op", "name", "access", "timeout", "lease", "hold", "force", "after", "identity", "version"]
    ),
    st.sampled_from(
        [
            "hello",
            "create",
            "open",
            "claim",
            "release",
            "drop",
            "wait",
            "list",
            "status",
            "a",
            "r",
            "rw",
            True,
            1,
            0.01,
        ]
    )
    | JSON,
)


def _message(fields: dict[str, object]) -> bytes:
    """Return a packet that is whole, with fields that mean what they will."""
    return bytes(4) + json.dumps(fields).encode() + b"\0"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.binary(max_size=80) | st.builds(_message, FIELDS),
            st.integers(0, 3),
        ),
        max_size=4,
    )
)
def test_random_messages(shared_broker: BrokerProcess, messages: list[tuple[bytes, int]]) -> None:
    """Whatever is sent, with whatever descriptors, the broker answers or hangs up, and goes on (invariant 11)."""
    with connect_channel(shared_broker.path, deadline=soon()) as channel:
        try:
            for data, count in messages:
                with Fds([os.memfd_create("x") for _ in range(count)]) as fds:
                    channel.send_packet(data, fds.numbers, deadline=soon())
        except OSError:
            pass
    with remap.connect(shared_broker.path) as client:
        assert client.status().clients >= 1


def test_nothing_is_left_of_the_fuzzing(shared_broker: BrokerProcess) -> None:
    """After all that, the broker has its own descriptors and no client."""
    with remap.connect(shared_broker.path) as client:
        assert wait_until(lambda: client.status().clients == 1)
        assert client.list() == ()
        assert wait_until(lambda: shared_broker.fds() < 16), shared_broker.fds()
    assert shared_broker.stop() == (0, "")
