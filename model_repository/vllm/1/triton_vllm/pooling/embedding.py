"""Parse `embedding_request`: one or several inputs to embed or pool, or pairs to score, as vLLM's own server takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import shown
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import refuse_above

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.limits import Limits
    from triton_vllm.base.wants import Wants

PAIRS = {"query": "documents", "queries": "documents", "text_1": "text_2"}
"""The two sides' names in vLLM's score and rerank requests; only `query` ranks."""
KNOWN = frozenset({*PAIRS, *PAIRS.values(), "input", "pooling_params", "top_n", "lora_name"})
NAME = "embedding_request"
EXPECTED = "a non-empty string or list of token ids, or a list of these"


@dataclass(frozen=True)
class Part:
    """One input of a pooling request: a text, token ids, or two texts that a cross-encoder reads together."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    second: str | None = None


@dataclass(frozen=True)
class Scoring:
    """Pairs of texts to score: one query for all documents, or one query for each.

    With `ranked`, the answer has the best documents first, at most `top` of them (0 = all).
    """

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    ranked: bool = False
    top: int = 0


@dataclass(frozen=True)
class EmbedRequest:
    """Inputs to embed, pool or score, with vLLM's pooling parameters; each input is its own request to vLLM."""

    parts: tuple[Part, ...]
    wants: Wants
    task: str
    parameters: Mapping[str, Any]
    lora_name: str | None = None
    priority: int = 0
    timeout: int = 0
    scoring: Scoring | None = None


def parts(
    limits: Limits, values: Mapping[str, Any], *, takes_unknown_fields: bool = False
) -> tuple[Part, ...]:
    """Return the inputs of a request; empty if the request asks for scores.

    Args:
        limits: the most inputs.
        values: the request.
        takes_unknown_fields: whether unknown fields are ignored, as the official backend does.

    Raises:
        InvalidRequestError: inputs are missing, of the wrong type or too many, or a field is unknown.
    """
    if not takes_unknown_fields:
        _check_names(values)
    if not any(name in values for name in PAIRS):
        source = values.get("input")
        # A list of integers is one input, given as token ids.
        several = isinstance(source, list) and bool(source) and isinstance(source[0], str | list)
        made = tuple(
            _part(item) for item in (source if several and isinstance(source, list) else [source])
        )
        refuse_above(limits.max_inputs, len(made), f"{NAME}.input has", "inputs")
        return made
    if "input" in values:
        raise InvalidRequestError(
            f"{NAME} must have either input, or the two sides of pairs to score"
        )
    return ()


def scoring(limits: Limits, values: Mapping[str, Any]) -> Scoring | None:
    """Return the pairs to score; None if the request does not ask for scores.

    Raises:
        InvalidRequestError: a side is missing, empty or of the wrong type, or the sides do not match.
    """
    given = [name for name in PAIRS if name in values]
    if not given:
        return None
    _check_names(values)
    first, second = given[0], PAIRS[given[0]]
    if len(given) > 1 or second not in values:
        raise InvalidRequestError(
            f"{NAME} must have query and documents, queries and documents, or text_1 and text_2"
        )
    ranked = first == "query"
    queries, documents = _texts(first, values[first], one=ranked), _texts(second, values[second])
    if len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            f"{NAME}.{first} must be one text or as many as {second}: {len(documents)}, not {len(queries)}"
        )
    refuse_above(limits.max_inputs, len(documents), f"{NAME}.{second} has", "texts")
    top = 0 if values.get("top_n") is None else values["top_n"]
    # In Python, a boolean is an integer.
    if isinstance(top, bool) or not isinstance(top, int) or top < 0 or (top and not ranked):
        raise InvalidRequestError(
            f"{NAME}.top_n must be a number of documents, 0 for all, and goes with query"
        )
    return Scoring(queries, documents, ranked, top)


def _part(source: Any) -> Part:
    if isinstance(source, str) and source:
        return Part(text=source)
    if isinstance(source, list) and source and all(type(i) is int and i >= 0 for i in source):
        return Part(token_ids=tuple(source))
    raise InvalidRequestError(f"{NAME}.input must be {EXPECTED}")


def _texts(name: str, value: Any, *, one: bool = False) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(t, str) and t for t in texts)
        or (one and len(texts) > 1)
    ):
        many = "" if one else " or a list of these"
        raise InvalidRequestError(f"{NAME}.{name} must be a non-empty string{many}")
    return tuple(texts)


def _check_names(values: Mapping[str, Any]) -> None:
    """Refuse unknown fields: ignoring one could silently change the answer, or share a cache with the wrong requests."""
    unknown = next((name for name in values if name not in KNOWN), None)
    if unknown is not None:
        raise InvalidRequestError(
            f"{NAME} has no field '{shown(unknown)}'; vLLM's pooling parameters go into pooling_params"
        )
