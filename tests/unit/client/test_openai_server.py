"""loadtest.openai: how a server is reached, with which headers, and what is said if it cannot be used."""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import client as command
from loadtest.errors import ClientError
from loadtest.record import Outcome
from support.client_run import run
from support.grpc_echo import EchoServer
from support.openai_ask import ask, request
from support.openai_echo import OpenAIEcho
from support.patience import pause
from vllm_env.serve.server import free_ports

if TYPE_CHECKING:
    from pathlib import Path

KEY = "very-secret"


@pytest.mark.parametrize(
    ("models", "values", "reason"),
    [
        (None, {"model": "other"}, r"has no model 'other', but echo, adapter; name one of them with --model"),
        ({"data": []}, {}, r"lists no model; wait for it to load \(--wait-ready 300\)"),
        ([1], {}, r"does not list its models under /v1/models; name vLLM's server"),
        ({"data": [{"id": 1}]}, {"model": "echo"}, r"does not list its models under /v1/models; name vLLM's server"),
        (None, {"key": "secret"}, r"answers /v1/models with status 401: Unauthorized; .*--header"),
    ],
)
def test_what_is_wrong_with_a_server_is_said_before_anything_is_sent(models: Any, values: dict[str, str], reason: str) -> None:
    """With what to do."""
    with OpenAIEcho(key=values.pop("key", "")) as server:
        server.models = models or server.models
        with pytest.raises(ClientError, match=reason):
            ask(server, [request(0, "x")], **values)
        assert server.asked == []


def test_a_redirect_gets_no_headers() -> None:
    """They may have a secret, and the other server may be anybody's."""
    with OpenAIEcho() as other, OpenAIEcho(moved=f"http://{other.url}/v1/models") as server:
        with pytest.raises(ClientError, match=rf"redirects /v1/models to http://{other.url}/v1/models; name the"):
            ask(server, [request(0, "x")], headers={"authorization": "secret"})
        assert not other.connections


@pytest.mark.parametrize(
    ("key", "flags", "status"), [(KEY, [], 0), ("wrong", [], 1), ("wrong", ["--header", f"authorization=Bearer {KEY}"], 0)]
)
def test_the_key_may_be_in_the_environment(
    key: str, flags: list[str], status: int, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its usual name; a header on the command line replaces it. It is in nothing that the client prints or writes."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with OpenAIEcho(key=f"Bearer {KEY}") as server:
        done = run("--backend", "openai", "-u", server.url, *flags, "--report", "r.json", cwd=tmp_path)
    assert done.returncode == status, done.stderr
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    for secret in (key, KEY):
        assert secret not in done.stdout + done.stderr + written
    assert ("give its key in OPENAI_API_KEY" in done.stderr) == bool(status)


@pytest.mark.parametrize("late", ["server", "model"])
def test_a_server_that_is_still_loading_is_waited_for(late: str) -> None:
    """Whether it does not answer yet, or does not list a model yet."""
    server = OpenAIEcho(port=free_ports().http)
    models = server.models
    if late == "model":
        server.models = {"data": []}
        server.__enter__()

    def load() -> None:
        pause(1.0)
        server.models = models
        if late == "server":
            server.__enter__()

    loading = threading.Thread(target=load)
    loading.start()
    try:
        place = {"url": f"127.0.0.1:{server.port}", "model": "echo"}
        assert ask(server, [request(0, "x")], wait_ready=60.0, **place)[0].outcome is Outcome.ANSWERED
    finally:
        loading.join()
        server.__exit__()


def test_a_port_that_speaks_something_else_is_no_server() -> None:
    """Such as Triton's gRPC."""
    with EchoServer() as server, pytest.raises(ClientError, match=r"no OpenAI server answers at .*8000 by default"):
        ask(OpenAIEcho(), [request(0, "x")], url=server.url)


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    """Whoever knows the certificate is answered; without it, or without TLS, no server is found."""
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test", "-days", "2"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run([*argv, *names], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    with OpenAIEcho(tls=context) as server:
        tls = {"ssl": True, "root_certificates": str(tmp_path / "certificate.pem")}
        assert ask(server, [request(0, "x")], tls=tls)[0].text == " 0: x"
        for wrong in ({"ssl": True}, {"ssl": False}):
            with pytest.raises(ClientError, match="no OpenAI server answers at"):
                ask(server, [request(0, "x")], tls=wrong)
        with pytest.raises(ClientError, match="cannot read the certificates: No such file"):
            ask(server, [request(0, "x")], tls={"ssl": True, "root_certificates": str(tmp_path / "none.pem")})


def test_without_aiohttp_its_name_and_the_remedy_are_said(
    prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, as for a wrong flag. Nobody else needs it."""
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "loadtest.openai")
    assert command.main(["--backend", "openai", "--input-prompts", str(prompts)]) == 2
    error = capsys.readouterr().err
    assert "cannot import aiohttp" in error
    assert error.endswith("-m pip install aiohttp\n")
    assert command.main(["-u", "127.0.0.1:1", "--input-prompts", str(prompts), "--results-file", "/dev/null"]) == 1
