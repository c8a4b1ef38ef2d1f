"""client/triton_stream.py: real gRPC to a server that echoes."""

from __future__ import annotations

import asyncio

import pytest

import triton_stream
from prompt_file import Answer, ClientError, Prompt
from support.grpc_echo import EchoServer
from triton_stream import Session, ask_all


def _ask(
    server: EchoServer, prompts: list[Prompt], *, model: str = "vllm", streaming: bool = False, timeout: float = 60.0
) -> tuple[list[Answer], int]:
    session = Session(server.url, model, streaming, timeout, {"temperature": 0})
    answered: list[None] = []
    answers = asyncio.run(ask_all(session, prompts, lambda: answered.append(None)))
    return answers, len(answered)


@pytest.mark.parametrize("streaming", [False, True])
def test_answers_are_in_the_order_of_the_prompts(streaming: bool) -> None:
    """Whoever is ready first; each answer was told once."""
    prompts = [Prompt(0, "slow"), Prompt(1, "é"), Prompt(2, "")]
    with EchoServer(delay=lambda number: 0.3 if number == 0 else 0.0) as server:
        answers, told = _ask(server, prompts, streaming=streaming)
        assert server.streamed == [streaming] * 3
    assert [answer.text for answer in answers] == [" 0: slow", " 1: é", " 2: "]
    assert told == 3


def test_an_error_is_that_of_its_prompt() -> None:
    """The others have their answers."""
    with EchoServer() as server:
        answers, told = _ask(server, [Prompt(0, "a"), Prompt(1, "fail"), Prompt(2, "c")])
    assert [answer.error for answer in answers] == ["", "told to fail", ""]
    assert told == 3


@pytest.mark.parametrize("timeout", [1e-6, 1e-4, 1e-3, 3e-3])
@pytest.mark.parametrize("length", [1, 1 << 20])
def test_a_timeout_that_passes_while_the_request_is_sent_is_told_as_any_other(timeout: float, length: int) -> None:
    """gRPC itself has other words for it, which say nothing."""
    with EchoServer(delay=lambda _: 5.0) as server:
        answers, told = _ask(server, [Prompt(number, "x" * length) for number in range(30)], timeout=timeout)
    assert {answer.error for answer in answers} == {f"no complete answer within {timeout} s (--stream-timeout)"}
    assert told == 30


def test_no_more_are_in_flight_than_the_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest waits here, with its own timeout not yet begun."""
    monkeypatch.setattr(triton_stream, "MAX_IN_FLIGHT", 1)
    begun: list[int] = []

    def delay(number: int) -> float:
        begun.append(number)
        return 0.0

    with EchoServer(delay) as server:
        _ask(server, [Prompt(number, "x") for number in range(5)])
    assert begun == [0, 1, 2, 3, 4]


def test_a_model_that_is_not_ready_is_named_before_anything_is_sent() -> None:
    """With what to do."""
    with EchoServer() as server:
        with pytest.raises(ClientError, match=r"has no model 'other' ready; .*--model"):
            _ask(server, [Prompt(0, "x")], model="other")
        assert server.streamed == []


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """docker sets http_proxy in every container, and a proxy knows nothing of the server beside the client."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    with EchoServer() as server:
        answers, _ = _ask(server, [Prompt(0, "x")])
    assert [answer.text for answer in answers] == [" 0: x"]
