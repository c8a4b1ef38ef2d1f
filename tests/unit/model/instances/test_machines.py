"""The loss of another machine, seen by a real connection."""

from __future__ import annotations

import socket

import pytest

from support.patience import pause, wait_for
from triton_vllm.instances import machines
from triton_vllm.instances.machines import Machines, connected_to


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(machines, "_PERIOD_S", 0.02)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_machine_that_leaves_is_noticed(address):
    """Its connection ends. One that comes later changes nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as store:
        place = store.getsockname()[:2]
        watch = Machines(place[1])
        assert not watch.is_one_lost()
        stays, leaves = (socket.create_connection(place) for _ in range(2))
        accepted = [store.accept()[0] for _ in range(2)]
        watch.note()
        with socket.create_connection(place):
            pause(0.1)
        pause(0.1)
        assert len(connected_to(place[1])) == 2
        assert not watch.is_one_lost()
        leaves.close()
        wait_for(watch.is_one_lost, "the loss")
        watch.note()  # the next engine
        assert not watch.is_one_lost()
        for connection in (stays, *accepted):
            connection.close()
        wait_for(watch.is_one_lost, "the second loss")


def test_tables_that_cannot_be_read_say_nothing(monkeypatch, tmp_path):
    """A process with too many open files still serves."""
    (tmp_path / "tcp").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as store:
        watch = Machines(store.getsockname()[1])
        with socket.create_connection(store.getsockname()):
            watch.note()
            monkeypatch.setattr(machines, "_TABLES", (tmp_path / "tcp",))
            assert connected_to(1) is None
            pause(0.2)
            assert not watch.is_one_lost()
    watch.note()  # neither does it watch then
    pause(0.2)
    assert not watch.is_one_lost()


def test_without_ipv6(monkeypatch, tmp_path):
    """A table that is not there has no lines."""
    monkeypatch.setattr(machines, "_TABLES", (tmp_path / "tcp6",))
    assert connected_to(1) == set()
