"""A fuzz over the real HTTP and gRPC of the real server: it lives, answers or refuses everything, and grows by nothing."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from hostile.corpus import CORPUS
from support.fuzz import Fuzzer
from support.fuzz_target import Target
from support.memory import memory
from support.model_requests import ask
from support.reference import ONE_THREAD
from support.triton_client import get
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from support.serving import Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
PROMPT, WORDS = FACTS[2]
CONNECTIONS = 8
SEED = 1
OFTEN = 250
"""Shots between two looks at the neighbour."""
LONGEST_SEED = 5000
MEMORY_MB = 200
SHORT = {"sampling_parameters": json.dumps({"max_tokens": 8, "temperature": 0})}
PLAIN: tuple[Mapping[str, Any], ...] = (
    {"text_input": PROMPT, **SHORT},
    {"text_input": PROMPT, "stream": True, "return_logprobs": True, "return_cumulative_logprob": True, **SHORT},
    {"text_input": PROMPT, "sampling_parameters": json.dumps({"max_tokens": 8, "n": 3, "stop": ["x"], "logit_bias": {"5": 1}})},
    {"prompt_token_ids": [5, 6, 7], **SHORT},
    {"messages": json.dumps([{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]), **SHORT},
    {"embedding_request": json.dumps({"input": "x", "pooling_params": {"dimensions": 4}})},
    {"text_input": PROMPT, "sampling_parameters": json.dumps({"structured_outputs": {"json": {"type": "object"}}})},
)


def size(tensors: Mapping[str, Any]) -> int:
    """Return about how many bytes the tensors have."""
    return sum(len(value) if isinstance(value, str | list) else 1 for value in tensors.values())


def seeds() -> list[Mapping[str, Any]]:
    """Return the corpus' short requests, and as many that make sense."""
    hostile = [tensors for case in CORPUS if not case.heavy and size(tensors := case.make()) < LONGEST_SEED]
    return [*hostile, *PLAIN * (len(hostile) // len(PLAIN))]


def check_neighbour(server: TritonServer) -> None:
    """See that a greedy answer is what it always is."""
    assert ask(server, PROMPT, {"temperature": 0, "max_tokens": 64}, exclude_input_in_output=True).text == WORDS


def fire(server: TritonServer, numbers: range) -> list[str]:
    """Send the shots of these numbers over several connections; return what was wrong with their replies."""
    fuzzer, own = Fuzzer(seeds(), SEED), threading.local()
    targets: list[Target] = []

    def connect() -> None:
        own.target = Target(server)
        targets.append(own.target)

    def send(number: int) -> str:
        if number % OFTEN == 0:
            check_neighbour(server)
        shot = fuzzer.shot(number)
        fault = own.target.fault(shot)
        return fault and f"shot {number}, {shot.way}: {fault}: {shot.body[:300]!r}"

    with ThreadPoolExecutor(CONNECTIONS, initializer=connect) as pool:
        faults = [fault for fault in pool.map(send, numbers) if fault]
    for target in targets:
        target.close()
    return faults


def check_fuzzed(server: TritonServer, warm: range, numbers: range) -> None:
    """Send shots, and see that nobody died, grew or waits."""
    faults = fire(server, warm)  # what is made at the first use of each kind is made
    before, began = memory(server), time.monotonic()
    faults += fire(server, numbers)
    took, after = time.monotonic() - began, memory(server)
    check_neighbour(server)
    grown = {pid: round(after[pid] - megabytes) for pid, megabytes in before.items() if pid in after}
    print(f"{len(numbers)} shots in {took:.0f} s, {len(faults)} faults; MB more in each process: {list(grown.values())}")
    assert faults[:10] == []
    assert after.keys() == before.keys()
    assert [more for more in grown.values() if more > MEMORY_MB] == []
    assert get(server.http_url, "/v2/health/ready")[0] == 200


def test_a_few_hundred(server: TritonServer) -> None:
    """The ordinary suite's share, sent to the server that other files use before this one."""
    check_fuzzed(server, range(100), range(100, 500))


@pytest.mark.slow
def test_fifty_thousand(serving: Serve) -> None:
    """Others than the few hundred are among them."""
    with serving(environment=ONE_THREAD) as server:
        check_fuzzed(server, range(500, 3000), range(3000, 53_000))
