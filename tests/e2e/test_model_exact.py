"""The numbers are those of transformers on the same checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.model_requests import STRANGE, ask_all, prompt
from support.reference import kept_reference
from triton_vllm.engine.tokenizing import LONGEST_IN_LOOP
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from support.model_requests import Answer
    from support.serving import Parts
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
TEXTS = [*(text for text, _ in FACTS), *STRANGE, "a", "Seine Seine Seine"]
TOKENS = 48
TOLERANCE = 1e-3
FLAGS = {"return_token_ids": True, "return_logprobs": True, "return_prompt_logprobs": True}


@dataclass(frozen=True)
class Checked:
    """A server, the folder of the model that it serves, and whether it can be asked about the prompt's tokens."""

    server: TritonServer
    model: Path
    prompts: bool


@pytest.fixture(
    params=[
        pytest.param("opt", marks=pytest.mark.xdist_group("first_start")),  # the worker that has this server for others too
        pytest.param("llama", marks=[pytest.mark.xdist_group("llama_server"), pytest.mark.slow]),
    ]
)
def checked(request: pytest.FixtureRequest) -> Checked:
    """Either of the two architectures, on the server that has it."""
    if request.param == "opt":
        return Checked(request.getfixturevalue("server"), request.getfixturevalue("standin_model"), prompts=True)
    # prompt_logprobs kill vLLM's engine (0.32, CPU) where LoRA is on: an einsum over the wrong number of rows
    models = request.getfixturevalue("made_models")
    return Checked(request.getfixturevalue("llama_server"), models.llama, prompts=False)


def test_greedy_answers_equal_those_of_transformers(checked: Checked, parts: Parts) -> None:
    """Token by token, whole and streamed, alone or in a batch, with log probabilities within 0.001."""
    wanted = _transformers(parts, checked.model, TEXTS, TOKENS)
    parameters = {"temperature": 0, "max_tokens": TOKENS, "logprobs": 0}
    if checked.prompts:
        parameters["prompt_logprobs"] = 0
    requests = [prompt(text, parameters, exclude_input_in_output=True, **FLAGS) for text in TEXTS]
    batch = ask_all(checked.server, requests)
    streamed = ask_all(checked.server, [{**request, "stream": True} for request in requests])
    alone = [ask_all(checked.server, [request])[0] for request in requests[:3]]
    for answers in (batch, streamed, alone):
        for answer, reference in zip(answers, wanted[: len(answers)], strict=True):
            _compare(answer, reference, prompts=checked.prompts)


def test_prompts_of_any_length_are_read_alike(long_server: TritonServer, long_arguments: dict[str, object], parts: Parts) -> None:
    """Where a prompt is tokenized depends on its length (vllm_api.prompts); short and long ones arrive together."""
    lengths = [100, LONGEST_IN_LOOP, LONGEST_IN_LOOP + 1]
    texts = [("The Seine flows through Paris. " * 1000)[:length] for length in lengths]
    wanted = _transformers(parts, Path(str(long_arguments["model"])), texts, tokens=4)
    parameters = {"temperature": 0, "max_tokens": 4, "logprobs": 0}
    requests = [prompt(text, parameters, exclude_input_in_output=True, **FLAGS) for text in texts]
    for answer, reference in zip(ask_all(long_server, requests), wanted, strict=True):
        _compare(answer, reference, prompts=False)


def _transformers(parts: Parts, model: Path, texts: list[str], tokens: int) -> list[dict[str, Any]]:
    request = {"model": str(model), "prompts": texts, "max_tokens": tokens}
    found: list[dict[str, Any]] = kept_reference(parts.environment, "reference_transformers.py", request, model)
    return found


def _compare(answer: Answer, reference: dict[str, Any], *, prompts: bool) -> None:
    tokens = answer.token_ids()
    assert tokens == reference["token_ids"]
    assert answer.text == reference["text"]
    positions = [entry for part in answer.values("logprobs") for entry in json.loads(part[0])]
    found = [entry[str(token)]["logprob"] for token, entry in zip(tokens, positions, strict=True)]
    assert found == pytest.approx(reference["logprobs"], abs=TOLERANCE)
    if not prompts:
        return
    texts = [part[0] for part in answer.values("prompt_logprobs") if part[0] != b"null"]
    given = [next(iter(entry.values()))["logprob"] for entry in json.loads(texts[0])[1:]]
    assert given == pytest.approx(reference["prompt_logprobs"], abs=TOLERANCE)
