"""Start AsyncLLM, and read from a running one what its public methods do not return."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from triton_vllm.vllm_api import log_probabilities
from triton_vllm.vllm_api.outputs import deliver_fairly
from triton_vllm.vllm_api.platform import runs_on_cpu
from triton_vllm.vllm_api.prompts import parse_prompt, renderer, tokenizer_of
from triton_vllm.vllm_api.scoring import scoring_task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from triton_vllm.base.protocols import Collector, EngineClient, Output
    from triton_vllm.vllm_api.names import Vllm


def start(vllm: Vllm, values: Mapping[str, Any]) -> EngineClient:
    """Start AsyncLLM, and block until the model is loaded.

    Call it in a thread, or inside the event loop that will serve it. The loop stands still
    meanwhile. In a thread, vLLM starts its tasks when the loop uses the engine for the first time.
    """
    usage = vllm.UsageContext.API_SERVER
    return start_with(vllm, values, partial(vllm.AsyncLLM.from_engine_args, usage_context=usage))


def start_with(vllm: Vllm, values: Mapping[str, Any], make: Callable[[Any], Any]) -> EngineClient:
    """Start a client of the engine, and return it.

    Args:
        vllm: the loaded vLLM.
        values: the engine arguments.
        make: starts the client from vLLM's ``AsyncEngineArgs``.
    """
    args = vllm.AsyncEngineArgs(**values)
    # vLLM sets some of its variables itself while it starts, so it must read them again. An earlier
    # start may have turned the cache on.
    if vllm.disable_envs_cache is not None:
        vllm.disable_envs_cache()
    llm: EngineClient = make(args)
    deliver_fairly(llm)
    log_probabilities.keep_small()
    # Patch cached-variables: vLLM looks up an environment variable for every token (0.28 to 0.33;
    # v1/metrics/stats.py, update_from_output). That took a tenth of the event loop's time with 256
    # streams on an H200 (21 November 2026). In the process that runs the model, vLLM itself turns
    # this cache on. The variables must not change after that. It may go when vLLM does so in the
    # front end, too.
    if vllm.enable_envs_cache is not None:
        vllm.enable_envs_cache()
    return llm


async def sample_once(vllm: Vllm, llm: EngineClient) -> None:
    """Make the engine sample one token, so that no client waits for the sampler's compilation."""
    # On a CPU, vLLM compiles its sampler for the first token. That takes 5 s if the compiler's
    # cache is empty, even with `enforce_eager`. Without compilation, sampling would take twice as
    # long (for 32 of 50,000 tokens 34 ms instead of 15). On a GPU, vLLM samples while it starts.
    params = vllm.SamplingParams(
        max_tokens=1, temperature=1.0, logprobs=0, output_kind=vllm.RequestOutputKind.FINAL_ONLY
    )
    prompt: Any = {"prompt_token_ids": [0]}
    own_renderer = renderer(vllm, llm)
    # A raw prompt makes vLLM warn in every server's log that such prompts are deprecated.
    if own_renderer is not None:
        (prompt,) = own_renderer.render_cmpl([parse_prompt(vllm, llm, prompt)])
    async for _ in llm.generate(prompt, params, "triton-sample-once"):
        pass


def attach(collector: Collector, put: Callable[[Output | Exception], None]) -> None:
    """Send everything that vLLM puts into a request's collector to ``put``, in its order.

    Args:
        collector: the request's collector.
        put: takes an output or an exception. It is called in the engine's loop.
    """
    # Patch collector-put: vLLM wakes a task for each request and token (since 0.11;
    # v1/engine/output_processor.py, RequestOutputCollector.put). This way each costs one call: 0.07
    # us of the event loop's time in place of 1.8 (256 streams, vLLM 0.32, 29 November 2026). It may
    # go when vLLM calls a function for each output.
    collector.put = put
    # vLLM may already have put something.
    early: Output | Exception | None
    try:
        early = collector.get_nowait()
    except Exception as error:  # noqa: BLE001 - whatever vLLM put there is the request's outcome
        early = error
    if early is not None:
        put(early)


def is_dead(llm: EngineClient) -> bool:
    """Return whether the engine has died; takes no round trip."""
    return bool(getattr(llm, "errored", False))


def has_begun(llm: EngineClient, request_id: str, count: int) -> bool | None:
    """Return whether vLLM has begun to work on a request that was added; None if it does not say.

    Args:
        llm: the engine.
        request_id: the id that ``add_request`` got.
        count: the request's completions.
    """
    # vLLM's client process learns with the first token that its engine has begun. That holds for a
    # whole answer, too, which is put into the collector only at its end.
    processor = getattr(llm, "output_processor", None)
    states = getattr(processor, "request_states", None)
    if states is None:
        return None
    # vLLM 0.14 has ids of its own for requests. 0.11 has them only for the completions of a request
    # that has several.
    known_ids = getattr(processor, "external_req_ids", None)
    if known_ids is not None:
        own_ids = known_ids.get(request_id, ())
    else:
        parent = getattr(processor, "parent_requests", {}).get(request_id)
        own_ids = (request_id,) if parent is None else parent.child_requests
    # For each completion, whether vLLM still has to read the prompt. None if it does not say.
    prefilling = [
        getattr(states[own_id], "is_prefilling", None) for own_id in own_ids if own_id in states
    ]
    # There are no states either if the request has finished and its output is on the way.
    if not prefilling or None in prefilling:
        return None
    # vLLM keeps a state for each completion until it has finished.
    any_finished = len(prefilling) < count
    return any_finished or not all(prefilling)


def forget_parent(llm: EngineClient, request_id: str) -> None:
    """Delete the object with which vLLM collects the completions of an aborted request.

    Args:
        llm: the engine.
        request_id: the id that ``add_request`` got.
    """
    # Patch parent-of-aborted: vLLM's `abort` removes the completions by that id, but not the object
    # that collects them (0.14 to 0.33; v1/engine/output_processor.py, abort_requests). That object
    # would stay for ever. For a whole answer it holds all texts. It may go when vLLM's pull request
    # 51629, open in August 2026, is in all versions that we support.
    parents = getattr(getattr(llm, "output_processor", None), "parent_requests", None) or {}
    for own_id, parent in list(parents.items()):
        if request_id in (own_id, getattr(parent, "external_req_id", None)):
            del parents[own_id]


@dataclass(frozen=True)
class ChatDefaults:
    """What vLLM's own server uses for a conversation if the request does not set it.

    Attributes:
        values: sampling parameters from the model's ``generation_config`` and from the operator.
        most: the most tokens of an answer, whatever the request asks for. None: as many as fit.
        room: tokens of a prompt and its answer together.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    most: int | None = None
    room: int = 0


@dataclass(frozen=True)
class Facts:
    """What a model can do and take; 0 means unknown.

    Attributes:
        tasks: what the model can do, in vLLM's terms.
        max_tokens: tokens of a prompt and its answer together.
        seats: sequences that the engine works on at a time. With data parallelism, each rank.
        vocabulary: all token ids are below it.
        multimodal: whether it takes more than text.
        traces: whether vLLM exports traces of requests.
        prompt_logprobs: whether vLLM survives a request for the prompt's log probabilities.
        scoring_task: the pooling task that scores pairs. Empty if the model cannot.
        chat: defaults for conversations.
    """

    tasks: tuple[str, ...] = ()
    max_tokens: int = 0
    seats: int = 0
    vocabulary: int = 0
    multimodal: bool = True
    traces: bool = False
    prompt_logprobs: bool = True
    scoring_task: str = ""
    chat: ChatDefaults = field(default_factory=ChatDefaults)


def facts(llm: EngineClient, tasks: Sequence[str] = ()) -> Facts:
    """Return what the engine's model can do and take."""
    config = llm.model_config
    if config is None:
        return Facts(tuple(tasks))
    vllm_config = getattr(llm, "vllm_config", None)
    tracing = getattr(vllm_config, "observability_config", None)
    scheduler = getattr(vllm_config, "scheduler_config", None)
    # With LoRA, vLLM's CPU build (0.32) does not survive a request for the prompt's log
    # probabilities. It adds the adapters' share for the last tokens of the batch to all tokens of
    # the prompt. The sizes differ, and EngineCore ends.
    adapters_on_cpu = getattr(vllm_config, "lora_config", None) is not None and runs_on_cpu()
    return Facts(
        tasks=tuple(tasks),
        max_tokens=int(config.max_model_len),
        seats=int(getattr(scheduler, "max_num_seqs", 0)),
        vocabulary=int(config.get_vocab_size()),
        multimodal=bool(config.is_multimodal_model),
        traces=bool(getattr(tracing, "otlp_traces_endpoint", None)),
        prompt_logprobs=not adapters_on_cpu,
        scoring_task=scoring_task(llm, tasks),
        chat=_chat_defaults(config) if "generate" in tasks else ChatDefaults(),
    )


def _chat_defaults(config: Any) -> ChatDefaults:
    """Return the defaults for conversations, from vLLM's configuration of a model."""
    values: dict[str, Any] = dict(config.get_diff_sampling_param())
    # As in vLLM's server: the `max_new_tokens` of the weights is a default and no limit. That of a
    # folder which the operator names in `generation_config` is both.
    if config.generation_config in ("auto", "vllm"):
        most = config.override_generation_config.get("max_new_tokens")
    else:
        most = values.get("max_tokens")
    return ChatDefaults(values, most, int(config.max_model_len))


def frees_memory(llm: EngineClient) -> bool:
    """Return whether the engine was started so that sleeping frees its devices' memory."""
    return bool(getattr(llm.model_config, "enable_sleep_mode", False))


def compiles_with_xgrammar(llm: EngineClient) -> bool:
    """Return whether this engine tries xgrammar first to compile a constraint."""
    config = getattr(getattr(llm, "vllm_config", None), "structured_outputs_config", None)
    return getattr(config, "backend", "") in ("auto", "xgrammar")


async def xgrammar_tokenizer(llm: EngineClient) -> Callable[[], str]:
    """Return a function that serializes the engine's tokenizer for xgrammar.

    That function blocks, so call it in a thread.
    """
    tokenizer = await tokenizer_of(llm)
    size = llm.model_config.get_vocab_size()

    def write() -> str:
        xgrammar = importlib.import_module("xgrammar")
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
        return str(info.serialize_json())

    return write
