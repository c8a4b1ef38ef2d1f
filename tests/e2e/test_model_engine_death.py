"""Processes of the model are killed: who is told, what comes back by itself, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil
import pytest

from support.clock import now
from support.event_stream import EventStream
from support.kill import kill_at_rest
from support.leftovers import name_of
from support.model_requests import ask, prompt
from support.models import LONG_POSITIONS
from support.open_stream import OpenStream
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.settings import openai_url, with_openai, with_parameter
from support.triton_client import generate, get, post
from vllm_env.serve.processes import is_alive
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("long_server")]
PROMPT, ANSWER = FACTS[2]
LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
TEXT = "/v1/completions"  # of the OpenAI API
# with the status UNAVAILABLE; test_model_errors.py sees how statuses come out
DEAD = "Model is unavailable due to unhealthy vLLM engine"
BACK_SECONDS = 300.0  # until an engine that comes back is given up
BACK = "the engine is back"  # the model's line in the log


@pytest.fixture(scope="module")
def doomed(
    request: pytest.FixtureRequest, serving: Serve, long_arguments: dict[str, object], executor: str
) -> Iterator[TritonServer]:
    """A server whose engine these tests break."""
    if executor == "chosen":
        yield request.getfixturevalue("long_server")
        return

    def prepare(model: Path) -> None:  # as that of long_server
        with_openai(model)
        with_parameter(model, "ENGINE_TIMEOUT_SECONDS", "20")

    engine = {**long_arguments, "distributed_executor_backend": executor}
    with serving(engine, environment=ONE_THREAD, prepare=prepare) as running:
        yield running


def below(server: TritonServer) -> list[psutil.Process]:
    """Returns the server's living descendants."""
    return [process for process in psutil.Process(server.pid).children(recursive=True) if is_alive(process)]


def engine_parts(server: TritonServer, name: str = "VLLM::") -> list[psutil.Process]:
    """Returns the processes of vLLM, or those whose name begins so (`VLLM::EngineCor` is how the kernel has it)."""
    return [process for process in below(server) if name_of(process).startswith(name)]


def times_back(server: TritonServer) -> int:
    """Return how often the model has logged that its engine works again."""
    return server.log.read_text(errors="replace").count(BACK)


def openai_request(**more: object) -> dict[str, object]:
    """Return the body of a request for a long answer from the OpenAI API."""
    return {"model": "vllm", "prompt": PROMPT, **LONG, **more}


# few cores: the worker is a part of EngineCore; else, and with "mp", a process of its own
_SEPARATE = pytest.param("mp", "VLLM::Worker", marks=pytest.mark.slow)


@pytest.mark.parametrize(("executor", "victim"), [("chosen", "VLLM::EngineCor"), _SEPARATE], scope="module")
def test_killed_engine_is_told_to_all_and_comes_back(doomed: TritonServer, victim: str) -> None:
    """Running, waiting and whole requests are told at once, not when the engine is there again, which it is by itself."""
    (process,) = engine_parts(doomed, victim)
    before = times_back(doomed)
    with ExitStack() as stack:
        requests = [prompt(PROMPT, LONG, stream=number % 2 == 0) for number in range(6)]
        streams = [stack.enter_context(OpenStream(doomed.grpc_url, requests[0]))]
        streams[0].wait(3)  # alone: two that overtook it would have both slots, for minutes where other work runs
        openai = stack.enter_context(EventStream(openai_url(doomed), TEXT, openai_request(stream=True)))
        openai.wait(1)
        streams += [stack.enter_context(OpenStream(doomed.grpc_url, one)) for one in requests[1:]]
        streams[0].wait(len(streams[0].events) + 100)  # in which the others arrive
        os.kill(process.pid, signal.SIGKILL)
        ends = [stream.wait_end(BACK_SECONDS) for stream in streams]
        told = openai.error()
    assert times_back(doomed) == before
    assert {end.error for end in ends} == {DEAD}
    assert DEAD in told or "EngineCore" in told
    _refuses_at_once(doomed)
    assert times_back(doomed) == before
    wait_for(lambda: _is_served(doomed), "an answer", longest_pause=0.5)
    wait_for(lambda: times_back(doomed) == before + 1, "the log's line")
    assert ask(doomed, PROMPT, {"temperature": 0}).text == PROMPT + ANSWER
    status, text = post(openai_url(doomed), TEXT, openai_request(max_tokens=16, ignore_eos=False), timeout=300)
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, ANSWER)


def _refuses_at_once(server: TritonServer) -> None:
    with OpenStream(server.grpc_url, prompt(PROMPT)) as refused:
        end = refused.wait_end(BACK_SECONDS)
    assert end.error == DEAD
    url = openai_url(server)
    assert [get(url, "/health")[0], post(url, TEXT, openai_request(), timeout=60)[0]] == [503, 503]


def _is_served(server: TritonServer) -> bool:
    return generate(server.http_url, {"text_input": PROMPT, "max_tokens": 1})[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["chosen"], scope="module")
def test_hung_engine_is_told_to_all_and_comes_back(doomed: TritonServer) -> None:
    """A process that stands still is none that has died: vLLM calls it healthy for ever."""
    (process,) = engine_parts(doomed, "VLLM::EngineCor")
    before = times_back(doomed)
    with ExitStack() as stack:
        openai = stack.enter_context(EventStream(openai_url(doomed), TEXT, openai_request(stream=True)))
        openai.wait(1)
        streams = [stack.enter_context(OpenStream(doomed.grpc_url, prompt(PROMPT, LONG, stream=True))) for _ in range(4)]
        wait_for(lambda: any(stream.events for stream in streams), "the first token")
        process.suspend()
        ends = [stream.wait_end(BACK_SECONDS) for stream in streams]
        told = openai.error()
    assert {end.error for end in ends} == {DEAD}
    assert DEAD in told
    wait_for(lambda: _is_served(doomed), "an answer", longest_pause=0.5)
    wait_for(lambda: times_back(doomed) == before + 1, "the log's line")
    assert not is_alive(process)


@pytest.mark.slow
@pytest.mark.parametrize("own", ["uni", "mp"])
def test_an_engine_that_does_nothing_is_replaced_without_a_limit_of_the_operator(
    serving: Serve, long_arguments: dict[str, object], own: str
) -> None:
    """After about 60 s, not 300; a worker of its own that polls for the stopped engine does not count as work."""
    engine = {**long_arguments, "distributed_executor_backend": own}
    with serving(engine, environment=ONE_THREAD) as server:
        (process,) = engine_parts(server, "VLLM::EngineCor")
        with OpenStream(server.grpc_url, prompt(PROMPT, LONG, stream=True)) as stream:
            stream.wait(1)
            process.suspend()
            began = now()
            assert stream.wait_end(BACK_SECONDS).error == DEAD
        told = now() - began
        (seconds,) = re.findall(r"the engine does not answer for (\d+) s", server.log.read_text(errors="replace"))
        assert 60 <= int(seconds) < 300
        wait_for(lambda: _is_served(server), "an answer", longest_pause=0.5)
        print(f"{own}: told after {told:.0f} s, served again {now() - began - told:.0f} s later")


A_MINUTE = 60.0
PATIENT = {"timeout": 900.0}


@pytest.mark.slow
def test_a_prefill_of_more_than_a_minute_is_not_ended(serving: Serve, long_arguments: dict[str, object]) -> None:
    """In one step, in which EngineCore answers nothing."""
    # with random weights, and so many layers that the longest prefill takes a minute on a fast machine, too
    layers = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 12}}
    whole = {"max_num_batched_tokens": LONG_POSITIONS, "enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 30}
    engine = {**long_arguments, **layers, **whole}
    with serving(engine, environment=ONE_THREAD) as server:
        seconds, length = 0.0, 4096
        while seconds < A_MINUTE and length < LONG_POSITIONS - 1:
            # its time grows with the square of the length; after 300 s the engine would be replaced
            growth = (1.6 * A_MINUTE / max(seconds, 1.0)) ** 0.5
            length = min(LONG_POSITIONS - 1, int(length * min(4.0, growth)))
            began = now()
            assert not ask(server, None, {"max_tokens": 1}, options=PATIENT, prompt_token_ids=[7] * length).error
            seconds = now() - began
            print(f"a prefill of {length} tokens took {seconds:.0f} s")
        assert "does not answer" not in server.log.read_text(errors="replace")
        assert times_back(server) == 0
    if seconds < A_MINUTE:
        pytest.skip(f"the longest prefill takes {seconds:.0f} s on this machine")


# as in support/compiling.py, which imports vLLM and so cannot be imported here
COMPILING_PROCESSOR = "compiling:Compiling"
COMPILING_SECONDS = 120
COMPILING_SEED = 7


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_a_compilation_of_two_minutes_is_not_ended(
    serving: Serve, long_arguments: dict[str, object], pytestconfig: pytest.Config
) -> None:
    """EngineCore waits for a compiler that it started; only the compiler uses the processor."""

    def prepare(model: Path) -> None:
        shutil.copy(pytestconfig.rootpath / "tests/support/compiling.py", model / "1")

    engine = {**long_arguments, "logits_processors": [COMPILING_PROCESSOR]}
    with serving(engine, environment=ONE_THREAD, prepare=prepare) as server:
        began = now()
        end = ask(server, PROMPT, {"temperature": 0, "seed": COMPILING_SEED}, options=PATIENT)
        seconds = now() - began
        print(f"an answer after {seconds:.0f} s")
        assert (end.error, end.text) == ("", PROMPT + ANSWER)
        assert seconds > COMPILING_SECONDS
        assert "does not answer" not in server.log.read_text(errors="replace")
        assert times_back(server) == 0


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["mp"], scope="module")
def test_killed_stub_takes_a_separate_worker_along(doomed: TritonServer) -> None:
    """vLLM's processes do not outlive the process that owns them; test_model_first_start.py kills the usual two."""
    parts = engine_parts(doomed)
    assert len(parts) == 2, parts
    (stub,) = [process for process in below(doomed) if name_of(process).startswith("triton_python_b")]
    kill_at_rest(stub.pid)
    wait_for(lambda: not any(is_alive(process) for process in parts), "the end of the engine")
