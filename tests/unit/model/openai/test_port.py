"""Who may have the port."""

from __future__ import annotations

import socket

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.openai import port as port_module
from triton_vllm.openai import start
from triton_vllm.openai.port import claim, is_loopback

HERE = "127.0.0.1"


@pytest.fixture
def port():
    """A port that was free a moment ago."""
    with socket.create_server((HERE, 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("others_share", [False, True])
def test_a_taken_port_is_named(port, others_share):
    """Also if both models would let others join them."""
    with claim(HERE, port, shared=others_share), pytest.raises(ConfigError, match=f"port {port} of {HERE} is taken"):
        claim(HERE, port, shared=others_share)


def test_the_instances_of_a_model_share_a_port(port):
    """The first one takes it, the others join it."""
    with claim(HERE, port, shared=True) as first, claim(HERE, port, shared=True, first=False) as second:
        assert first.getsockname() == second.getsockname()


@pytest.mark.parametrize("host_of_the_other", [HERE, "localhost", "0.0.0.0"])
def test_two_models_that_load_at_once_do_not_share_a_port(port, monkeypatch, host_of_the_other):
    """Both have several instances, and the second one tries while the first one has let the port go for a moment."""
    listen = port_module._listen
    refused: list[str] = []

    def meanwhile(host, number, *, shared):
        if shared and not refused:
            refused.append("")
            with pytest.raises(ConfigError, match="is taken, by another model") as raised:
                claim(host_of_the_other, number, shared=True)
            refused.append(str(raised.value))
        return listen(host, number, shared=shared)

    monkeypatch.setattr(port_module, "_listen", meanwhile)
    claim(HERE, port, shared=True).close()
    assert len(refused) == 2
    monkeypatch.undo()
    claim(HERE, port, shared=True).close()


@pytest.mark.parametrize("second_host", [HERE, "0.0.0.0"])
@pytest.mark.parametrize(("first", "second"), [(None, None), (None, True), (True, None), (True, True)])
def test_a_second_model_needs_another_port(monkeypatch, port, second_host, first, second):
    """Whether the models have one instance or several, and also if one of them has all addresses."""
    monkeypatch.setenv(start.KEY, "secret")
    with start.reserve(HERE, port, without_key=False, first=first).listen():
        with pytest.raises(ConfigError, match=f"OPENAI_PORT: port {port} of {second_host} is taken, by another model"):
            start.reserve(second_host, port, without_key=False, first=second)
        with socket.create_server((HERE, 0)) as free:
            other = free.getsockname()[1]
        start.reserve(second_host, other, without_key=False, first=second).listen().close()


def test_a_port_is_free_again(port):
    """A model that is loaded again finds its port, although a client's connection is still closing."""
    with claim(HERE, port) as listening:
        client = socket.create_connection((HERE, port))
        listening.accept()[0].close()
        client.close()
    claim(HERE, port).close()


def test_an_address_of_another_machine_is_named(port):
    """192.0.2.0/24 is for examples."""
    with pytest.raises(ConfigError, match=r"OPENAI_HOST: 192\.0\.2\.1"):
        claim("192.0.2.1", port)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("example.com", False)],
)
def test_loopback(host, expected):
    """Of a name other than localhost nobody knows where it will lead."""
    assert is_loopback(host) is expected


def test_other_machines_need_a_key(port, monkeypatch):
    """Unless the operator says that they do not."""
    monkeypatch.delenv(start.KEY, raising=False)
    with pytest.raises(ConfigError, match="VLLM_API_KEY"):
        start.reserve("0.0.0.0", port, without_key=False, first=None)
    start.reserve("0.0.0.0", port, without_key=True, first=None).listen().close()
    monkeypatch.setenv(start.KEY, "secret")
    start.reserve("0.0.0.0", port, without_key=False, first=None).listen().close()
