"""Servers that several modules of end-to-end tests share."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from support import models
from support.first_start import reload
from support.parts_fixtures import in_parts, others, packager, parts_repository, place  # noqa: F401 - fixtures
from support.reference import FRESH, ONE_THREAD
from support.serving import CPU_ARGUMENTS, EXPLICIT
from support.settings import with_metrics, with_openai, with_parameter
from support.stop_notes import Notes
from support.trace_collector import trace_collector
from support.wide_server import GRACE_SECONDS, QUEUE_SECONDS, TIMEOUT_SECONDS, WIDE_SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.first_start import FirstStart, Reloaded
    from support.serving import Parts, Serve
    from support.trace_collector import Collector
    from vllm_env.serve.server import TritonServer

TRACING = {**ONE_THREAD, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
SLOTS = 2  # max_num_seqs of `long_server`: a third request waits


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the inner loop's one answer unless it is named: the other tests prove more."""
    name = "test_one_answer.py"
    return True if collection_path.name == name and not any(name in argument for argument in config.args) else None


@pytest.fixture(scope="session", autouse=True)
def fresh_references(pytestconfig: pytest.Config) -> Iterator[None]:
    """With --slow, ask the references again (`support/reference.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("--slow"):
            patch.setenv(FRESH, "1")
        yield


@pytest.fixture(scope="session")
def long_arguments(parts: Parts) -> dict[str, object]:
    """Engine arguments for answers of half a minute, two at a time."""
    model = models.long_standin(parts.environment)
    return {"model": str(model), "max_model_len": models.LONG_POSITIONS, "max_num_seqs": SLOTS}


@pytest.fixture(scope="session")
def long_server(serving: Serve, long_arguments: dict[str, object]) -> Iterator[TritonServer]:
    """A server whose requests can be met in the middle of their work, on both APIs.

    It publishes vLLM's metrics, notices a hung engine, and unloads its model after a short grace period.
    """

    def prepare(model: Path) -> None:
        with_metrics(model)
        with_openai(model)
        with_parameter(model, "ENGINE_TIMEOUT_SECONDS", "20")
        with_parameter(model, "UNLOAD_GRACE_SECONDS", "6")  # in which tests see what is refused

    control = (EXPLICIT, "--load-model=vllm")
    with serving(long_arguments, environment=ONE_THREAD, prepare=prepare, arguments=control) as running:
        yield running


@pytest.fixture(scope="session")
def notes(session_folder: Path) -> Notes:
    """What the model of `wide_server` writes down."""
    return Notes(session_folder / "notes.txt")


@pytest.fixture(scope="session")
def wide_server(serving: Serve, long_arguments: dict[str, object], notes: Notes) -> Iterator[TritonServer]:
    """A server with many slots that bounds what requests may wait and take, and notes when it takes and stops them."""

    def prepare(model: Path) -> None:
        with_metrics(model)
        with_parameter(model, "MAX_QUEUE_SECONDS", str(QUEUE_SECONDS))
        with_parameter(model, "DEFAULT_TIMEOUT_SECONDS", str(TIMEOUT_SECONDS))
        with_parameter(model, "UNLOAD_GRACE_SECONDS", str(GRACE_SECONDS))
        with_parameter(model, "MAX_ANSWER_TOKENS", str(WIDE_SLOTS * models.LONG_POSITIONS))  # one request may fill all slots
        with_parameter(model, "MAX_N", str(WIDE_SLOTS))
        notes.prepare(model)

    with serving({**long_arguments, "max_num_seqs": WIDE_SLOTS}, environment=ONE_THREAD, prepare=prepare) as running:
        yield running


@pytest.fixture(scope="session")
def reloaded(first_start: FirstStart) -> Reloaded:
    """What the unload and the second load of `first_start` showed."""
    return reload(first_start)


@pytest.fixture(scope="session")
def made_models(parts: Parts) -> models.MadeModels:
    """A Llama with two adapters, an embedding model and a cross-encoder."""
    return models.make_models(parts.environment)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Takes the traces of Triton and of vLLM."""
    with trace_collector() as running:
        yield running


@pytest.fixture(scope="session")
def lora_directory(session_folder: Path) -> Path:
    """LORA_DIRECTORY of `llama_server`, empty at first."""
    folder = session_folder / "lora_directory"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def llama_server(
    serving: Serve, made_models: models.MadeModels, collector: Collector, lora_directory: Path
) -> Iterator[TritonServer]:
    """A server whose operator allows everything, with the Llama.

    In `multi_lora.json` are `one`, `fixed`, which is the same adapter, and `two`; there is room for two of LORA_DIRECTORY.
    """

    def prepare(model: Path) -> None:
        with_metrics(model)
        with_parameter(model, "OPERATOR_REQUESTS", "sleep, wake_up, is_sleeping, reset_prefix_cache, load_lora")
        with_parameter(model, "ALLOWED_REQUEST_FIELDS", "extra_args,kv_transfer_params,session_id,data_parallel_rank")
        with_parameter(model, "LORA_DIRECTORY", str(lora_directory))
        with_openai(model)
        one, two = made_models.adapters
        # as the official backend has it: from the directory on in which the server was started
        (model / "multi_lora.json").write_text(json.dumps({"one": str(one), "two": str(two), "fixed": "fixed"}), encoding="utf-8")
        shutil.copytree(one, model / "fixed")

    engine = {"model": str(made_models.llama), "enable_prefix_caching": True, **models.LORA_ENGINE, "enable_lora": "True"}
    engine |= {"otlp_traces_endpoint": f"{collector.url}/vllm"}
    headers = ("--grpc-header-forward-pattern=traceparent|tracestate",)
    with serving(engine, environment=TRACING, arguments=headers, prepare=prepare) as running:
        yield running


@pytest.fixture(scope="session")
def chat_arguments(parts: Parts) -> dict[str, object]:
    """Engine arguments of `chat_server` that vLLM's own server takes, too."""
    model = str(models.chat(parts.environment))
    lengths = {"max_model_len": 512, "max_num_batched_tokens": 48, "max_num_seqs": 16}
    return {**CPU_ARGUMENTS, **lengths, "model": model, "reasoning_parser": "deepseek_r1"}


@pytest.fixture(scope="session")
def chat_server(serving: Serve, chat_arguments: dict[str, object], collector: Collector) -> Iterator[TritonServer]:
    """A server that chats on both APIs, in short steps; its operator has chosen traces, also of Triton, and no metrics."""
    engine = {**chat_arguments, "tool_parser": "hermes", "otlp_traces_endpoint": f"{collector.url}/vllm"}
    tracing = ("mode=opentelemetry", "rate=1", "level=TIMESTAMPS", f"opentelemetry,url={collector.url}/triton")
    arguments = tuple(f"--trace-config={value}" for value in tracing)
    with serving(engine, environment=TRACING, arguments=arguments, prepare=with_openai) as running:
        yield running


@pytest.fixture(scope="session")
def embedding_server(serving: Serve, made_models: models.MadeModels) -> Iterator[TritonServer]:
    """A server with the BERT, on both APIs."""
    engine = {"model": str(made_models.embedding), "runner": "pooling", "max_model_len": 128}
    with serving(engine, environment=ONE_THREAD, prepare=with_openai) as running:
        yield running
