"""The loss of another machine, seen by a real connection."""

from __future__ import annotations

import socket

import pytest

from triton_vllm.instances import machines
from triton_vllm.instances.machines import Machines, connected_to


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(machines, "_PERIOD_S", 0.0)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_machine_that_leaves_is_noticed(family):
    """Its connection ends. One that comes later changes nothing."""
    with socket.create_server(("localhost" if family == socket.AF_INET else "::1", 0), family=family) as store:
        address = store.getsockname()[:2]
        watch = Machines(address[1])
        assert not watch.is_one_lost()
        with socket.create_connection(address) as stays, socket.create_connection(address) as leaves:
            accepted = [store.accept()[0] for _ in range(2)]
            watch.note()
            assert len(connected_to(address[1])) == 2
            assert not watch.is_one_lost()
            with socket.create_connection(address):
                assert not watch.is_one_lost()
            assert not watch.is_one_lost()
            leaves.close()
            assert watch.is_one_lost()
            assert stays.fileno() >= 0
        for connection in accepted:
            connection.close()


def test_the_kernel_is_asked_now_and_then(monkeypatch):
    """Not at each look, which comes twice a second."""
    monkeypatch.setattr(machines, "_PERIOD_S", 600.0)
    with socket.create_server(("localhost", 0)) as store:
        address = store.getsockname()
        watch = Machines(address[1])
        with socket.create_connection(address):
            watch.note()
            assert not watch.is_one_lost()
        assert not watch.is_one_lost()


def test_without_the_kernels_table(monkeypatch, tmp_path):
    """Then nobody is known, and none is lost."""
    monkeypatch.setattr(machines, "_TABLES", (tmp_path / "tcp",))
    watch = Machines(1)
    watch.note()
    assert not watch.is_one_lost()
