"""A request to embed, pool or score: what it has, how it is read and checked, and its answer.

The fields are those of vLLM's own server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_vllm.base.coerce import shown
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import refuse_above
from triton_vllm.engine.order import Order, Prompt
from triton_vllm.pooling import request as pooling
from triton_vllm.pooling.scores import Scoring
from triton_vllm.reply.response import PoolingAssembler
from triton_vllm.request.kinds import Call, Request

if TYPE_CHECKING:
    from triton_vllm.base.limits import Limits
    from triton_vllm.base.wants import Wants
    from triton_vllm.request.kinds import Served

PAIR_FIELDS = {"query": "documents", "queries": "documents", "text_1": "text_2"}
"""The two sides' names in vLLM's score and rerank requests; only ``query`` ranks."""
KNOWN_FIELDS = frozenset(
    {*PAIR_FIELDS, *PAIR_FIELDS.values(), "input", "pooling_params", "top_n", "lora_name"}
)
INPUT_NAME = "embedding_request"
EXPECTED_INPUT = "a non-empty string or list of token ids, or a list of these"


# In older vLLM, ``encode`` may also have one vector.
BY_TOKEN = ("token_embed", "token_classify", "encode")
"""Pooling tasks whose answer has a vector for each token."""


@dataclass(frozen=True)
class EmbedRequest(Request):
    """Inputs to embed, pool or score, with vLLM's pooling parameters.

    Attributes:
        prompts: the inputs. Empty if the request asks for scores.
        wants: the optional outputs that the client asked for.
        task: vLLM's pooling task.
        parameters: the pooling parameters, as JSON has them.
        lora_name: the name of a LoRA adapter. None for the base model.
        priority: as vLLM's scheduler has it. A lower number goes first.
        timeout: microseconds, as everywhere in Triton. With 0 there is no timeout.
        scoring: the pairs to score. None if the request does not ask for scores.
    """

    prompts: tuple[Prompt, ...]
    wants: Wants
    task: str
    parameters: Mapping[str, Any]
    lora_name: str | None = None
    priority: int = 0
    timeout: int = 0
    scoring: Scoring | None = None

    def call(self, served: Served, options: Mapping[str, Any]) -> Call:
        """See ``Request``."""
        task = self.task
        prompts = self.prompts
        # How pairs are scored depends on the model.
        if self.scoring is not None:
            task = served.fit.facts.scoring_task or "score"
            prompts = _pairs(self.scoring, task)
        served.require_adapter(self.lora_name)
        for prompt in prompts:
            served.fit.check_prompt(prompt)
        served.fit.check_weight(len(prompts), f"{INPUT_NAME} has", "inputs")
        served.require_task(task)
        order = Order(
            prompts=prompts,
            params=pooling.build(served.vllm, served.pooling_types, task, self.parameters),
            lora_name=self.lora_name,
            priority=self.priority,
            timeout=self.timeout,
            options=options,
            # Each number takes 21 characters of JSON, and some tasks make a vector for each token.
            most_numbers=served.fit.limits.max_pooled_numbers,
        )
        assembler = PoolingAssembler(self.wants, self.scoring)
        return Call(order, assembler, bulky=task in BY_TOKEN)


def _pairs(scoring: Scoring, task: str) -> tuple[Prompt, ...]:
    """Return the inputs of vLLM for a request for scores."""
    queries = scoring.queries
    documents = scoring.documents
    if task == "classify":
        # A cross-encoder reads pairs. A single query is repeated for every document.
        if len(queries) == 1:
            queries *= len(documents)
        pairs = zip(queries, documents, strict=True)
        return tuple(Prompt(text=query, second=document) for query, document in pairs)
    # Other models embed each text on its own, and the vectors are compared.
    return tuple(Prompt(text=text) for text in (*queries, *documents))


def prompts(
    limits: Limits, values: Mapping[str, Any], *, takes_unknown_fields: bool = False
) -> tuple[Prompt, ...]:
    """Return the inputs of a request; empty if the request asks for scores.

    Args:
        limits: the most inputs.
        values: the request.
        takes_unknown_fields: whether unknown fields are ignored, as the official backend does.

    Raises:
        InvalidRequestError: inputs are missing, of the wrong type or too many, or a field is
            unknown.
    """
    if not takes_unknown_fields:
        _check_names(values)
    source = values.get("input")
    if PAIR_FIELDS.keys() & values.keys():
        if "input" in values:
            raise InvalidRequestError(
                f"{INPUT_NAME} must have either input, or the two sides of pairs to score"
            )
        return ()
    # A list of integers is one input, as token ids. A list of texts or of lists has several.
    sources = [source]
    if isinstance(source, list) and source and isinstance(source[0], str | list):
        sources = source
    inputs = tuple(map(_prompt, sources))
    # vLLM gets each input as its own request.
    refuse_above(limits.max_inputs, len(inputs), f"{INPUT_NAME}.input has", "inputs")
    return inputs


def scoring(limits: Limits, values: Mapping[str, Any]) -> Scoring | None:
    """Return the pairs to score; None if the request does not ask for scores.

    Raises:
        InvalidRequestError: a side is missing, empty or of the wrong type, or the sides do not
            match.
    """
    names = [name for name in PAIR_FIELDS if name in values]
    if not names:
        return None
    _check_names(values)
    first = names[0]
    second = PAIR_FIELDS[first]
    if len(names) > 1 or second not in values:
        raise InvalidRequestError(
            f"{INPUT_NAME} must have query and documents, queries and documents, "
            "or text_1 and text_2"
        )
    ranked = first == "query"
    queries = _texts(first, values[first], one=ranked)
    documents = _texts(second, values[second])
    if len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            f"{INPUT_NAME}.{first} must be one text or as many as {second}: "
            f"{len(documents)}, not {len(queries)}"
        )
    refuse_above(limits.max_inputs, len(documents), f"{INPUT_NAME}.{second} has", "texts")
    # Null means all documents, as in vLLM's own server.
    top = values.get("top_n")
    if top is None:
        top = 0
    # `type`, because a boolean is an integer in Python.
    is_number = type(top) is int and top >= 0
    if not is_number or (top and not ranked):
        raise InvalidRequestError(
            f"{INPUT_NAME}.top_n must be a number of documents, 0 for all, and goes with query"
        )
    return Scoring(queries, documents, ranked=ranked, top=top)


def _prompt(source: Any) -> Prompt:
    """Return one input, from its text or token ids."""
    if isinstance(source, str) and source:
        return Prompt(text=source)
    if isinstance(source, list) and source and all(type(i) is int and i >= 0 for i in source):
        return Prompt(token_ids=tuple(source))
    raise InvalidRequestError(f"{INPUT_NAME}.input must be {EXPECTED_INPUT}")


def _texts(name: str, value: Any, *, one: bool = False) -> tuple[str, ...]:
    """Return one side of the pairs; ``value`` is a text or a list, with ``one`` of one text.

    Raises:
        InvalidRequestError: it is something else.
    """
    texts = [value] if isinstance(value, str) else value
    is_list = isinstance(texts, list) and texts and all(isinstance(t, str) and t for t in texts)
    if not is_list or (one and len(texts) > 1):
        many = "" if one else " or a list of these"
        raise InvalidRequestError(f"{INPUT_NAME}.{name} must be a non-empty string{many}")
    return tuple(texts)


def _check_names(values: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError if a request has a field that is not one of ``KNOWN_FIELDS``."""
    # Ignoring an unknown field could change the answer without a word, or share a cache with the
    # wrong requests.
    for name in values:
        if name not in KNOWN_FIELDS:
            raise InvalidRequestError(
                f"{INPUT_NAME} has no field '{shown(name)}'; "
                "vLLM's pooling parameters go into pooling_params"
            )
