"""The one place that touches vLLM's API: every name that moved between vLLM 0.11 and 0.33 is looked for here.

Whether a vLLM can do something is decided by its attributes, fields and keywords, not by its version number.
Import of this module is free; `load()` imports vLLM, which takes 10 s and more.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import opcode
import re
import sys
import typing
from dataclasses import dataclass, field
from typing import Any

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from triton_vllm.protocols import Collector, EngineClient, Output, PrometheusFamily, Renderer

_ADVICE = re.compile(r"\.?\s*Set VLLM_\w+ to\s+increase this\s+limit\.?\s*$")
_RAISE = opcode.opmap["RAISE_VARARGS"]
# (attribute, modules in the order tried: newest place first)
PLACES: Mapping[str, tuple[str, ...]] = {
    "AsyncEngineArgs": ("vllm.engine.arg_utils",),
    "AsyncLLM": ("vllm.v1.engine.async_llm",),
    "UsageContext": ("vllm.usage.usage_lib",),
    "SamplingParams": ("vllm.sampling_params",),
    "RequestOutputKind": ("vllm.sampling_params",),
    "StructuredOutputsParams": ("vllm.sampling_params",),
    "PoolingParams": ("vllm.pooling_params",),
    "LoRARequest": ("vllm.lora.request",),
    "EngineDeadError": ("vllm.v1.engine.exceptions",),
}
# The same, for what only some versions have.
OPTIONAL_PLACES: Mapping[str, tuple[str, ...]] = {
    "parse_model_prompt": ("vllm.renderers.inputs.preprocess",),  # since 0.20
    "VLLMClientError": ("vllm.exceptions",),  # the request is wrong
    "VLLMValidationError": ("vllm.exceptions",),
    "GracefulHTTPError": ("vllm.exceptions",),  # queue overflow (503), 0.32
    "ChatParams": ("vllm.renderers.params", "vllm.renderers"),  # since 0.20
    "ThreadSafeHFTokenizerMixin": ("vllm.tokenizers.hf",),  # since 0.22
    "ImageMediaIO": ("vllm.multimodal.media", "vllm.multimodal.image"),
    "AudioMediaIO": ("vllm.multimodal.media", "vllm.multimodal.audio"),
    "VideoMediaIO": ("vllm.multimodal.media", "vllm.multimodal.video"),
    "UniProcExecutor": ("vllm.v1.executor.uniproc_executor",),
    "enable_envs_cache": ("vllm.envs",),
    "disable_envs_cache": ("vllm.envs",),
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": ("vllm.envs",),
    "DEFAULT_LOGGING_CONFIG": ("vllm.logger",),
}


@dataclass(frozen=True)
class Vllm:
    """The parts of the installed vLLM that the adapter uses.

    `refusals` are the exceptions by which it says that a request is wrong; `client_errors` adds those by which Python says
    that a value is. `step_timeout_s` is how long vLLM waits for a worker's step before it takes the worker to be lost, s.
    """

    version: str
    path: str
    AsyncEngineArgs: Any
    AsyncLLM: Any
    UsageContext: Any
    SamplingParams: Any
    RequestOutputKind: Any
    StructuredOutputsParams: Any
    PoolingParams: Any
    LoRARequest: Any
    EngineDeadError: type[Exception]
    refusals: tuple[type[Exception], ...]
    client_errors: tuple[type[Exception], ...]
    busy_errors: tuple[type[Exception], ...]
    parse_model_prompt: Callable[[Any, Any], Any] | None
    ChatParams: Any
    ThreadSafeHFTokenizerMixin: Any
    UniProcExecutor: Any
    enable_envs_cache: Callable[[], None] | None
    disable_envs_cache: Callable[[], None] | None
    media_io: Mapping[str, Any]
    step_timeout_s: float = 300.0
    logging_config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Schema:
    """What the installed vLLM's SamplingParams takes.

    `types` maps a parameter to its declared type; `make`, `structured`, `streaming` and `whole` are vLLM's classes and
    output kinds, handed in so that this module needs no vLLM. `structured_name` is the parameter for `structured`;
    `refusals` are the exceptions by which vLLM says that a value is wrong.
    """

    types: Mapping[str, Any]
    make: Any
    structured: Any
    structured_name: str
    streaming: Any
    whole: Any
    refusals: tuple[type[Exception], ...] = (ValueError, TypeError)
    fixed: Mapping[str, Any] = field(default_factory=dict)


def load() -> Vllm:
    """Import vLLM and find its parts.

    Raises:
        ImportError: vLLM, or a name that every supported version has, is not found.
    """
    vllm = importlib.import_module("vllm")
    found = {name: _find(name, places) for name, places in PLACES.items()}
    optional = {name: _find(name, places, required=False) for name, places in OPTIONAL_PLACES.items()}
    refusals = tuple(e for e in (optional["VLLMClientError"], optional["VLLMValidationError"]) if e)
    return Vllm(
        version=str(getattr(vllm, "__version__", "unknown")),
        path=str(next(iter(vllm.__path__))),
        **found,
        refusals=refusals,
        client_errors=(*refusals, ValueError, TypeError, OverflowError),
        busy_errors=tuple(e for e in [optional["GracefulHTTPError"]] if e),
        parse_model_prompt=optional["parse_model_prompt"],
        ChatParams=optional["ChatParams"],
        ThreadSafeHFTokenizerMixin=optional["ThreadSafeHFTokenizerMixin"],
        UniProcExecutor=optional["UniProcExecutor"],
        enable_envs_cache=optional["enable_envs_cache"],
        disable_envs_cache=optional["disable_envs_cache"],
        step_timeout_s=float(optional["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] or Vllm.step_timeout_s),
        logging_config=optional["DEFAULT_LOGGING_CONFIG"],
        media_io={name: optional[f"{name.capitalize()}MediaIO"] for name in ("image", "audio", "video")},
    )


def _find(name: str, places: tuple[str, ...], *, required: bool = True) -> Any:
    for place in places:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
    if required:
        raise ImportError(f"this vLLM has no {name} in {' or '.join(places)}; vLLM 0.11 to 0.33 are supported")
    return None


def engine_arg_types(vllm: Vllm) -> dict[str, Any]:
    """Return the engine arguments that this vLLM takes, each with its declared type."""
    return _types(vllm.AsyncEngineArgs, [f.name for f in dataclasses.fields(vllm.AsyncEngineArgs)])


def sampling_schema(vllm: Vllm) -> Schema:
    """Describe SamplingParams of this vLLM."""
    types = _types(vllm.SamplingParams, list(vllm.SamplingParams.__struct_fields__))
    # skip_clone: the object belongs to one request, so vLLM need not copy it (since 0.14)
    fixed = {"skip_clone": True} if "skip_clone" in types else {}
    return Schema(
        types=types,
        make=vllm.SamplingParams,
        structured=vllm.StructuredOutputsParams,
        structured_name="structured_outputs",
        streaming=vllm.RequestOutputKind.DELTA,
        whole=vllm.RequestOutputKind.FINAL_ONLY,
        refusals=vllm.client_errors,
        fixed=fixed,
    )


def pooling_types(vllm: Vllm) -> dict[str, Any]:
    """Return the pooling parameters that this vLLM takes, each with its declared type."""
    return _types(vllm.PoolingParams, list(vllm.PoolingParams.__struct_fields__))


def _types(cls: Any, names: list[str]) -> dict[str, Any]:
    """Map public field names to types; a type that cannot be resolved is Any, which is then not checked."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        module = vars(sys.modules.get(base.__module__, typing))
        for name, hint in inspect.get_annotations(base).items():
            hints[name] = _resolve(hint, module)
    return {name: hints.get(name, Any) for name in names if not name.startswith("_")}


def _resolve(hint: Any, namespace: Mapping[str, Any]) -> Any:
    if not isinstance(hint, str):
        return hint
    try:
        return typing.get_type_hints(type("_", (), {"__annotations__": {"x": hint}}), dict(namespace))["x"]
    except Exception:  # noqa: BLE001 - an annotation may name whatever is imported for type checkers only
        return Any


def start(vllm: Vllm, values: Mapping[str, Any]) -> EngineClient:
    """Start AsyncLLM; call it inside the running event loop that will serve it. Blocks until the model is loaded."""
    args = vllm.AsyncEngineArgs(**values)
    if vllm.disable_envs_cache is not None:
        vllm.disable_envs_cache()
    llm: EngineClient = vllm.AsyncLLM.from_engine_args(args, usage_context=vllm.UsageContext.API_SERVER)
    # vLLM looks an environment variable up for every token: a tenth of the event loop's time with 256 streams on an H200.
    # It switches this cache on itself where the model runs, and requires that its variables do not change after that.
    if vllm.enable_envs_cache is not None:
        vllm.enable_envs_cache()
    return llm


def renderer(vllm: Vllm, llm: EngineClient) -> Renderer | None:
    """Return what tokenizes prompts before they are added (0.20 on), or None: then `add_request` does it."""
    found: Renderer | None = getattr(llm, "renderer", None)
    if found is None or vllm.parse_model_prompt is None or not hasattr(found, "render_cmpl_async"):
        return None
    return found


def parse_prompt(vllm: Vllm, llm: EngineClient, prompt: Mapping[str, Any]) -> Any:
    """Return what the renderer takes; only for a vLLM that has one."""
    if vllm.parse_model_prompt is None:
        raise TypeError("this vLLM has no renderer")
    return vllm.parse_model_prompt(llm.model_config, prompt)


def pooled_tokenizer(vllm: Vllm, renderer: Renderer) -> Any | None:
    """Return the tokenizer if any thread may use it beside vLLM's own: vLLM pools most of them, with a copy for each thread.

    A tokenizer without a pool keeps the options of its last call, such as truncation, and fails ("Already borrowed") if another
    thread calls it with other options at the same time. A tokenizer in Python is slow.
    """
    pooled = vllm.ThreadSafeHFTokenizerMixin
    tokenizer = getattr(renderer, "tokenizer", None)
    return tokenizer if pooled is not None and isinstance(tokenizer, pooled) else None


async def render_chat(vllm: Vllm, llm: EngineClient, messages: list[Any], template_kwargs: Mapping[str, Any]) -> Any:
    """Return the prompt of a conversation, by the model's chat template.

    Raises:
        Exception: whatever the template raises about the messages.
    """
    found: Renderer | None = getattr(llm, "renderer", None)
    if found is not None and vllm.ChatParams is not None and hasattr(found, "render_chat_async"):
        params = vllm.ChatParams(chat_template_kwargs={"add_generation_prompt": True, **template_kwargs})
        _, (prompt,) = await found.render_chat_async([messages], params)  # vLLM bounds the template's time (0.32)
        return prompt
    tokenizer = llm.get_tokenizer()
    tokenizer = await tokenizer if inspect.isawaitable(tokenizer) else tokenizer
    options = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
    text = tokenizer.apply_chat_template(messages, **options)
    # The template writes the special tokens itself.
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def compiles_with_xgrammar(llm: EngineClient) -> bool:
    """Return whether this engine tries to compile constraints with xgrammar, and with others what that cannot."""
    config = getattr(getattr(llm, "vllm_config", None), "structured_outputs_config", None)
    return getattr(config, "backend", "") in ("auto", "xgrammar")


async def xgrammar_tokenizer(llm: EngineClient) -> Callable[[], str]:
    """Return a function, to be called in a thread, that writes the engine's tokenizer down as xgrammar reads it."""
    tokenizer = llm.get_tokenizer()
    tokenizer = await tokenizer if inspect.isawaitable(tokenizer) else tokenizer
    size = llm.model_config.get_vocab_size()

    def write() -> str:
        info = importlib.import_module("xgrammar").TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
        return str(info.serialize_json())

    return write


def media_loaders(vllm: Vllm, engine_args: Mapping[str, Any]) -> dict[str, Callable[[bytes], Any]]:
    """Return a decoder of file contents for each modality that this vLLM knows, set up by `media_io_kwargs`."""
    options = engine_args.get("media_io_kwargs") or {}
    io = vllm.media_io
    made: dict[str, Any] = {}
    if io["image"] is not None:
        made["image"] = io["image"](**options.get("image", {}))
    if io["audio"] is not None:
        made["audio"] = io["audio"](**options.get("audio", {}))
    if io["video"] is not None and "image" in made:
        made["video"] = io["video"](made["image"], **options.get("video", {}))
    return {name: item.load_bytes for name, item in made.items()}


def variables() -> Collection[str]:
    """Return the environment variables that this vLLM reads; it warns of others of its names, or refuses them."""
    known: Mapping[str, Any] = getattr(importlib.import_module("vllm.envs"), "environment_variables", {})
    return known.keys()


def child_environment() -> dict[str, str]:
    """Return variables that vLLM's processes need, unless the operator has set them.

    On CPU vLLM compiles the ranks of log probabilities with a C++ compiler at the first request that asks for them;
    without one, or without torch's headers, the engine dies. With this it goes on uncompiled.
    """
    return {"TORCHDYNAMO_SUPPRESS_ERRORS": "1"} if runs_on_cpu() else {}


def runs_on_cpu() -> bool:
    """Return whether this vLLM computes on the CPU."""
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())


def supports_ray() -> bool:
    """Return whether this vLLM's platform can have workers in a Ray cluster; its CPU platform cannot.

    vLLM itself checks that in EngineCore, whose error is written to the log only.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    return bool(getattr(platform, "ray_device_key", "not said"))


def prometheus_families() -> Iterable[PrometheusFamily]:
    """Return what vLLM and others have in this process's Prometheus registry."""
    from prometheus_client import REGISTRY

    families: Iterable[PrometheusFamily] = REGISTRY.collect()
    return families


def is_refusal(vllm: Vllm, error: Exception) -> bool:
    """Return whether vLLM says by this exception that the request is wrong.

    It has classes for that, and a plain ValueError or TypeError here and there (everywhere before 0.20). The same come from
    calling it the wrong way, and from its own faults: so of those only what a `raise` in vLLM's code made is a refusal.
    """
    if isinstance(error, vllm.refusals):
        return True
    last = error.__traceback__
    if last is None or not isinstance(error, vllm.client_errors):
        return False
    while last.tb_next is not None:
        last = last.tb_next
    module = str(last.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == "vllm" and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def too_large(error: Exception) -> str | None:
    """Return what vLLM's loaders say of a file that decodes to more than they take; None if the error is another one.

    That is a plain ValueError, known by its advice to set an environment variable, which is for the operator and left out.
    """
    text = str(error)
    if text.startswith("Maximum file size exceeded"):
        return text
    said = _ADVICE.sub("", text)
    return said if said != text else None


def is_dead(llm: EngineClient) -> bool:
    """Return whether the engine has died; costs no round trip."""
    return bool(getattr(llm, "errored", False))


def has_begun(llm: EngineClient, request_id: str, count: int) -> bool | None:
    """Return whether vLLM has begun to work on a request that was added; None if this vLLM does not say.

    vLLM's own process learns that with the first token, also of a whole answer, which is put into the collector at its end.

    Args:
        llm: the engine.
        request_id: as it was given to `add_request`.
        count: completions of the request; vLLM keeps a state for each until it has finished.
    """
    processor = getattr(llm, "output_processor", None)
    states = getattr(processor, "request_states", None)
    if states is None:
        return None
    given = getattr(processor, "external_req_ids", None)
    if given is not None:  # 0.14 has ids of its own, 0.11 has not
        ids = given.get(request_id, ())
    else:
        parent = getattr(processor, "parent_requests", {}).get(request_id)
        ids = (request_id,) if parent is None else parent.child_requests
    prefilling = [getattr(states[own], "is_prefilling", None) for own in ids if own in states]
    if not prefilling or None in prefilling:  # none either where it has finished, and its output is on the way
        return None
    return len(prefilling) < count or not all(prefilling)


def attach(collector: Collector, put: Callable[[Output | Exception], None]) -> None:
    """Send everything that vLLM puts into a request's collector to `put` (outputs and exceptions, in order).

    vLLM wakes a task per request and token otherwise; called in the engine's loop, this costs one call.
    """
    collector.put = put
    early: Output | Exception | None
    try:
        early = collector.get_nowait()
    except Exception as error:  # noqa: BLE001 - whatever vLLM put there is the request's outcome
        early = error
    if early is not None:
        put(early)


@dataclass(frozen=True)
class Facts:
    """What a model can take; 0 is not known.

    Attributes:
        max_tokens: of a prompt and its answer together.
        vocabulary: token ids are below it.
        multimodal: whether it takes more than texts.
    """

    max_tokens: int = 0
    vocabulary: int = 0
    multimodal: bool = True


def facts(llm: EngineClient) -> Facts:
    """Return what the engine's model can take."""
    config = llm.model_config
    if config is None:
        return Facts()
    return Facts(int(config.max_model_len), int(config.get_vocab_size()), bool(config.is_multimodal_model))
