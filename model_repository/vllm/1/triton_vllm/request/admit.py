"""Make a job from a Triton request, or answer the request with the reason for its refusal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from triton_vllm import vllm_api
from triton_vllm.answer import Reply
from triton_vllm.base import official, triton
from triton_vllm.base.errors import DEAD, AdapterError, InternalError, UnavailableError, UnsupportedError
from triton_vllm.base.limits import USUAL, Limits, refuse_above
from triton_vllm.call import GenerateRequest
from triton_vllm.chat import conversations
from triton_vllm.chat.parsed import AnswerReader
from triton_vllm.constraints import checks as constraints
from triton_vllm.job import Job
from triton_vllm.operator import request as operator
from triton_vllm.operator.request import OperatorRequest
from triton_vllm.operator.run import ASLEEP
from triton_vllm.pooling import request as pooling
from triton_vllm.pooling.embedding import EmbedRequest, Part
from triton_vllm.request import sampling
from triton_vllm.request.fit import check_fit, check_params
from triton_vllm.request.parse import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triton_vllm.base.protocols import Log, TritonRequest
    from triton_vllm.call import Request
    from triton_vllm.pooling.embedding import Scoring
    from triton_vllm.vllm_api import ChatDefaults, Facts, Parsers, Vllm

BY_TOKEN = ("token_embed", "token_classify", "encode")
"""Pooling tasks whose answer has a vector for each token; the last may be either, in older vLLM."""


@dataclass(frozen=True)
class Policy:
    """What the operator has chosen.

    Attributes:
        unload_dead: whether the first request that finds the engine dead has the server unload the model.
        limits: how much a request may ask for, and how many there may be.
        as_official: whether errors are those of the official backend, and an empty prompt is left to vLLM.
        parsers: read the answers to chats; None leaves them as they are.
    """

    unload_dead: bool = False
    limits: Limits = USUAL
    as_official: bool = False
    parsers: Parsers | None = None


class Capacity(Protocol):
    """What is asked of the engine; no question costs a round trip.

    Attributes:
        tasks: what the model can do, as vLLM names it.
    """

    tasks: tuple[str, ...]

    def is_healthy(self) -> bool:
        """Return whether the engine is up."""

    def is_asleep(self) -> bool:
        """Return whether only operator requests are taken."""

    def in_flight(self) -> int:
        """Return how many requests there are; each part of a pooling request is one."""

    def facts(self) -> Facts:
        """Return what the model can take."""

    def chat_defaults(self) -> ChatDefaults:
        """Return what conversations have where a request gives nothing."""

    def scoring_task(self) -> str:
        """Return the pooling task by which the model scores pairs; nothing if it cannot."""


class Admission:
    """Check requests and turn them into jobs.

    Args:
        name: the model's name.
        vllm: the loaded vLLM; says which parameters there are.
        engine: asked what it can do and whether it lives.
        find_adapter: raises an error for a name that no LoRA adapter can have.
        log: told of requests that could not be read.
        policy: what the operator has chosen.
    """

    def __init__(
        self,
        name: str,
        vllm: Vllm,
        engine: Capacity,
        find_adapter: Callable[[str], object],
        log: Log,
        policy: Policy,
    ) -> None:
        self._name = name
        self._vllm = vllm
        self._engine = engine
        self._find_adapter = find_adapter
        self._log = log
        self._unload_dead = policy.unload_dead
        self._as_official = policy.as_official
        self._limits = policy.limits
        self._parsers = policy.parsers
        self._schema = vllm_api.sampling_schema(vllm)
        self._pooling_types = vllm_api.pooling_types(vllm)

    def admit(self, request: TritonRequest) -> Job | None:
        """Return the job of a request, or answer the request and return None."""
        reply = Reply(triton.Channel(request, self._log if self._as_official else None))
        try:
            return self._job(request, reply)
        except AdapterError as error:
            reply.fail(error)
        except Exception as error:  # noqa: BLE001 - a request must never take the model down
            self._log.error(f"request refused: {type(error).__name__}: {error}")
            reply.fail(InternalError("the request could not be read; the server's log has the details"))
        return None

    @cached_property
    def _facts(self) -> Facts:
        return self._engine.facts()  # a restarted engine has the same model

    @cached_property
    def _chat_defaults(self) -> ChatDefaults:
        return self._engine.chat_defaults()

    def _job(self, request: TritonRequest, reply: Reply) -> Job:
        if not self._engine.is_healthy():
            if self._unload_dead:
                self._log.error(official.UNLOADING)
                triton.unload(self._name)
            raise UnavailableError(DEAD)
        inputs, parameters = triton.inputs(request), triton.parameters(request)
        most = self._limits.max_requests_in_flight
        if 0 < most <= self._engine.in_flight() and operator.NAME not in inputs:  # an operator has to be able to drain it
            raise UnavailableError(f"{most} requests are in flight, and no more are taken: try again later")
        timeout = 0 if self._as_official else triton.timeout_us(request)  # which the official backend does not look at
        parsed = parse(inputs, parameters, timeout, self._limits, as_official=self._as_official)
        if isinstance(parsed, OperatorRequest):
            return Job(parsed, None, reply)
        if self._engine.is_asleep():
            raise UnavailableError(ASLEEP)
        if isinstance(parsed, EmbedRequest) and parsed.scoring is not None:
            parsed = replace(parsed, **self._pairs(parsed.scoring))
        if parsed.lora_name is not None:
            self._find_adapter(parsed.lora_name)
        check_fit(parsed, self._facts, self._limits)
        self._check_room(parsed)
        job = self._generate(parsed, reply) if isinstance(parsed, GenerateRequest) else self._embed(parsed, reply)
        if self._facts.traces and (headers := triton.trace_headers(request)):
            job.options = {**job.options, "trace_headers": headers}
        return job

    def _generate(self, parsed: GenerateRequest, reply: Reply) -> Job:
        self._require("generate")
        values = parsed.parameters
        if parsed.wants.cumulative_logprob and "logprobs" not in values:
            values = {**values, "logprobs": 0}  # else vLLM sums nothing up, and the answer is NaN
            parsed = replace(parsed, wants=replace(parsed.wants, no_logprobs=True))
        defaults = self._chat_defaults if parsed.chat else None
        params = sampling.build(self._schema, values, stream=parsed.stream, limits=self._limits, chat=defaults)
        check_params(params, self._facts)
        conversation = None
        if parsed.chat is not None:
            refusals = (*self._vllm.client_errors, KeyError)
            conversation = conversations.begin(self._parsers, parsed.chat, params, refusals, self._limits, stream=parsed.stream)
        constraint = constraints.to_compile(self._limits, getattr(params, self._schema.structured_name, None))
        if constraint is not None:
            parsed = replace(parsed, constraint=constraint)
        if conversation is not None and parsed.chat is not None:
            parsed = replace(parsed, chat=replace(parsed.chat, tools=conversation.tools()))
        job = Job(parsed, params, reply)
        if conversation is not None:
            job.conversation = conversation
            job.reader = AnswerReader(conversation, params.n)
        if parsed.engine_fields:
            job.options = self._options(parsed.engine_fields, params)
        return job

    def _options(self, fields: Mapping[str, Any], params: Any) -> dict[str, Any]:
        """Return what goes to `add_request`; what goes into SamplingParams is put there."""
        extra = {**fields.get("extra_args", {})}
        if "kv_transfer_params" in fields:
            extra["kv_transfer_params"] = fields["kv_transfer_params"]
        if extra:
            params.extra_args = extra
        options = {name: fields[name] for name in ("session_id", "data_parallel_rank") if name in fields}
        unknown = next((name for name in options if name not in vllm_api.request_keywords(self._vllm)), None)
        if unknown is not None:
            raise UnsupportedError(f"sampling parameter '{unknown}': this vLLM does not have it")
        return options

    def _embed(self, parsed: EmbedRequest, reply: Reply) -> Job:
        self._require(parsed.task)
        params = pooling.build(self._vllm.PoolingParams, self._pooling_types, self._vllm.client_errors, parsed)
        job = Job(parsed, params, reply)
        job.most_numbers = self._limits.max_pooled_numbers
        job.bulky = parsed.task in BY_TOKEN
        return job

    def _pairs(self, scoring: Scoring) -> dict[str, Any]:
        """Return the task and the parts of a request for scores, which depend on the model."""
        task = self._engine.scoring_task()
        queries = scoring.queries * (1 if len(scoring.queries) > 1 else len(scoring.documents))
        if task == "classify":
            parts = tuple(Part(text=q, second=d) for q, d in zip(queries, scoring.documents, strict=True))
        else:
            parts = tuple(Part(text=text) for text in (*scoring.queries, *scoring.documents))
        return {"task": task or "score", "parts": parts}

    def _check_room(self, parsed: Request) -> None:
        most, count = self._limits.max_requests_in_flight, len(getattr(parsed, "parts", (None,)))
        if count > 1:
            refuse_above(most, count, "embedding_request has", "inputs")
            if 0 < most < self._engine.in_flight() + count:
                raise UnavailableError(f"with {count} inputs more than {most} requests would be in flight: try again later")

    def _require(self, task: str) -> None:
        if task not in self._engine.tasks:
            raise UnsupportedError(f"{official.FAILED}Model {self._name} does not support '{task}' request")
