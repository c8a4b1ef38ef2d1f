"""Build the response tensors from engine outputs."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from triton_vllm.base.errors import InternalError
from triton_vllm.base.protocols import Gathered
from triton_vllm.base.wants import Wants
from triton_vllm.chat.parsed import AnswerReader
from triton_vllm.operator.request import OperatorRequest
from triton_vllm.pooling import scores
from triton_vllm.pooling.embedding import EmbedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.answer import ResponseBuilder
    from triton_vllm.base.protocols import (
        CompletionOutput,
        Logprob,
        PoolingRequestOutput,
        Positions,
        RequestOutput,
        Tensors,
        Told,
    )
    from triton_vllm.job import Job
    from triton_vllm.pooling.embedding import Scoring

# JSON has neither infinity nor NaN. OpenAI-compatible servers write this value for an impossible token.
LOWEST_LOGPROB = -9999.0


class Completion:
    """The part of one of a request's `n` completions that one response carries."""

    __slots__ = (
        "cumulative_logprob",
        "finish_reason",
        "logprobs",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(self, cumulative_logprob: float | None = None) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[Any] | None = None
        self.cumulative_logprob = cumulative_logprob
        self.finish_reason: str | None = None
        self.stop_reason: Any = None

    def add(self, output: CompletionOutput) -> None:
        """Append one CompletionOutput of vLLM."""
        self.text += output.text
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        if output.cumulative_logprob is not None:
            self.cumulative_logprob = output.cumulative_logprob
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


class Assembler:
    """Makes the responses of one request, each from the outputs since the previous one.

    Args:
        wants: the optional outputs of the request.
        n: the request's completions. Each response has an element for each; it is empty if there is
            nothing new.
        prefix: text before each completion of the first response. It is the prompt, if the request
            wants it echoed.
    """

    def __init__(self, wants: Wants, n: int, prefix: str = "") -> None:
        self._wants = wants
        self._n = n
        self._prefix = prefix
        self._plain = n == 1 and not prefix and wants == Wants()
        self._cumulative: list[float | None] = [None] * n

    def build(self, outputs: Sequence[RequestOutput]) -> Tensors:
        """Return the tensors (name, array) of one response from consecutive RequestOutputs."""
        # The usual case needs only the text.
        if self._plain:
            return [
                ("text_output", string_tensor("".join(c.text for o in outputs for c in o.outputs)))
            ]
        completions = [Completion(self._cumulative[i]) for i in range(self._n)]
        for output in outputs:
            for part in output.outputs:
                completions[part.index].add(part)
        self._cumulative = [c.cumulative_logprob for c in completions]
        prefix, self._prefix = self._prefix, ""
        parsed = self._parse(outputs, completions)
        return [
            ("text_output", string_tensor(*(prefix + c.text for c in completions))),
            *self._extras(outputs, completions),
            *parsed,
        ]

    def _parse(self, outputs: Sequence[RequestOutput], completions: list[Completion]) -> Tensors:  # noqa: ARG002 - for chats
        """Return additional tensors, and replace the completions' texts and finish reasons by the parsed ones."""
        return []

    def _extras(self, outputs: Sequence[RequestOutput], completions: list[Completion]) -> Tensors:
        wants, tensors = self._wants, []
        if wants.finish_reason:
            tensors.append(
                ("finish_reason", string_tensor(*(str(c.finish_reason) for c in completions)))
            )
        if wants.cumulative_logprob:
            # A completion that has not begun has the sum 0.
            sums = [
                0.0 if c.cumulative_logprob is None else c.cumulative_logprob for c in completions
            ]
            finite = [total if math.isfinite(total) else LOWEST_LOGPROB for total in sums]
            tensors.append(("cumulative_logprob", np.array(finite, np.float32)))
        if wants.logprobs:
            found = (None if wants.no_logprobs else c.logprobs for c in completions)
            tensors.append(("logprobs", string_tensor(*map(logprobs_json, found))))
        if wants.num_output_tokens:
            tensors.append(
                ("num_output_tokens", np.array([len(c.token_ids) for c in completions], np.uint32))
            )
        if wants.token_ids:
            tensors.append(
                ("token_ids", np.array([t for c in completions for t in c.token_ids], np.int64))
            )
        if wants.stop_reason:
            tensors.append(
                ("stop_reason", string_tensor(*(json.dumps(c.stop_reason) for c in completions)))
            )
        return tensors + self._of_prompt(outputs)

    def _of_prompt(self, outputs: Sequence[RequestOutput]) -> Tensors:
        """Return the tensors that belong to the request, not to a completion."""
        wants, last, tensors = self._wants, outputs[-1], []
        if wants.num_input_tokens:
            tensors.append(
                ("num_input_tokens", np.array([len(last.prompt_token_ids or ())], np.uint32))
            )
        if wants.num_cached_tokens:
            tensors.append(
                ("num_cached_tokens", np.array([last.num_cached_tokens or 0], np.uint32))
            )
        if wants.prompt_logprobs:
            found = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs), None)
            tensors.append(("prompt_logprobs", string_tensor(logprobs_json(found))))
        if wants.kv_transfer_params:
            tensors.append(
                (
                    "kv_transfer_params",
                    string_tensor(json.dumps(getattr(last, "kv_transfer_params", None))),
                )
            )
        return tensors


class ChatAssembler(Assembler):
    """Makes the responses of one chat on a model with parsers: content, reasoning and tool calls, each in its tensor.

    Args:
        wants: the optional outputs of the request.
        n: the request's completions.
        reader: parses the completions.
    """

    def __init__(self, wants: Wants, n: int, reader: AnswerReader) -> None:
        super().__init__(wants, n)
        self._plain = False
        self._reader = reader

    def _parse(self, outputs: Sequence[RequestOutput], completions: list[Completion]) -> Tensors:
        pieces = self._reader.read(outputs)
        for completion, found in zip(completions, pieces, strict=True):
            completion.text = "".join(piece.content for piece in found)
            completion.finish_reason = next(
                (p.finish_reason for p in reversed(found) if p.finish_reason), None
            )
        calls = ([call for piece in found for call in piece.tool_calls] for found in pieces)
        return [
            (
                "tool_calls",
                string_tensor(*(json.dumps(each, ensure_ascii=False) for each in calls)),
            ),
            (
                "reasoning",
                string_tensor(*("".join(piece.reasoning for piece in found) for found in pieces)),
            ),
        ]


class PoolingAssembler:
    """Makes the one response of a pooling request.

    Args:
        wants: the optional outputs of the request.
        scoring: the pairs to score. None if the request does not score.
    """

    def __init__(self, wants: Wants, scoring: Scoring | None = None) -> None:
        self._wants = wants
        self._scoring = scoring

    def build(self, outputs: Sequence[PoolingRequestOutput | Gathered]) -> Tensors:
        """Return the tensors (name, array): a JSON element for each input or pair, and counts over all of them.

        Pooled numbers are nested as the model's task nests them.

        Raises:
            InternalError: a number is not finite, so JSON cannot hold it.
        """
        last = outputs[-1]
        parts = last.outputs if isinstance(last, Gathered) else [last]
        try:
            if self._scoring:
                scored = scores.answer(
                    self._scoring, [part.outputs.data.tolist() for part in parts]
                )
                texts = [json.dumps(score, allow_nan=False) for score in scored]
            else:
                texts = [_pooled_json(part.outputs.data) for part in parts]
        except ValueError:
            raise InternalError(
                "the model has answered with numbers that are not finite; another dtype may help"
            ) from None
        tensors: Tensors = [("text_output", string_tensor(*texts))]
        if self._wants.num_input_tokens:
            tensors.append(
                (
                    "num_input_tokens",
                    np.array([sum(len(part.prompt_token_ids) for part in parts)], np.uint32),
                )
            )
        if self._wants.num_output_tokens:
            tensors.append(("num_output_tokens", np.array([0], np.uint32)))
        return tensors


class ToldAssembler:
    """Makes the one response to an operator."""

    def build(self, outputs: Sequence[Told]) -> Tensors:
        """Return a JSON object as `text_output`."""
        return [("text_output", string_tensor(json.dumps(dict(outputs[-1].outputs))))]


def assembler(job: Job) -> ResponseBuilder:
    """Return the object that makes the responses of a job."""
    asked = job.request
    if isinstance(asked, OperatorRequest):
        return ToldAssembler()
    if isinstance(asked, EmbedRequest):
        return PoolingAssembler(asked.wants, asked.scoring)
    if job.conversation is not None:
        return ChatAssembler(
            asked.wants, job.params.n, AnswerReader(job.conversation, job.params.n)
        )
    prefix = (asked.text or "") if asked.echo else ""
    return Assembler(asked.wants, job.params.n, prefix)


def string_tensor(*values: str) -> np.ndarray[Any, Any]:
    """Return a string tensor of shape [len(values)]."""
    array = np.empty(len(values), np.object_)
    for i, value in enumerate(values):
        # "replace", because a lone surrogate has no UTF-8.
        array[i] = value.encode("utf-8", "replace")
    return array


def _pooled_json(data: Any) -> str:
    """Return numbers as JSON, row by row; one call for all numbers of a long text would hold Python's lock for seconds."""
    if getattr(data, "ndim", 1) < 2:
        return json.dumps(data.tolist(), allow_nan=False)
    return f"[{', '.join(_pooled_json(row) for row in data)}]"


def logprobs_json(positions: Positions | None) -> str:
    """Return a JSON list with an object for each position: token id -> logprob, rank, decoded_token; "null" for None."""
    if positions is None:
        return "null"
    return json.dumps(
        [None if p is None else {t: _logprob(entry) for t, entry in p.items()} for p in positions]
    )


def _logprob(entry: Logprob) -> dict[str, Any]:
    value = entry.logprob if LOWEST_LOGPROB < entry.logprob < math.inf else LOWEST_LOGPROB
    return {"logprob": value, "rank": entry.rank, "decoded_token": entry.decoded_token}
