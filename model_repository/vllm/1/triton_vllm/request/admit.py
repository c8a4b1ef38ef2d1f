"""Make an order from a Triton request, or raise the reason for its refusal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base import official, triton
from triton_vllm.base.dialect import OURS
from triton_vllm.base.errors import UnsupportedError
from triton_vllm.call import GenerateRequest
from triton_vllm.chat import conversations
from triton_vllm.constraints import checks as constraints
from triton_vllm.engine.order import Order
from triton_vllm.operator import request as operator
from triton_vllm.operator.request import OperatorRequest
from triton_vllm.pooling import request as pooling
from triton_vllm.pooling.embedding import EmbedRequest, Part
from triton_vllm.request import sampling
from triton_vllm.request.parse import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triton_vllm.base.dialect import Dialect
    from triton_vllm.base.protocols import TritonRequest
    from triton_vllm.engine.fit import Fit
    from triton_vllm.pooling.embedding import Scoring
    from triton_vllm.vllm_api import Parsers, Vllm

# In older vLLM, ``encode`` may also have one vector.
BY_TOKEN = ("token_embed", "token_classify", "encode")
"""Pooling tasks whose answer has a vector for each token."""


@dataclass(frozen=True)
class Policy:
    """The operator's choices.

    Attributes:
        name: the model's name.
        dialect: our behaviour or the official backend's.
        parsers: read the answers to chats. None leaves the answers unparsed.
    """

    name: str
    dialect: Dialect = OURS
    parsers: Parsers | None = None


class Admission:
    """Checks requests and turns them into orders.

    Args:
        vllm: the loaded vLLM. It determines which parameters exist.
        fit: checks requests against the model.
        find_adapter: raises an error for a name that no LoRA adapter can have.
        policy: the operator's choices.
    """

    def __init__(
        self,
        vllm: Vllm,
        fit: Fit,
        find_adapter: Callable[[str], object],
        policy: Policy,
    ) -> None:
        self._name = policy.name
        self._vllm = vllm
        self._fit = fit
        self._facts = fit.facts
        self._limits = fit.limits
        self._find_adapter = find_adapter
        self._dialect = policy.dialect
        self._parsers = policy.parsers
        self._schema = vllm_api.sampling_schema(vllm)
        self._pooling_types = vllm_api.pooling_types(vllm)

    def admit(self, request: TritonRequest) -> Order:
        """Return what a request asks of vLLM.

        Raises:
            AdapterError: the reason for a refusal.
        """
        # 1) Refuse what no request may do now, before anything is read.
        inputs = triton.inputs(request)
        self._fit.gate.let_in(to_operator=operator.INPUT_NAME in inputs)
        # 2) Read the request.
        parameters = triton.parameters(request)
        timeout = triton.timeout_us(request) if self._dialect.reads_timeout else 0
        parsed = parse(
            inputs, parameters, timeout=timeout, limits=self._limits, dialect=self._dialect
        )
        if isinstance(parsed, OperatorRequest):
            return Order(parsed)
        if isinstance(parsed, EmbedRequest) and parsed.scoring is not None:
            parsed = replace(parsed, **self._pairs(parsed.scoring))
        # 3) Check it against this model.
        if parsed.lora_name is not None:
            self._find_adapter(parsed.lora_name)
        if isinstance(parsed, EmbedRequest):
            self._check_parts(parsed)
        else:
            self._check_prompt(parsed)
        # 4) Make vLLM's parameters.
        order = self._embed(parsed) if isinstance(parsed, EmbedRequest) else self._generate(parsed)
        headers = triton.trace_headers(request) if self._facts.traces else None
        if headers:
            order = replace(order, options={**order.options, "trace_headers": headers})
        return order

    def _generate(self, parsed: GenerateRequest) -> Order:
        self._require("generate")
        values = parsed.parameters
        # Without logprobs vLLM sums up nothing, and the answer is NaN.
        if parsed.wants.cumulative_logprob and "logprobs" not in values:
            values = {**values, "logprobs": 0}
            parsed = replace(parsed, wants=replace(parsed.wants, no_logprobs=True))
        chat = parsed.chat
        params = sampling.build(
            self._schema,
            values,
            stream=parsed.stream,
            limits=self._limits,
            chat=None if chat is None else self._facts.chat,
        )
        self._fit.check_params(params)
        self._fit.check_weight(params.n, "sampling parameters: n asks for", "completions")
        conversation = None
        if chat is not None:
            refusals = (*self._vllm.client_errors, KeyError)
            conversation = conversations.begin(
                self._parsers, chat, params, refusals, self._limits, stream=parsed.stream
            )
            if conversation is not None:
                parsed = replace(parsed, chat=replace(chat, tools=conversation.tools()))
        # Read from the parameters only now: the conversation may have set a constraint for its
        # tools.
        constraint = constraints.to_compile(
            self._limits, getattr(params, self._schema.structured_name, None)
        )
        if constraint is not None:
            parsed = replace(parsed, constraint=constraint)
        options = self._options(parsed.engine_fields, params) if parsed.engine_fields else {}
        return Order(parsed, params, options, conversation)

    def _options(self, fields: Mapping[str, Any], params: Any) -> dict[str, Any]:
        """Set the fields that belong into SamplingParams; return the others for ``add_request``."""
        extra = {**fields.get("extra_args", {})}
        if "kv_transfer_params" in fields:
            extra["kv_transfer_params"] = fields["kv_transfer_params"]
        if extra:
            params.extra_args = extra
        known = vllm_api.request_keywords(self._vllm)
        options = {}
        for name in ("session_id", "data_parallel_rank"):
            if name not in fields:
                continue
            if name not in known:
                raise UnsupportedError(f"sampling parameter '{name}': this vLLM does not have it")
            options[name] = fields[name]
        return options

    def _embed(self, parsed: EmbedRequest) -> Order:
        self._require(parsed.task)
        params = pooling.build(
            self._vllm.PoolingParams, self._pooling_types, self._vllm.client_errors, parsed
        )
        # Each number takes 21 characters of JSON, and some tasks make a vector for each token.
        return Order(
            parsed,
            params,
            most_numbers=self._limits.max_pooled_numbers,
            bulky=parsed.task in BY_TOKEN,
        )

    def _pairs(self, scoring: Scoring) -> dict[str, Any]:
        """Return the ``task`` and ``parts`` of a request for scores; both depend on the model."""
        task = self._facts.scoring_task
        queries = scoring.queries
        documents = scoring.documents
        if task == "classify":
            # A cross-encoder reads pairs. A single query is repeated for every document.
            if len(queries) == 1:
                queries *= len(documents)
            pairs = zip(queries, documents, strict=True)
            parts = [Part(text=query, second=document) for query, document in pairs]
        else:
            # Other models embed each text on its own, and the vectors are compared.
            parts = [Part(text=text) for text in (*queries, *documents)]
        return {"task": task or "score", "parts": tuple(parts)}

    def _check_prompt(self, parsed: GenerateRequest) -> None:
        chat = parsed.chat
        if parsed.media or (chat and chat.media):
            self._fit.check_media(next(iter(parsed.media), "messages"))
        self._fit.check_ids(parsed.token_ids or ())
        self._fit.check_text(chat.characters if chat else len(parsed.text or ""))

    def _check_parts(self, parsed: EmbedRequest) -> None:
        for part in parsed.parts:
            self._fit.check_ids(part.token_ids or ())
            self._fit.check_text(len(part.text or "") + len(part.second or ""))
        self._fit.check_weight(len(parsed.parts), "embedding_request has", "inputs")

    def _require(self, task: str) -> None:
        if task not in self._facts.tasks:
            raise UnsupportedError(
                f"{official.FAILED_PREFIX}Model {self._name} does not support '{task}' request"
            )
