"""loadtest.triton: real gRPC to a server that echoes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
import pytest

from loadtest.endpoint import Endpoint
from loadtest.errors import ClientError, NoSuchModelError
from loadtest.loops import closed_loop
from loadtest.record import Outcome, Record, Request
from loadtest.triton import TritonClient
from support.grpc_echo import EchoServer
from support.patience import LIMIT
from vllm_env.serve.server import free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def request(index: int, prompt: str, *, stream: bool = False, **values: Any) -> Request:
    return Request(index, prompt, {"temperature": 0}, stream=stream, **values)


def ask(server: EchoServer, requests: Sequence[Request], *, places: int = 64, **values: Any) -> dict[int, Record]:
    """Send the requests and return their records by index."""
    done: list[Record] = []

    async def run() -> None:
        async with TritonClient(Endpoint(**{"url": server.url, "model": "vllm", "stream_timeout": 60.0} | values)) as client:
            names = {"messages" if each.is_chat else "text_input" for each in requests}
            await client.require_model([*names, *(["image"] if any(each.images for each in requests) else [])])
            await closed_loop([client] * places, ((each,) for each in requests), done.append)

    asyncio.run(run())
    return {record.request.index: record for record in done}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_record_is_that_of_its_prompt(streaming: bool) -> None:
    """Whoever is ready first; with the tokens that the server counted, and the reason of the end."""
    texts = ["slow", "é", ""]
    with EchoServer(delay=lambda number: 0.3 if number == 0 else 0.0) as server:
        found = ask(server, [request(number, text, stream=streaming) for number, text in enumerate(texts)])
        assert server.streamed == [streaming] * 3
    for number, text in enumerate(texts):
        answer = f" {number}: {text}"
        assert (found[number].outcome, found[number].completions) == (Outcome.ANSWERED, [answer])
        assert (found[number].input_tokens, found[number].output_tokens) == (len(text), len(answer))
        assert found[number].finish_reasons == ("stop",)
        assert len(found[number].times) == (len(answer) if streaming else 1)
        assert found[number].sent <= found[number].times[0] <= found[number].times[-1]


def test_a_request_says_what_it_asks_for() -> None:
    """Ids from the offset on, headers, parameters, a chat in the input of that name, and whether the prompt comes back."""
    chat = request(1, '[{"role": "user"}]', is_chat=True)
    with EchoServer() as server:
        found = ask(server, [request(0, "a"), chat], first_id=5, headers={"authorization": "me"}, places=1)
        first, second = server.requests
        assert all(headers["authorization"] == "me" for headers in server.metadata)
    assert found[0].text == " 5: a"
    assert json.loads(first["sampling_parameters"][4:]) == {"temperature": 0}
    assert "exclude_input_in_output" not in first
    assert "text_input" not in second
    assert json.loads(second["messages"][4:]) == [{"role": "user"}]


def test_a_request_is_given_up_after_its_pieces() -> None:
    """It is cancelled, and neither answered nor failed."""
    with EchoServer() as server:
        found = ask(server, [request(0, "x" * 5000, stream=True, cancel_after=3), request(1, "y", stream=True, cancel_after=999)])
    assert (found[0].outcome, len(found[0].times)) == (Outcome.CANCELLED, 3)
    assert found[1].outcome is Outcome.ANSWERED


@pytest.mark.parametrize("timeout", [1e-6, 1e-3])
@pytest.mark.parametrize("length", [1, 1 << 20])
def test_a_timeout_that_passes_while_the_request_is_sent_is_told_as_any_other(timeout: float, length: int) -> None:
    """gRPC itself has other words for it, which say nothing."""
    with EchoServer(delay=lambda _: 5.0) as server:
        found = ask(server, [request(number, "x" * length) for number in range(30)], stream_timeout=timeout)
    assert {record.reason for record in found.values()} == {f"no complete answer within {timeout} s (--stream-timeout)"}
    assert {record.failure for record in found.values()} == {"timeout"}
    assert len(found) == 30


def test_a_model_that_is_not_ready_is_named_before_anything_is_sent() -> None:
    """With what to do."""
    with EchoServer() as server:
        with pytest.raises(ClientError, match="has no model 'other', but vllm; name one of them with --model"):
            ask(server, [request(0, "x")], model="other")
        assert server.streamed == []


@pytest.mark.parametrize(
    ("asked", "lacking", "name"),
    [
        (request(0, "x"), ("text_input",), "text_input"),
        (request(0, "[]", is_chat=True), ("messages",), "messages"),
        (request(0, "x", images=("aa",)), (), "image"),
    ],
)
def test_an_input_that_the_model_lacks_is_named_before_anything_is_sent(asked: Request, lacking: Any, name: str) -> None:
    """With those that it has."""
    with EchoServer(lacking=lacking) as server:
        with pytest.raises(ClientError, match=rf"'vllm' has no input {name}, but .*stream"):
            ask(server, [asked])
        assert server.streamed == []


def test_a_model_that_is_not_described_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a server that ends at this moment."""

    def refuse(_: object, message: Any, context: Any) -> None:
        context.abort(grpc.StatusCode.INTERNAL, "on fire")

    monkeypatch.setattr(EchoServer, "ModelMetadata", refuse)
    with EchoServer() as server, pytest.raises(ClientError, match=r"does not describe the model 'vllm': .*on fire; see the"):
        ask(server, [request(0, "x")])


BOTH_ANSWERS = pytest.mark.parametrize("errors", [False, True], ids=["24.10", "26.07"])
"""What the two releases answer about a model that is not ready."""


def test_a_server_may_come_up_later() -> None:
    """Nothing listens when the client starts."""
    port = free_ports().grpc
    later = EchoServer(port=port)
    starter = threading.Timer(0.5, later.__enter__)
    starter.start()
    try:
        assert ask(later, [request(0, "x")], wait_ready=60.0, url=f"127.0.0.1:{port}")[0].outcome is Outcome.ANSWERED
    finally:
        starter.join()
        later.__exit__()


@BOTH_ANSWERS
@pytest.mark.parametrize(
    ("models", "reason"),
    [
        (["b", "a"], "has no model 'other', but a, b; name one of them with --model"),
        ([], "has no model 'other', and no other in its repository"),
    ],
)
def test_a_model_that_the_server_does_not_list_is_not_waited_for(models: list[str], reason: str, errors: bool) -> None:
    """The others are named."""
    began = time.monotonic()
    with EchoServer(models=models, errors=errors) as server, pytest.raises(NoSuchModelError, match=reason):
        ask(server, [request(0, "x")], model="other", wait_ready=600.0)
    assert time.monotonic() - began < LIMIT


@BOTH_ANSWERS
def test_a_server_that_may_not_list_its_models_is_waited_for(errors: bool) -> None:
    """It may have the model (--grpc-restricted-protocol)."""
    with EchoServer(models=None, unready=2, errors=errors) as server:
        assert ask(server, [request(0, "x")], wait_ready=60.0)[0].outcome is Outcome.ANSWERED
    with (
        EchoServer(models=None, errors=errors) as server,
        pytest.raises(ClientError, match=r"has no model 'other' ready.*; wait for it to load"),
    ):
        ask(server, [request(0, "x")], model="other", wait_ready=0.5)


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """docker sets http_proxy in every container, and a proxy knows nothing of the server beside the client."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    with EchoServer() as server:
        assert ask(server, [request(0, "x")])[0].text == " 0: x"


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key and a certificate for this machine, which signs itself."""
    folder = tmp_path_factory.mktemp("identity")
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test", "-days", "2"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run([*argv, *names], cwd=folder, check=True, capture_output=True)
    return folder


def test_tls_with_a_certificate_of_ones_own(identity: Path) -> None:
    """Whoever knows the certificate is answered; without it, or without TLS, no server is found."""
    certificate = identity / "certificate.pem"
    credentials = grpc.ssl_server_credentials([((identity / "key.pem").read_bytes(), certificate.read_bytes())])
    with EchoServer(credentials=credentials) as server:
        tls = {"ssl": True, "root_certificates": str(certificate)}
        assert ask(server, [request(0, "x")], tls=tls)[0].text == " 0: x"
        for wrong in ({"ssl": True}, {"ssl": False}):
            with pytest.raises(ClientError, match="no Triton server answers at"):
                ask(server, [request(0, "x")], tls=wrong)
