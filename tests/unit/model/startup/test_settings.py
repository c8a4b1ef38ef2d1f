"""Parameters of config.pbtxt are read, with the official backend's names and words."""

from __future__ import annotations

import pytest

from triton_vllm.base.dialect import OFFICIAL, OURS
from triton_vllm.base.errors import ConfigError
from triton_vllm.base.limits import Limits
from triton_vllm.startup.settings import Settings, read


def config(**values):
    parameters = {name: {"string_value": value} for name, value in values.items()}
    return {"parameters": parameters, "model_transaction_policy": {"decoupled": True}}


def test_defaults():
    """Without parameters: no metrics, restart on."""
    assert read(config()) == Settings() == read(config(EXECUTION_ENV_PATH="x"))
    assert Settings().restart


@pytest.mark.parametrize(("word", "expected"), [("yes", True), ("true", True), ("no", False), ("False", False)])
def test_metrics_may_be_asked_for_by_yes_or_true(word, expected):
    """The documentation says yes, the official code true."""
    assert read(config(REPORT_CUSTOM_METRICS=word)).metrics is expected


def test_all_values():
    """Each parameter ends in its field."""
    given = config(
        ENABLE_VLLM_HEALTH_CHECK="true",
        RESTART_DEAD_ENGINE="false",
        GPU_DEVICE_IDS="0, 2",
        UNLOAD_GRACE_SECONDS="1.5",
        RESPONSE_SENDER_THREADS="3",
        ENGINE_TIMEOUT_SECONDS="40",
    )
    expected = Settings(health_check=True, restart=False, gpu_ids=(0, 2), unload_grace_s=1.5, engine_timeout_s=40, senders=3)
    assert read(given) == expected


def test_limits_have_parameters_of_their_names():
    """Numbers, 0 for none, and lists in place of the adapter's own."""
    given = config(
        MAX_N="4",
        MAX_QUEUE_SECONDS="0",
        DEFAULT_TIMEOUT_SECONDS="30",
        ALLOWED_MEDIA_DOMAINS="A.example.com, b.example.com",
        ALLOWED_CHAT_TEMPLATE_KWARGS="x",
    )
    domains = ("a.example.com", "b.example.com")
    expected = Limits(
        max_n=4,
        max_queue_seconds=0,
        default_timeout_seconds=30,
        allowed_media_domains=domains,
        allowed_chat_template_kwargs=("x",),
    )
    assert read(given).limits == expected
    assert read(config()).limits == Limits()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("REPORT_CUSTOM_METRICS", "perhaps", "REPORT_CUSTOM_METRICS must be true or false"),
        ("GPU_DEVICE_IDS", "a", "Invalid value for GPU_DEVICE_IDS: 'a'. Expected a comma-separated list"),
        ("GPU_DEVICE_IDS", "0,-1", "GPU_DEVICE_IDS contains invalid GPU ID(s): [-1]. GPU IDs must be non-negative"),
        ("GPU_DEVICE_IDS", "1,1", "GPU_DEVICE_IDS contains duplicate GPU ID(s): [1]. Each GPU ID must be unique."),
        ("RESPONSE_SENDER_THREADS", "-1", "RESPONSE_SENDER_THREADS must be between 0 and 16"),
        ("ENGINE_TIMEOUT_SECONDS", "-1", "ENGINE_TIMEOUT_SECONDS must be a number of seconds, not -1"),
        ("MAX_N", "-1", "MAX_N must not be negative, not -1; 0 is no limit"),
        ("MAX_TEXT_BYTES", "4 MB", 'MAX_TEXT_BYTES must be an integer, not "4 MB"'),
        ("ALLOWED_MEDIA_DOMAINS", "http://x", "ALLOWED_MEDIA_DOMAINS must be comma-separated host names"),
        ("ALLOWED_CHAT_TEMPLATE_KWARGS", "thinking,padding", "ALLOWED_CHAT_TEMPLATE_KWARGS must not name 'padding'"),
    ],
)
def test_wrong_values_are_refused_by_name(name, value, says):
    """The load fails with the parameter's name."""
    with pytest.raises(ConfigError) as caught:
        read(config(**{name: value}))
    assert says in str(caught.value)


def test_what_an_operator_allows_is_known():
    """A misspelt name would allow nothing without a word."""
    given = config(OPERATOR_REQUESTS="sleep, wake_up", ALLOWED_REQUEST_FIELDS="session_id", LORA_DIRECTORY="/adapters")
    found = read(given)
    assert found.lora_directory == "/adapters"
    assert (found.limits.operator_requests, found.limits.allowed_request_fields) == (("sleep", "wake_up"), ("session_id",))
    for name in ("OPERATOR_REQUESTS", "ALLOWED_REQUEST_FIELDS"):
        with pytest.raises(ConfigError, match=f"parameter {name} must name some of .*, not 'all'"):
            read(config(**{name: "all"}))


@pytest.mark.parametrize(
    ("given", "restarts"),
    [
        ({}, True),
        ({"ENABLE_VLLM_HEALTH_CHECK": "true"}, False),
        ({"COMPATIBILITY": "official"}, False),
        ({"ENABLE_VLLM_HEALTH_CHECK": "true", "RESTART_DEAD_ENGINE": "true"}, True),
        ({"COMPATIBILITY": "official", "RESTART_DEAD_ENGINE": "true"}, True),
        ({"COMPATIBILITY": "", "RESTART_DEAD_ENGINE": "false"}, False),
    ],
)
def test_a_health_check_is_one_by_itself(given, restarts):
    """As in the official backend it needs no second parameter; whoever asks for restarts gets them."""
    assert read(config(**given)).restart is restarts


def test_compatibility_is_with_the_official_backend_or_none():
    """A misspelt value would quietly be our own behaviour."""
    assert read(config(COMPATIBILITY="official")).dialect is OFFICIAL
    assert read(config(COMPATIBILITY="")).dialect is OURS
    with pytest.raises(ConfigError, match="COMPATIBILITY must be official or empty, not oficial"):
        read(config(COMPATIBILITY="oficial"))


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("MAX_REQUESTS_IN_FLGHT", "MAX_REQUESTS_IN_FLIGHT"),
        ("max_requests_in_flight", "MAX_REQUESTS_IN_FLIGHT"),
        ("MAX-N", "MAX_N"),
        ("MAX_IMAGE", "MAX_IMAGES"),
        ("MAX_TOLOS", "MAX_TOOLS"),
        ("ENGINE_TIMEOUT", "ENGINE_TIMEOUT_SECONDS"),
        ("ENABLE_HEALTH_CHECK", "ENABLE_VLLM_HEALTH_CHECK"),
        ("LORA_DIR", "LORA_DIRECTORY"),
        ("COMPATIBILTY", "COMPATIBILITY"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_right_one(name, right):
    """Its limit would not hold, without a word; an empty value is one that somebody wanted to set, too."""
    for value in ("7", ""):
        with pytest.raises(ConfigError) as caught:
            read(config(**{name: value}))
        assert f"config.pbtxt: there is no parameter {name}, did you mean {right}?" in str(caught.value)
    with pytest.raises(ConfigError, match="there is no parameter"):
        read(config(**{name: "7", "MAX_N": "2"}))


OTHERS = [
    "EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_BATCH_STRATEGY_PATH", "INFERENCE_MODE",
    "ENABLE_TORCH_COMPILE", "INTRA_OP_THREAD_COUNT", "tokenizer_dir", "decoupled_mode", "max_batch_size", "max_beam_width",
    "max_queue_size", "max_queue_delay_microseconds", "max_tokens", "max_num_tokens", "max_tokens_in_paged_kv_cache",
    "kv_cache_free_gpu_mem_fraction", "enable_chunked_context", "exclude_input_in_output", "gpt_model_type",
    "gpt_model_path", "batch_scheduler_policy", "cancellation_check_period_ms", "stats_check_period_ms",
    "lora_cache_optimal_adapter_size", "executor_worker_path", "logits_datatype", "multimodal_models_type",
    "shm-region-prefix-name", "MODEL_NAME", "MODEL_PATH", "MODEL_DIR", "MODEL_FILE", "LOG_DIRECTORY", "DATA_DIRECTORY",
    "CACHE_DIRECTORY", "LOG_LEVEL", "OWNER", "TEAM", "VERSION", "REVISION", "MAX_OUTPUTS", "MAX_NEW_TOKENS",
    "MAX_MODEL_LEN", "serving.kserve.io/version", "storageUri", "cost_center", "C",
    "timeout_seconds", "chat_template_kwargs", "stream_interval", "image_bytes", "device_ids",
]  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_parameters_of_others_pass(name):
    """Of Triton, its other backends, KServe and what people note down there."""
    assert read(config(**{name: "x"})) == Settings()
