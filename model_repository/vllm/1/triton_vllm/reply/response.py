"""Build the response tensors from engine outputs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from triton_vllm.base.errors import InternalError
from triton_vllm.base.wants import Wants
from triton_vllm.pooling import scores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triton_vllm.base.protocols import (
        CompletionOutput,
        Logprob,
        Positions,
        RequestOutput,
        Tensors,
    )
    from triton_vllm.chat.parsed import AnswerReader
    from triton_vllm.operator.run import Told
    from triton_vllm.pooling.gathering import Gathered
    from triton_vllm.pooling.scores import Scoring

# JSON has neither infinity nor NaN. OpenAI-compatible servers write this value for an impossible
# token.
LOWEST_LOGPROB = -9999.0
NOTHING: Any = SimpleNamespace(
    outputs=(), prompt_token_ids=(), prompt_logprobs=None, num_cached_tokens=0
)
"""In place of a RequestOutput: nothing new in any completion."""
_Named = dict[str, "np.ndarray[Any, Any]"]
"""The tensors of a response by name, in the order in which they are sent."""


@dataclass(slots=True)
class Completion:
    """The part of one of a request's ``n`` completions that one response carries."""

    cumulative_logprob: float | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Positions | None = None
    finish_reason: str | None = None
    stop_reason: Any = None

    def add(self, output: CompletionOutput) -> None:
        """Append one CompletionOutput of vLLM."""
        self.text += output.text
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            # The first ones are not copied: flat lists make an object of each value that is read.
            if self.logprobs is None:
                self.logprobs = output.logprobs
            else:
                self.logprobs = [*self.logprobs, *output.logprobs]
        if output.cumulative_logprob is not None:
            self.cumulative_logprob = output.cumulative_logprob
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason


class Assembler:
    """Makes the responses of one request, each from the outputs since the previous one.

    Args:
        wants: the optional outputs of the request.
        n: the request's completions. Each response has an element for each; it is empty if there is
            nothing new.
        prefix: text before each completion of the first response. It is the prompt, if the request
            wants it echoed.
        has_logprobs: whether the client asked vLLM for log probabilities. If it wants only their
            sum, vLLM computes them, but the output ``logprobs`` stays null.
    """

    def __init__(
        self, wants: Wants, n: int, prefix: str = "", *, has_logprobs: bool = True
    ) -> None:
        self._wants = wants
        self._has_logprobs = has_logprobs
        self._n = n
        self._prefix = prefix
        # Whether only the text is sent. Decided once, because ``build`` runs for every token of a
        # stream.
        self._plain = n == 1 and not prefix and wants == Wants()
        # The sum of each completion's log probabilities so far. vLLM sends the completions one at a
        # time, so a response may have nothing of some. These keep their sums.
        self._cumulative: list[float | None] = [None] * n

    def build(self, outputs: Sequence[RequestOutput]) -> Tensors:
        """Return the tensors (name, array) of one response from consecutive RequestOutputs."""
        # 1) The usual case needs only the text.
        if self._plain:
            text = "".join(part.text for output in outputs for part in output.outputs)
            return [("text_output", string_tensor(text))]
        # 2) Merge the outputs of each completion.
        completions = [Completion(cumulative_logprob=total) for total in self._cumulative]
        for output in outputs:
            for part in output.outputs:
                completions[part.index].add(part)
        self._cumulative = [c.cumulative_logprob for c in completions]
        # 3) Make the tensors. The parser changes the texts, so it comes first.
        parsed = self._parse(outputs, completions)
        texts = [self._prefix + c.text for c in completions]
        self._prefix = ""
        tensors = {"text_output": string_tensor(*texts)}
        self._add_extras(tensors, completions)
        self._add_of_request(tensors, outputs)
        return [*tensors.items(), *parsed.items()]

    def _parse(
        self,
        outputs: Sequence[RequestOutput],  # noqa: ARG002
        completions: list[Completion],  # noqa: ARG002
    ) -> _Named:
        """Return additional tensors; put the parsed texts and finish reasons in the completions."""
        # Only a chat has something to parse.
        return {}

    def _add_extras(self, tensors: _Named, completions: list[Completion]) -> None:
        """Add the optional tensors that have a part for each completion."""
        wants = self._wants
        if wants.finish_reason:
            # The official backend sends the word None until a completion ends.
            reasons = [str(c.finish_reason) for c in completions]
            tensors["finish_reason"] = string_tensor(*reasons)
        if wants.cumulative_logprob:
            # A completion that has not begun has the sum 0.
            sums = [c.cumulative_logprob or 0.0 for c in completions]
            for index, total in enumerate(sums):
                if not math.isfinite(total):
                    sums[index] = LOWEST_LOGPROB
            tensors["cumulative_logprob"] = np.array(sums, np.float32)
        if wants.logprobs:
            # If the client did not ask vLLM for them, they were computed only for the sum.
            texts = ["null"] * self._n
            if self._has_logprobs:
                texts = [logprobs_json(c.logprobs) for c in completions]
            tensors["logprobs"] = string_tensor(*texts)
        if wants.num_output_tokens:
            counts = [len(c.token_ids) for c in completions]
            tensors["num_output_tokens"] = np.array(counts, np.uint32)
        if wants.token_ids:
            # One list for all completions; ``num_output_tokens`` says where each begins.
            token_ids = [token for c in completions for token in c.token_ids]
            tensors["token_ids"] = np.array(token_ids, np.int64)
        if wants.stop_reason:
            # JSON keeps a stop token's number apart from a stop string of digits.
            stops = [json.dumps(c.stop_reason) for c in completions]
            tensors["stop_reason"] = string_tensor(*stops)

    def _add_of_request(self, tensors: _Named, outputs: Sequence[RequestOutput]) -> None:
        """Add the optional tensors that belong to the request, not to a completion."""
        wants = self._wants
        last = outputs[-1]
        if wants.num_input_tokens:
            count = len(last.prompt_token_ids or ())
            tensors["num_input_tokens"] = np.array([count], np.uint32)
        if wants.num_cached_tokens:
            tensors["num_cached_tokens"] = np.array([last.num_cached_tokens or 0], np.uint32)
        if wants.prompt_logprobs:
            positions = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs), None)
            tensors["prompt_logprobs"] = string_tensor(logprobs_json(positions))
        if wants.kv_transfer_params:
            transfer = json.dumps(getattr(last, "kv_transfer_params", None))
            tensors["kv_transfer_params"] = string_tensor(transfer)


class ChatAssembler(Assembler):
    """Makes the responses of one chat on a model with parsers.

    Content, reasoning and tool calls each have their own tensor.

    Args:
        wants: the optional outputs of the request.
        n: the request's completions.
        reader: parses the completions.
        has_logprobs: see ``Assembler``.
    """

    def __init__(
        self, wants: Wants, n: int, reader: AnswerReader, *, has_logprobs: bool = True
    ) -> None:
        super().__init__(wants, n, has_logprobs=has_logprobs)
        self._plain = False
        self._reader = reader

    def _parse(self, outputs: Sequence[RequestOutput], completions: list[Completion]) -> _Named:
        """Return ``tool_calls`` and ``reasoning``; put texts and finish reasons in completions."""
        calls = []
        thoughts = []
        # The reader has a list of parsed pieces for each completion.
        for completion, pieces in zip(completions, self._reader.read(outputs), strict=True):
            completion.text = "".join(piece.content for piece in pieces)
            reasons = [piece.finish_reason for piece in pieces if piece.finish_reason]
            # The parser's reason replaces vLLM's: an answer with tool calls ends with "tool_calls".
            completion.finish_reason = reasons[-1] if reasons else None
            new_calls = [call for piece in pieces for call in piece.tool_calls]
            calls.append(json.dumps(new_calls, ensure_ascii=False))
            thoughts.append("".join(piece.reasoning for piece in pieces))
        return {"tool_calls": string_tensor(*calls), "reasoning": string_tensor(*thoughts)}


class PoolingAssembler:
    """Makes the one response of a pooling request.

    Args:
        wants: the optional outputs of the request.
        scoring: the pairs to score. None if the request does not score.
    """

    def __init__(self, wants: Wants, scoring: Scoring | None = None) -> None:
        self._wants = wants
        self._scoring = scoring

    def build(self, outputs: Sequence[Gathered]) -> Tensors:
        """Return the tensors (name, array): a JSON element for each input or pair, and counts.

        The counts are over all inputs. Pooled numbers are nested as the model's task nests them.

        Raises:
            InternalError: a number is not finite, so JSON cannot hold it.
        """
        parts = outputs[-1].outputs
        try:
            if self._scoring:
                numbers = [part.outputs.data.tolist() for part in parts]
                scored = scores.answer(self._scoring, numbers)
                texts = [json.dumps(score, allow_nan=False) for score in scored]
            else:
                texts = [_pooled_json(part.outputs.data) for part in parts]
        except ValueError:
            raise InternalError(
                "the model has answered with numbers that are not finite; another dtype may help"
            ) from None
        tensors: Tensors = [("text_output", string_tensor(*texts))]
        if self._wants.num_input_tokens:
            count = sum(len(part.prompt_token_ids) for part in parts)
            tensors.append(("num_input_tokens", np.array([count], np.uint32)))
        if self._wants.num_output_tokens:
            # Pooling makes no tokens, but the client asked for the tensor.
            tensors.append(("num_output_tokens", np.array([0], np.uint32)))
        return tensors


class ToldAssembler:
    """Makes the one response to an operator."""

    def build(self, outputs: Sequence[Told]) -> Tensors:
        """Return a JSON object as ``text_output``."""
        return [("text_output", string_tensor(json.dumps(outputs[-1].outputs)))]


def string_tensor(*values: str) -> np.ndarray[Any, Any]:
    """Return a string tensor of shape [len(values)]."""
    array = np.empty(len(values), np.object_)
    for index, value in enumerate(values):
        # "replace", because a lone surrogate has no UTF-8.
        array[index] = value.encode("utf-8", "replace")
    return array


def _pooled_json(data: Any) -> str:
    """Return numbers as JSON, nested as they are."""
    if getattr(data, "ndim", 1) < 2:
        return json.dumps(data.tolist(), allow_nan=False)
    # Row by row: one call for all numbers of a long text would hold Python's lock for seconds.
    return f"[{', '.join(_pooled_json(row) for row in data)}]"


def logprobs_json(positions: Positions | None) -> str:
    """Return a JSON list with an object for each position, or "null" for None.

    The object maps a token id to an object with ``logprob``, ``rank`` and ``decoded_token``.
    """
    if positions is None:
        return "null"
    # One call for each position: a single call for a whole answer would hold Python's lock for
    # seconds, and all other requests would wait.
    return f"[{', '.join(map(_position_json, positions))}]"


def _position_json(position: Mapping[int, Logprob] | None) -> str:
    # A prompt's first token follows nothing, so it has no log probability.
    if position is None:
        return "null"
    return json.dumps({token: _logprob(entry) for token, entry in position.items()})


def _logprob(entry: Logprob) -> dict[str, Any]:
    value = entry.logprob if LOWEST_LOGPROB < entry.logprob < math.inf else LOWEST_LOGPROB
    return {"logprob": value, "rank": entry.rank, "decoded_token": entry.decoded_token}
