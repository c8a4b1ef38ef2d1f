"""Requests that differ a little, or a lot, from ones that make sense: each is a function of a seed and its number.

A `Shot` is what goes over the wire: a body for Triton's HTTP generate endpoints, or a message of a gRPC stream.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tritonclient.grpc import service_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GRPC = "grpc"
GENERATE = "/v2/models/vllm/generate"
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 129, 363, 364, 2**31, 2**32 + 5, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308,
    5e-324, float("nan"), float("inf"), "", " ", "\0", "0", "true", "NaN", "1e999", "\ud800", "\N{DUCK}" * 9, "x" * 3000, "[",
    "{}", "null", "</s>", "a{9999}", "(a|b)*c", [], {}, [[]], [None], ["", 1], {"": {}}, {"5": 1}, {"type": "object"}, [5] * 300,
)  # fmt: skip
"""Values that programs have tripped over; 364 is the first token id beyond the model's vocabulary."""
SAMPLING = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "prompt_logprob_token_ids",
    "prompt_logprob_start", "logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens", "output_kind",
    "extra_args", "spaces_between_special_tokens", "include_stop_str_in_output", "structured_outputs", "logit_bias",
    "allowed_token_ids", "bad_words", "skip_reading_prefix_cache", "thinking_token_budget", "repetition_detection",
    "routed_experts_prompt_start", "trace_decode_token_ids", "watermarking", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "response_format", "lora_name", "priority", "timeout", "_eos_token_id", "stream_interval",
    "skip_clone", "truncate_prompt_tokens", "kv_transfer_params", "session_id", "data_parallel_rank", "cache_salt", "traceparent",
)  # fmt: skip
INPUTS = (
    "text_input", "image", "stream", "sampling_parameters", "exclude_input_in_output", "return_finish_reason", "messages",
    "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens", "return_num_output_tokens", "embedding_request",
    "tools", "chat_template_kwargs", "prompt_token_ids", "audio", "video", "priority", "timeout", "return_token_ids",
    "return_stop_reason", "return_prompt_logprobs", "return_kv_transfer_params", "operator_request", "id",
    "parameters", "nothing", "",
)  # fmt: skip
TYPES = ("BYTES", "BOOL", "INT32", "INT64", "UINT32", "FP32", "FP64", "INT8", "FP16", "BF16", "JSON", "")
_NUMPY = {"BOOL": np.bool_, "INT32": np.int32, "INT64": np.int64}
_DECLARED = {"prompt_token_ids": "INT64", "priority": "INT64", "timeout": "INT64"}


@dataclass(frozen=True)
class Shot:
    """One request: `way` is `GRPC` or the path of a POST, `body` its bytes."""

    way: str
    body: bytes


class Fuzzer:
    """Makes shots.

    Args:
        seeds: tensors by name of requests that make sense, or once did harm.
        seed: the same gives the same shots.
    """

    def __init__(self, seeds: Sequence[Mapping[str, Any]], seed: int) -> None:
        self._seeds = seeds
        self._seed = seed

    def shot(self, number: int) -> Shot:
        """Return the shot of this number."""
        rng = random.Random(f"{self._seed}:{number}")
        tensors = dict(rng.choice(self._seeds))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            rng.choice(_ON_TENSORS)(rng, tensors)
        shot = _over_grpc(rng, tensors) if rng.random() < 0.5 else _over_http(rng, tensors)
        return Shot(shot.way, mutated_bytes(rng, shot.body)) if rng.random() < 0.15 else shot


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with some flipped, cut out, doubled or put in."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        here = rng.randrange(len(changed) + 1)
        there = min(len(changed), here + rng.choice((1, 1, 4, 64)))
        changed[here:there] = rng.choice(
            (
                b"",
                bytes(changed[here:there]) * 2,
                rng.randbytes(there - here),
                rng.choice((b"\0", b"\xff", b'"', b"[" * 99, b"}", b"\\u")),
            )
        )
    return bytes(changed)


def mutated_json(rng: random.Random, value: Any) -> Any:
    """Return a JSON value of which one part, at any depth, is another."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        changed = {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.1:
            return changed
        return {**changed, rng.choice(SAMPLING) if rng.random() < 0.15 else key: mutated_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        middle = rng.choice(([], [mutated_json(rng, value[place])], [value[place]] * rng.choice((2, 70))))
        return [*value[:place], *middle, *value[place + 1 :]]
    if isinstance(value, int | float) and rng.random() < 0.4:
        return rng.choice((-value, value + 1, value * 2**31, str(value), float(value) if abs(value) < 2**1000 else 0.0))
    if isinstance(value, dict) and rng.random() < 0.5:
        return {**value, rng.choice(SAMPLING): rng.choice(VALUES)}
    return rng.choice((*VALUES, [value], {"x": value}))


def _json_input(rng: random.Random, tensors: dict[str, Any]) -> None:
    """Change a JSON document among the inputs, or give it parameters."""
    documents = [name for name, value in tensors.items() if isinstance(value, str) and value[:1] in ("{", "[")]
    name = rng.choice(documents or ["sampling_parameters"])
    try:
        value = json.loads(tensors[name])
    except (KeyError, TypeError, ValueError):
        value = {}
    tensors[name] = json.dumps(mutated_json(rng, value), ensure_ascii=rng.random() < 0.5)


def _parameter(rng: random.Random, tensors: dict[str, Any]) -> None:
    """Add a sampling parameter."""
    tensors["sampling_parameters"] = json.dumps({"max_tokens": 8, rng.choice(SAMPLING): rng.choice(VALUES)})


def _text(rng: random.Random, tensors: dict[str, Any]) -> None:
    """Change the characters of a text."""
    name = rng.choice([name for name, value in tensors.items() if isinstance(value, str)] or ["text_input"])
    tensors[name] = mutated_bytes(rng, str(tensors.get(name, "")).encode("utf-8", "surrogatepass")).decode("utf-8", "replace")


def _value(rng: random.Random, tensors: dict[str, Any]) -> None:
    tensors[rng.choice(INPUTS)] = rng.choice(VALUES)


def _less(rng: random.Random, tensors: dict[str, Any]) -> None:
    if tensors:
        del tensors[rng.choice(list(tensors))]


def _flag(rng: random.Random, tensors: dict[str, Any]) -> None:
    tensors[rng.choice([name for name in INPUTS if name.startswith(("return", "stream", "exclude"))])] = rng.random() < 0.8


_ON_TENSORS: tuple[Callable[[random.Random, dict[str, Any]], None], ...] = (
    _json_input, _json_input, _json_input, _parameter, _parameter, _text, _value, _less, _flag, _flag,
)  # fmt: skip


def _over_http(rng: random.Random, tensors: Mapping[str, Any]) -> Shot:
    body = {name: value for name, value in tensors.items() if name}
    if rng.random() < 0.5 and isinstance(body.get("sampling_parameters"), str):
        text = body.pop("sampling_parameters")
        try:
            body["parameters"] = json.loads(text)
        except ValueError:
            body["parameters"] = text
    if rng.random() < 0.1:
        body = mutated_json(rng, body)
    path = GENERATE + rng.choice(("", "_stream"))
    return Shot(path, json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass"))


def _over_grpc(rng: random.Random, tensors: Mapping[str, Any]) -> Shot:
    request = service_pb2.ModelInferRequest(model_name="vllm", id="1")
    for name, value in tensors.items():
        _add_tensor(rng, request, name, value)
    if rng.random() < 0.1:
        given = request.parameters[rng.choice(SAMPLING)]
        value = rng.choice((True, -1, 2**62, "x", 0.5))
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(given, kind, value)
    if rng.random() < 0.05 and request.raw_input_contents:
        request.raw_input_contents.pop(rng.randrange(len(request.raw_input_contents)))
    return Shot(GRPC, request.SerializeToString())


def _add_tensor(rng: random.Random, request: Any, name: str, value: Any) -> None:
    values = value if isinstance(value, list) else [value]
    kind = _DECLARED.get(name, "BOOL" if values and isinstance(values[0], bool) else "BYTES")
    raw = _raw(kind, values)
    shape = [len(values)]
    if rng.random() < 0.06:
        kind = rng.choice(TYPES)
    if rng.random() < 0.06:
        shape = rng.choice(([], [0], [-1], [1, 1], [2], [2**62, 4], [1] * 40))
    if rng.random() < 0.03:
        raw = mutated_bytes(rng, raw)
    request.inputs.add(name=name, datatype=kind, shape=shape)
    request.raw_input_contents.append(raw)


def _raw(kind: str, values: Sequence[Any]) -> bytes:
    """Return values as Triton's binary format has them; what does not fit the type becomes 1."""
    if kind in _NUMPY:
        fitting = [v if isinstance(v, int) and -(2**31) <= v < 2**31 else 1 for v in values]
        return np.array(fitting, _NUMPY[kind]).tobytes()
    texts = [(v if isinstance(v, str) else json.dumps(v)).encode("utf-8", "surrogatepass") for v in values]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
