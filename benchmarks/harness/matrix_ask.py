"""What ``gpu_matrix.py`` asks a started model, and what must be true of the answers."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.shapes import MARK, make_prompt
from loadtest.backends import client_for
from loadtest.endpoint import Endpoint
from loadtest.record import Record, Request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ANSWER_TOKENS = 16
_PROMPT_TOKENS = 24
REQUEST_LIMIT_S = 120
# A killed worker: the engine is started again.
_BACK_LIMIT_S = 150
GREEDY = {"max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
# No other word is the beginning of one: after "w1", nothing could complete "w10".
_CHOICES = ("w4", "w7")
# The largest difference that rounding of numbers in JSON may make.
_SAME = 1e-2


class WrongAnswerError(Exception):
    """An answer is not what it must be; the message says what was asked and found."""


@dataclass(frozen=True)
class Served:
    """A started model.

    Attributes:
        http: Triton's HTTP port.
        grpc: Triton's gRPC port.
        openai: the OpenAI port.
        model: the model's name.
    """

    http: int
    grpc: int
    openai: int
    model: str


def make_prompts(vocabulary: int) -> list[str]:
    """Return the prompts that all rows and the engine in process get."""
    source = random.Random(57)
    return [make_prompt(source, _PROMPT_TOKENS, vocabulary) for _ in range(4)]


def post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON that a server answers.

    Raises:
        WrongAnswerError: it refuses, or does not answer.
    """
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")[:500]
        raise WrongAnswerError(f"{url} answers {error.code}: {text}") from error
    except OSError as error:
        raise WrongAnswerError(f"{url} does not answer: {error}") from error


def generate(served: Served, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send a body to Triton's generate endpoint, and return the answer; see ``post``."""
    return post(f"http://127.0.0.1:{served.http}/v2/models/{served.model}/generate", body)


def _sampling(parameters: Mapping[str, Any]) -> str:
    return json.dumps(dict(parameters))


def _words(text: str) -> list[str]:
    """Return the tokens of an answer, without what is between them."""
    return re.findall(rf"{MARK}\d+", text)


async def _texts(
    backend: str, endpoint: Endpoint, prompts: Sequence[str], parameters: Mapping[str, Any]
) -> tuple[list[list[str]], list[list[str]]]:
    """Return the answers to the prompts, first whole and then streamed, as lists of tokens.

    Args:
        backend: a name for ``client_for``: ``triton`` (gRPC) or ``openai``.
        endpoint: where to ask.
        prompts: what to ask.
        parameters: the sampling parameters.

    Raises:
        WrongAnswerError: a request fails.
    """
    # By whether the answer is streamed.
    found: dict[bool, list[list[str]]] = {False: [], True: []}
    async with client_for(backend)(endpoint) as client:
        await client.require_model(("text_input",))
        await client.connect(1)
        for stream, answers in found.items():
            for index, prompt in enumerate(prompts):
                now = time.perf_counter()
                request = Request(index, prompt, parameters, stream)
                record = Record(request, due=now, sent=now)
                await client.ask(request, record)
                if record.failure:
                    raise WrongAnswerError(f"{backend}, {record.failure}: {record.reason}")
                answers.append(_words("".join(record.pieces[0])))
    return found[False], found[True]


def check_texts(
    served: Served,
    prompts: Sequence[str],
    parameters: Mapping[str, Any] = GREEDY,
    *,
    distinct: bool = True,
) -> list[list[str]]:
    """Ask each prompt whole and streamed, over gRPC and the OpenAI port, and one over HTTP.

    Args:
        served: where to ask.
        prompts: the prompts.
        parameters: sampling parameters.
        distinct: whether each prompt must have another answer.

    Returns:
        the whole answers over gRPC, as lists of tokens.

    Raises:
        WrongAnswerError: an answer is empty, a stream differs from the whole answer, or two prompts
            have one answer although ``distinct`` is set.
    """
    answers: list[list[str]] = []
    for backend, port in (("triton", served.grpc), ("openai", served.openai)):
        endpoint = Endpoint(
            f"127.0.0.1:{port}", served.model, exclude_input=True, stream_timeout=REQUEST_LIMIT_S
        )
        whole, streamed = asyncio.run(_texts(backend, endpoint, prompts, parameters))
        require_sound(backend, whole, streamed, distinct=distinct)
        # Only those of the first backend are returned.
        answers = answers or whole
    http = generate(
        served,
        {
            "text_input": prompts[0],
            "exclude_input_in_output": True,
            "sampling_parameters": _sampling(parameters),
        },
    )
    if not _words(http["text_output"]):
        raise WrongAnswerError(f"HTTP generate answers {http['text_output']!r}")
    return answers


def require_sound(
    backend: str, whole: list[list[str]], streamed: list[list[str]], *, distinct: bool = True
) -> None:
    """Check the answers of one front end.

    Args:
        backend: its name, for the message.
        whole: for each prompt, the tokens of the whole answer.
        streamed: the same for the streamed answers.
        distinct: whether each prompt must have another answer.

    Raises:
        WrongAnswerError: an answer is empty, a stream differs from the whole answer, or two prompts
            have one answer although ``distinct`` is set.
    """
    for index, (one, other) in enumerate(zip(whole, streamed, strict=True)):
        if not one:
            raise WrongAnswerError(f"{backend}: the answer to prompt {index} is empty")
        if one != other:
            raise WrongAnswerError(
                f"{backend}: prompt {index} gets {' '.join(one)} whole, and streamed "
                f"{' '.join(other)}"
            )
    if distinct and len({tuple(one) for one in whole}) < len(whole):
        raise WrongAnswerError(f"{backend}: different prompts get one answer: {whole}")


def prompt_logprobs(served: Served, prompts: Sequence[str]) -> list[list[float]]:
    """Return the log probabilities of each prompt's own tokens, a list for each prompt."""
    found = []
    parameters = _sampling({"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0})
    for prompt in prompts:
        body = {
            "text_input": prompt,
            "sampling_parameters": parameters,
            "return_prompt_logprobs": True,
        }
        answer = json.loads(generate(served, body)["prompt_logprobs"])
        # The first token has no log probability. The entry of each other one has only its own.
        found.append([next(iter(entry.values()))["logprob"] for entry in answer if entry])
    return found


def embeddings(served: Served, prompts: Sequence[str]) -> list[list[float]]:
    """Return an embedding for each prompt, from Triton's HTTP front end.

    Raises:
        WrongAnswerError: the OpenAI port gives another one.
    """
    found = []
    for prompt in prompts:
        body = {"embedding_request": json.dumps({"input": prompt})}
        vector = json.loads(generate(served, body)["text_output"])
        body = {"model": served.model, "input": prompt}
        port = post(f"http://127.0.0.1:{served.openai}/v1/embeddings", body)["data"][0]
        if difference([vector], [port["embedding"]]) > _SAME:
            raise WrongAnswerError("the OpenAI port gives another embedding than Triton")
        found.append(vector)
    return found


# What rounding of numbers in JSON may make.
_SAME = 1e-2


def scores(served: Served, prompts: Sequence[str]) -> list[list[float]]:
    """Return a cross-encoder's score for each prompt paired with the first one, in lists of one."""
    found = []
    for prompt in prompts:
        pair = json.dumps({"text_1": prompt, "text_2": prompts[0]})
        answer = generate(served, {"embedding_request": pair})
        found.append([float(json.loads(answer["text_output"]))])
    return found


def difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return the largest difference between two numbers at the same place.

    Both arguments have a list of numbers for each prompt. If the two lists of a prompt have
    different lengths, the difference is infinity.

    Raises:
        ValueError: the arguments have different numbers of prompts.
    """
    largest = 0.0
    for left, right in zip(one, other, strict=True):
        if len(left) != len(right):
            return float("inf")
        largest = max([largest, *(abs(a - b) for a, b in zip(left, right, strict=True))])
    return largest


def check_adapter(served: Served, prompts: Sequence[str]) -> None:
    """Check that the LoRA adapter ``a`` answers, and otherwise than the base model.

    Raises:
        WrongAnswerError: it does not.
    """
    base = check_texts(served, prompts)
    adapted = check_texts_over_triton(served, prompts, {**GREEDY, "lora_name": "a"})
    if adapted == base:
        raise WrongAnswerError("the answers with the adapter are those without it")


def check_texts_over_triton(
    served: Served, prompts: Sequence[str], parameters: Mapping[str, Any]
) -> list[list[str]]:
    """Ask whole and streamed over gRPC only; return the answers as lists of tokens.

    Raises:
        WrongAnswerError: a request fails, or a stream differs from the whole answer.
    """
    endpoint = Endpoint(f"127.0.0.1:{served.grpc}", served.model, exclude_input=True)
    whole, streamed = asyncio.run(_texts("triton", endpoint, prompts, parameters))
    if whole != streamed:
        raise WrongAnswerError(f"whole answers {whole}, and streamed {streamed}")
    return whole


def check_choice(served: Served, prompts: Sequence[str]) -> None:
    """Check that structured output follows a pattern that the model would not follow by itself.

    Raises:
        WrongAnswerError: an answer does not follow it.
    """
    # It matches a text without end: these tokenizers have no token that ends a text.
    pattern = f"({'|'.join(_CHOICES)})+"
    parameters = {**GREEDY, "structured_outputs": {"regex": pattern}}
    for answer in check_texts_over_triton(served, prompts, parameters):
        if len(answer) < _ANSWER_TOKENS or not set(answer) <= set(_CHOICES):
            raise WrongAnswerError(f"asked for {pattern}: {' '.join(answer)}")


def check_sleep(served: Served, prompts: Sequence[str]) -> None:
    """Check that a sleeping model refuses requests, and answers as before after it has woken up.

    Raises:
        WrongAnswerError: it does not.
    """
    before = check_texts_over_triton(served, prompts, GREEDY)
    generate(served, {"operator_request": json.dumps({"operation": "sleep", "level": 1})})
    try:
        check_texts_over_triton(served, prompts[:1], GREEDY)
    except WrongAnswerError:
        pass
    else:
        raise WrongAnswerError("a sleeping model answers")
    generate(served, {"operator_request": json.dumps({"operation": "wake_up"})})
    if check_texts_over_triton(served, prompts, GREEDY) != before:
        raise WrongAnswerError("the answers after the sleep differ from those before it")


def wait_until_back(served: Served, prompts: Sequence[str]) -> float:
    """Ask until the model answers again; return the seconds.

    Raises:
        WrongAnswerError: it does not within ``_BACK_LIMIT_S``; the message has the last refusal.
    """
    started = time.monotonic()
    body = {"text_input": prompts[0], "sampling_parameters": _sampling(GREEDY)}
    while True:
        try:
            generate(served, body)
        except WrongAnswerError as error:
            if time.monotonic() - started > _BACK_LIMIT_S:
                raise WrongAnswerError(
                    f"a worker was killed, and after {_BACK_LIMIT_S} s: {error}"
                ) from error
            time.sleep(0.5)
        else:
            return time.monotonic() - started
