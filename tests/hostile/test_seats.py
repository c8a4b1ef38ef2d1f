"""One request for many completions, or with many prompts, leaves seats in the engine for others."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import models
from support.clock import now
from support.instances import with_instances
from support.model_requests import ask
from support.neighbours import REPLY_SECONDS, neighbours
from support.settings import openai_url, with_openai
from support.slowness import slowness_now
from support.triton_client import post

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.serving import Parts, Serve
    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PROMPT = "The capital of France is"
MANY = {"max_tokens": 1000, "ignore_eos": True, "temperature": 1.0}
LONGEST_SECONDS = 1.0  # on a machine without other work; with every seat taken it was 18 s
SEATS = 128  # vLLM's own number on a CPU
TRIES = 3


def through_triton(server: TritonServer, n: int) -> str:
    """Ask for ``n`` completions; return the error."""
    return ask(server, PROMPT, {**MANY, "n": n}).error


def through_the_port(server: TritonServer, n: int) -> str:
    """Ask for ``n`` completions; return the error."""
    body = {"model": "vllm", "prompt": PROMPT, **MANY, "n": n}
    status, text = post(openai_url(server), "/v1/completions", body, timeout=REPLY_SECONDS)
    return "" if status == 200 else text


def a_list(server: TritonServer, prompts: int) -> str:
    """Ask for so many prompts; return the error."""
    body = {"model": "vllm", "prompt": [PROMPT] * prompts, **MANY}
    status, text = post(openai_url(server), "/v1/completions", body, timeout=REPLY_SECONDS)
    if status == 200:
        assert len(json.loads(text)["choices"]) == prompts
    return "" if status == 200 else text


@pytest.mark.parametrize("count", [1, 2])
def test_one_request_does_not_take_every_seat(serving: Serve, parts: Parts, count: int) -> None:
    """Next to `n` at its bound, a client of each API never waits for a second; the refusal says what raises the bound."""
    engine = {"model": str(models.long_standin(parts.environment)), "max_model_len": 2048}

    def prepare(model: Path) -> None:
        with_instances(model, count)
        with_openai(model)

    with serving(engine, prepare=prepare) as server:
        for request in (through_triton, through_the_port):
            error = request(server, 1000)
            found = re.search(r"n must be smaller, it is 1000; this model takes at most (\d+): MAX_N in", error)
            assert found, error
            most = int(found[1])
            check_wait(server, partial(request, server, most), f"count {count}, {request.__name__}, n {most}")


@pytest.mark.timeout(3600)
def test_a_list_of_prompts_does_not_take_every_seat(serving: Serve, parts: Parts) -> None:
    """One that would fill all seats is answered whole, and a client of each API never waits for a second."""
    engine = {"model": str(models.long_standin(parts.environment)), "max_model_len": 2048, "max_num_seqs": SEATS}
    with serving(engine, prepare=with_openai) as server:
        check_wait(server, partial(a_list, server, SEATS), f"{SEATS} prompts")


def check_wait(server: TritonServer, request: Callable[[], str], called: str) -> None:
    """Check how long a neighbour of a request waits."""
    waits = [longest_wait(server, request)]
    # The machine may be busy for a moment. A request that takes every seat does so each time.
    while waits[-1] > LONGEST_SECONDS and len(waits) < TRIES:
        waits.append(longest_wait(server, request))
    print(f"{called}: a neighbour's longest gap {waits} s")
    assert waits[-1] <= LONGEST_SECONDS


def longest_wait(server: TritonServer, request: Callable[[], str]) -> float:
    """Return how long a neighbour waited for its next token while a request was answered, on a machine without other work."""
    slowness = slowness_now()
    asking = neighbours(server, PROMPT)
    for one in asking:
        one.start()
    began = now()
    error = request()
    ended = now()
    longest = max(one.longest(began, ended) for one in asking)
    for one in asking:
        one.stop()
    assert (error, *[one.errors for one in asking]) == ("", [], [])
    return longest / max(slowness, slowness_now())
