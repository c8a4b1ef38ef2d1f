"""The corpus on the real server, beside a neighbour whose answer must not change."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hostile.corpus import ANSWER, ANY, CORPUS, Case
from support.memory import memory
from support.model_requests import ask, prompt
from support.open_stream import OpenStream
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.triton_client import get, post, stream, text_of
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, WORDS = FACTS[2]
NEIGHBOUR = prompt(PROMPT, {"temperature": 0, "max_tokens": 64}, exclude_input_in_output=True)
INTERNALS = ("Traceback", "NoneType", "object at 0x", ".py", "site-packages", "triton_vllm", "<class", "KeyError", "/root")
UNANSWERED = "Deadline Exceeded"
REPLY_SECONDS = 120.0
LONGEST_ERROR = 600  # ours and what Triton puts before it
MEMORY_MB = 200
MOST = 4  # requests in flight


def beside_neighbours(server: TritonServer, request: Any) -> list[str]:
    """Send a request between two neighbours; return its errors, once both have had their answer."""
    responses = stream(server.grpc_url, [NEIGHBOUR, request, NEIGHBOUR], timeout=REPLY_SECONDS)
    assert (text_of(responses, 0), text_of(responses, 2)) == (WORDS, WORDS)
    return [response.error for response in responses if response.error]


def check(server: TritonServer, case: Case) -> None:
    """Send a case; see that the outcome is the documented one."""
    errors = beside_neighbours(server, case.make())
    if case.expected == ANSWER or (case.expected == ANY and not errors):
        assert errors == []
        return
    (error,) = errors
    assert error.strip()
    assert case.expected == ANY or case.expected in error
    assert len(error) < LONGEST_ERROR
    assert not [word for word in (*INTERNALS, UNANSWERED) if word in error], error


@pytest.mark.parametrize("case", [c for c in CORPUS if not (c.refused_early or c.heavy)], ids=lambda case: case.name)
def test_what_only_vllm_can_refuse(server: TritonServer, case: Case) -> None:
    """It is answered or refused, and the neighbours do not notice."""
    check(server, case)


@pytest.mark.parametrize("part", range(8))
def test_what_admission_refuses(light_server: TritonServer, part: int) -> None:
    """An eighth of the corpus at once: each gets its own refusal, the neighbours their answer."""
    cases = [c for c in CORPUS if c.refused_early and not c.heavy][part::8]
    requests = [NEIGHBOUR, *(case.make() for case in cases), NEIGHBOUR]
    responses = stream(light_server.grpc_url, requests, timeout=REPLY_SECONDS)
    errors = [response.error for response in responses if response.error]
    assert (text_of(responses, 0), text_of(responses, len(requests) - 1)) == (WORDS, WORDS)
    assert [case.name for case in cases if not any(case.expected in error for error in errors)] == []
    assert len(errors) == len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CORPUS if c.heavy], ids=lambda case: case.name)
def test_what_is_large(light_server: TritonServer, case: Case) -> None:
    """Tens of megabytes are refused as quickly as they come."""
    check(light_server, case)


def test_sums_of_log_probabilities_are_json(server: TritonServer) -> None:
    """Asked for without `logprobs`, too: the answer had a bare NaN, which is no JSON."""
    body = {"text_input": PROMPT, "return_cumulative_logprob": True, "parameters": {"temperature": 0, "max_tokens": 8}}
    status, text = post(server.http_url, "/v2/models/vllm/generate", body, timeout=REPLY_SECONDS)
    assert status == 200
    assert "NaN" not in text
    assert json.loads(text)["cumulative_logprob"] < 0


def test_streamed_sums_of_several_answers_are_json(server: TritonServer) -> None:
    """One that has not begun when another has is the sum of no tokens; it was NaN."""
    parameters = {"temperature": 1.0, "seed": 1, "max_tokens": 4, "n": 3}
    body = {"text_input": PROMPT, "stream": True, "return_cumulative_logprob": True, "parameters": parameters}
    status, text = post(server.http_url, "/v2/models/vllm/generate_stream", body, timeout=REPLY_SECONDS)
    assert (status, text.count("NaN")) == (200, 0)
    assert len(json.loads(text.splitlines()[0].partition(":")[2])["cumulative_logprob"]) == 3


@pytest.mark.parametrize("token", [2**31 - 1, 2**31, 2**32 + 5, 2**62 + 2**31, 2**63 - 1, -1, -(2**63), 2**63, 2**64 + 5, 5.0])
def test_token_ids_in_json(light_server: TritonServer, token: float) -> None:
    """Refused by their number, or by Triton: it cut them to 32 bits, and 2^32 + 5 was served as 5."""
    body = {"prompt_token_ids": [token], "parameters": {"max_tokens": 2}}
    status, text = post(light_server.http_url, "/v2/models/vllm/generate", body, timeout=REPLY_SECONDS)
    assert status in (400, 500)
    assert "token id" in text or "Unable to parse 'data'" in text


def test_too_many_requests_are_unavailable_at_once(light_serving: Serve, light_long_arguments: dict[str, object]) -> None:
    """Those within the limit are worked on, the others told to come again, and taken once there is room."""
    arguments = {**light_long_arguments, "max_num_seqs": MOST}
    endless = {"max_tokens": 60_000, "ignore_eos": True, "temperature": 0}

    def prepare(model: Path) -> None:
        with (model / "config.pbtxt").open("a", encoding="utf-8") as config:
            config.write(f'\nparameters {{ key: "MAX_REQUESTS_IN_FLIGHT" value: {{ string_value: "{MOST}" }} }}\n')

    with light_serving(arguments, environment=ONE_THREAD, prepare=prepare) as server:
        with ExitStack() as stack:
            requests = [prompt("Once upon a time", endless, stream=True)] * MOST
            running = [stack.enter_context(OpenStream(server.grpc_url, one)) for one in requests]
            assert [one.wait(1)[0].error for one in running] == [""] * MOST
            responses = stream(server.grpc_url, [NEIGHBOUR] * 28, timeout=REPLY_SECONDS)
            errors = [response.error for response in responses if response.error]
            assert len(errors) == 28
            assert all(f"{MOST} requests are in flight, and no more are taken: try again later" in error for error in errors)
            assert not any(one.ended for one in running)
        wait_for(lambda: not ask(server, PROMPT).error, "an answer once the requests in flight were cancelled")
        assert ask(server, PROMPT, {"temperature": 0, "max_tokens": 64}, exclude_input_in_output=True).text == WORDS


@pytest.mark.slow
def test_the_whole_corpus_leaves_no_mark(serving: Serve) -> None:
    """Nobody dies, the server is ready, and no process holds 200 MB more than before."""
    with serving(environment=ONE_THREAD) as server:
        for case in CORPUS[::8]:  # what is made at the first use of each kind is made
            beside_neighbours(server, case.make())
        before = memory(server)
        for case in CORPUS:
            beside_neighbours(server, case.make())
        after = memory(server)
        assert after.keys() == before.keys()
        assert {pid: after[pid] - size for pid, size in before.items() if after[pid] - size > MEMORY_MB} == {}
        assert get(server.http_url, "/v2/health/ready")[0] == 200
