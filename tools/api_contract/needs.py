"""The needs that the adapter's sources do not state by types; ``adapter`` reads the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# The first version without the V0 engine.
OLDEST = "0.11"


@dataclass(frozen=True)
class Member:
    """The use of one member of a class.

    Attributes:
        parameters: for a method, the parameters that are passed; None for an attribute, a field
            or an enum's member.
        awaited: whether the adapter awaits the method; None if both kinds work.
        since: the first version that must have it.
        default: a field's default, if the adapter relies on it.
    """

    parameters: tuple[str, ...] | None = None
    awaited: bool | None = None
    since: str = OLDEST
    default: str | None = None


_CHAT = "vllm.entrypoints.openai.chat_completion.protocol"
_CODEC = "vllm.v1.serial_utils"
# The first version whose parsers read a whole answer.
PARSERS = "0.26"
# From this version on, 1/node.py must work.
NODES = "0.28"
# Before this version the classes were elsewhere. The names are searched in all places.
MEDIA = "0.20"


def _method(*parameters: str, since: str = OLDEST) -> Member:
    return Member(parameters, awaited=False, since=since)


def _fields(*names: str, since: str = OLDEST) -> dict[str, Member]:
    return {name: Member(since=since) for name in names}


# Optional name (`vllm_api.names.OPTIONAL_PLACES`) -> the first version that must have it.
SINCE: Mapping[str, str] = {
    "parse_model_prompt": "0.20",
    "VLLMClientError": "0.28",
    "VLLMValidationError": "0.14",
    "GracefulHTTPError": "0.30",
    "GenerationError": "0.30",
    "RetryableRequestError": "0.32",
    "ChatParams": "0.20",
    "ThreadSafeHFTokenizerMixin": "0.22",
    "ImageMediaIO": OLDEST,
    "AudioMediaIO": OLDEST,
    "VideoMediaIO": OLDEST,
    "UniProcExecutor": OLDEST,
    "enable_envs_cache": "0.14",
    "disable_envs_cache": "0.20",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": OLDEST,
    "DEFAULT_LOGGING_CONFIG": OLDEST,
    "set_torch_threads_for_runtime": "0.32",
    "create_sample_logprobs": "0.12",
    "InputStreamError": "0.15",  # used where GracefulHTTPError is missing
    # The other names of vLLM's own server, `vllm_api.openai`.
    **dict.fromkeys(("build_app", "init_app_state", "make_arg_parser"), OLDEST),
    **dict.fromkeys(
        ("validate_parsed_serve_args", "FlexibleArgumentParser", "FrontendArgs"), OLDEST
    ),
}
# Class -> its used members, in addition to those that triton_vllm.base.protocols declares.
STATED: Mapping[str, Mapping[str, Member]] = {
    "vllm.v1.engine.async_llm.AsyncLLM": {
        "from_engine_args": _method("engine_args", "usage_context"),
        # For a model with several instances. If a vLLM lacks it, such a model is refused
        # (`vllm_api.lacking`).
        "from_vllm_config": _method(
            "vllm_config",
            "usage_context",
            "enable_log_requests",
            "disable_log_stats",
            "client_addresses",
            "client_count",
            "client_index",
            since="0.28",
        ),
        # It must be awaited before 0.20, and the adapter works with both kinds.
        "get_tokenizer": Member(()),
        **_fields("engine_core", "errored", "output_processor", "vllm_config"),
        **_fields("renderer", since="0.20"),
        **_fields("logger_manager", since="0.28"),
    },
    "vllm.v1.engine.core_client.AsyncMPClient": {
        "get_output_async": Member((), awaited=True),
        **_fields("outputs_queue"),
    },
    # `timestamp` tells which of several instances has the last step's figures.
    "vllm.v1.engine.EngineCoreOutputs": _fields("outputs", "scheduler_stats", "timestamp"),
    "vllm.v1.engine.EngineCoreOutput": _fields(
        "request_id", "new_logprobs", "new_prompt_logprobs_tensors"
    ),
    f"{_CODEC}.MsgpackEncoder": {"__init__": _method("size_threshold"), "encode": _method("obj")},
    f"{_CODEC}.MsgpackDecoder": {"__init__": _method("t"), "decode": _method("bufs")},
    "vllm.v1.engine.output_processor.RequestOutputCollector": {"put": _method("output")},
    # Tells which requests wait in vLLM's queue. Without them, only a stream's first output shows
    # that it has left the queue.
    "vllm.v1.engine.output_processor.OutputProcessor": {
        **_fields("request_states", "parent_requests"),
        **_fields("external_req_ids", since="0.14"),
    },
    "vllm.v1.engine.output_processor.RequestState": _fields("is_prefilling"),
    "vllm.v1.engine.parallel_sampling.ParentRequest": {
        **_fields("child_requests"),
        **_fields("external_req_id", since="0.14"),
    },
    "vllm.config.VllmConfig": _fields(
        "structured_outputs_config", "lora_config", "observability_config", "scheduler_config"
    ),
    "vllm.config.SchedulerConfig": _fields("max_num_seqs"),
    "vllm.config.ObservabilityConfig": _fields("otlp_traces_endpoint"),
    "vllm.config.StructuredOutputsConfig": {"backend": Member(default="'auto'")},
    "vllm.config.ModelConfig": {
        "get_vocab_size": _method(),
        "get_diff_sampling_param": _method(),
        **_fields(
            "max_model_len", "is_multimodal_model", "enable_sleep_mode", "hf_config", "model"
        ),
        **_fields("generation_config", "override_generation_config"),
    },
    "vllm.sampling_params.SamplingParams": {
        "n": Member(default="1"),
        "max_tokens": Member(default="16"),
        "min_tokens": Member(default="0"),
        **_fields("output_kind", "structured_outputs", "logprobs", "prompt_logprobs"),
        **_fields("stop", "bad_words", "allowed_token_ids", "logit_bias", "stop_token_ids"),
        **_fields("output_text_buffer_length", "skip_special_tokens"),
        **_fields("flat_logprobs", since="0.12"),
        **_fields("skip_clone", since="0.14"),
        **_fields("prompt_logprob_token_ids", "repetition_detection", since="0.32"),
        **_fields("stream_interval", since="0.33"),
    },
    "vllm.sampling_params.RepetitionDetectionParams": _fields(
        "max_pattern_size", "min_count", since="0.32"
    ),
    "vllm.sampling_params.StructuredOutputsParams": _fields(
        "json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern"
    ),
    "vllm.sampling_params.RequestOutputKind": _fields("DELTA", "FINAL_ONLY"),
    "vllm.pooling_params.PoolingParams": _fields("task"),
    "vllm.usage.usage_lib.UsageContext": _fields("API_SERVER"),
    "vllm.engine.arg_utils.AsyncEngineArgs": {
        **_fields("model", "tokenizer", "disable_log_stats", "enable_lora", "media_io_kwargs"),
        **_fields("distributed_executor_backend", "otlp_traces_endpoint", "worker_extension_cls"),
        # For a model with several instances, as for `launch_core_engines`.
        **_fields("_api_process_count", "_api_process_rank", since="0.28"),
        "create_engine_config": _method("usage_context", "headless"),
        # For an engine on several machines, as for `MultiprocExecutor`. A vLLM without the first
        # refuses it.
        **_fields("nnodes", "node_rank", "master_addr", "master_port", since=NODES),
    },
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": {
        "__init__": _method("vllm_config", "monitor_workers", since=NODES),
        "start_worker_monitor": _method("inline", since=NODES),
    },
    "vllm.lora.request.LoRARequest": _fields("lora_name", "lora_int_id", "lora_path"),
    "vllm.renderers.params.ChatParams": _fields(
        "chat_template", "chat_template_kwargs", since="0.20"
    ),
    "vllm.outputs.RequestOutput": _fields("kv_transfer_params"),
    # Lists that become arrays (`vllm_api.log_probabilities`).
    "vllm.logprobs.FlatLogprobs": _fields(
        "start_indices", "end_indices", "token_ids", "logprobs", since="0.12"
    ),
    "vllm.outputs.PoolingRequestOutput": _fields("error", since="0.32"),
    "vllm.outputs.RequestError": _fields("retryable", since="0.32"),
    "vllm.renderers.base.BaseRenderer": _fields("tokenizer", since="0.20"),
    # vLLM compiles grammars for this tokenizer in another way. Older versions have it elsewhere and
    # treat its grammars as all others.
    "vllm.tokenizers.mistral.MistralTokenizer": _fields("is_tekken", since="0.32"),
    # Parse a chat's answer (`vllm_api.parsers`). An older vLLM has no parsers that do so by
    # themselves.
    f"{_CHAT}.ChatCompletionRequest": {
        "build_chat_params": _method(
            "default_template", "default_template_content_format", since=PARSERS
        ),
        "extract_structured_outputs": _method(since=PARSERS),
        **_fields(
            "messages", "stream", "tools", "tool_choice", "parallel_tool_calls", since=PARSERS
        ),
        **_fields(
            "chat_template_kwargs", "add_generation_prompt", "continue_final_message", since=PARSERS
        ),
        **_fields("structured_outputs", since=PARSERS),
        **_fields("_grammar_from_parser", since="0.28"),
        **_fields("skip_special_tokens", "spaces_between_special_tokens", since=PARSERS),
    },
    "vllm.parser.abstract_parser.Parser": {
        "parse": _method(
            "model_output", "request", "enable_auto_tools", "model_output_token_ids", since=PARSERS
        ),
        "parse_delta": _method(
            "delta_text",
            "delta_token_ids",
            "request",
            "prompt_token_ids",
            "finished",
            since=PARSERS,
        ),
        "adjust_request": _method("request", since=PARSERS),
        "is_reasoning_end": _method("input_ids", since=PARSERS),
        "__init__": _method(
            "tokenizer", "tools", "model_config", "chat_template_kwargs", since=PARSERS
        ),
        **_fields("reasoning_parser", "reasoning_parser_cls", "model_tokenizer", since=PARSERS),
        "set_prompt_token_ids": _method("prompt_token_ids", since="0.32"),
        **_fields("always_adjust_request", since="0.32"),
    },
    "vllm.parser.ParserManager": {
        "get_parser": _method(
            "tool_parser_name",
            "reasoning_parser_name",
            "enable_auto_tools",
            "model_name",
            "is_harmony",
            since=PARSERS,
        ),
    },
    "vllm.parser.abstract_parser.DeltaMessage": _fields(
        "content", "reasoning", "tool_calls", since=PARSERS
    ),
    "vllm.parser.abstract_parser.FunctionCall": _fields("id", "name", "arguments", since=PARSERS),
    "vllm.tool_parsers.ToolParserManager": {"list_registered": _method(since=PARSERS)},
    "vllm.reasoning.ReasoningParserManager": {
        "list_registered": _method(since=PARSERS),
        "import_reasoning_parser": _method("plugin_path", since=PARSERS),
    },
    # Builds the pairs of texts for a cross-encoder.
    "vllm.entrypoints.pooling.scoring.protocol.ScoreTextRequest": {
        "build_tok_params": _method("model_config", since=PARSERS),
        **_fields("text_1", "text_2", since=PARSERS),
    },
    "vllm.entrypoints.pooling.scoring.io_processor.ScoringIOProcessor": {
        **_fields("render_async", since="0.28"),
    },
    # For a model with several instances: the addresses of the front ends, and which figures each
    # one gets.
    "vllm.v1.engine.utils.EngineZmqAddresses": _fields(
        "inputs", "outputs", "frontend_stats_publish_address", since="0.28"
    ),
    "vllm.v1.metrics.loggers.StatLoggerManager": {
        "record": _method(
            "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx", since="0.28"
        ),
    },
    # Decode pictures, audio and video.
    "vllm.multimodal.media.ImageMediaIO": {"load_bytes": _method("data", since=MEDIA)},
    "vllm.multimodal.media.AudioMediaIO": {"load_bytes": _method("data", since=MEDIA)},
    "vllm.multimodal.media.VideoMediaIO": {
        "load_bytes": _method("data", since=MEDIA),
        "__init__": _method("image_io", since=MEDIA),
    },
    "vllm.platforms.interface.Platform": {
        "is_cpu": _method(),
        **_fields("ray_device_key"),
    },
}
# Class -> the arguments that its constructor gets. If it requires any other argument, calls fail.
MADE: Mapping[str, tuple[str, ...]] = {
    "vllm.sampling_params.SamplingParams": ("max_tokens", "temperature", "logprobs", "output_kind"),
    "vllm.pooling_params.PoolingParams": ("task",),
    "vllm.sampling_params.StructuredOutputsParams": (),
    "vllm.engine.arg_utils.AsyncEngineArgs": (),
    "vllm.lora.request.LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
    "vllm.renderers.params.ChatParams": ("chat_template", "chat_template_kwargs"),
}
# The adapter passes the arguments of these classes' constructors by position.
POSITIONAL = ("vllm.lora.request.LoRARequest",)
# Names that the adapter uses in addition to PLACES: module -> names.
MODULES: Mapping[str, tuple[str, ...]] = {
    "vllm.envs": ("environment_variables",),
    _CODEC: ("MsgpackEncoder", "MsgpackDecoder"),
    "vllm.v1.engine": ("EngineCoreOutput",),
    "vllm.v1.engine.core_client": ("launch_core_engines",),
    "vllm.v1.engine.logprobs": ("convert_ids_list_to_tokens", "create_sample_logprobs"),
    # Used only if a parser is configured, which the adapter refuses with an older vLLM.
    "vllm.entrypoints.openai.chat_completion.protocol": (),
    "vllm.parser": (),
    "vllm.parser.abstract_parser": (),
    "vllm.reasoning": (),
    "vllm.tool_parsers": (),
    "vllm.third_party.pynvml": (),  # without it a GPU counts as busy
    "vllm.platforms": (),  # current_platform is created at its first use
    "vllm.model_executor.models.registry": (),
    "vllm.v1.executor.multiproc_executor": (),  # for an engine on several machines
    # Builds the pairs of texts for a cross-encoder, in versions that have such a class.
    "vllm.entrypoints.pooling.scoring": (),
    "vllm.entrypoints.chat_utils": (),
    "vllm.renderers.chat_utils": (),
}
# Variable that the adapter reads or sets -> the first vLLM that reads it, if that is not OLDEST.
VARIABLES: Mapping[str, str] = {
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0.17",
    "VLLM_ENGINE_READY_TIMEOUT_S": "0.14",
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": "0.24",
}
# The ends of a completion. `engine.outcome` treats "error" as a failure and passes the others on.
FINISH_REASONS = frozenset({"stop", "length", "abort", "error", "repetition"})
# Parameters of SamplingParams with token ids that vLLM checks. The adapter checks the others,
# `base.limits.TOKEN_IDS`.
CHECKED_BY_VLLM = frozenset({"prompt_logprob_token_ids"})
# Modules that report errors in a request. Not all versions have all of them.
REFUSING = (
    "vllm.sampling_params",
    "vllm.pooling_params",
    "vllm.inputs.preprocess",
    "vllm.inputs.parse",
    "vllm.v1.engine.processor",
    "vllm.v1.engine.input_processor",
    "vllm.v1.structured_output.utils",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.renderers.base",
    "vllm.renderers.params",
    "vllm.renderers.hf",
    "vllm.renderers.inputs.preprocess",
    "vllm.tokenizers.hf",
)
# The errors that these modules raise: refusals (`vllm_api.Vllm.client_errors`), and errors that
# are answered as faults.
REFUSALS = frozenset(
    {"VLLMClientError", "VLLMValidationError", "ValueError", "TypeError", "OverflowError"}
)
FAULTS = frozenset({"RuntimeError", "NotImplementedError", "TimeoutError"}) | {
    "ImportError",
    "KeyError",
    "AssertionError",
}
