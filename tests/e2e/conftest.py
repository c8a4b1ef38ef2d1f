"""Servers that several modules of end-to-end tests share."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support import models
from support.first_start import SET_BY_VLLM, FirstStart, reload
from support.once import once
from support.reference import ONE_THREAD
from support.serving import EXPLICIT
from support.settings import with_metrics, with_parameter
from support.sightings import Sightings
from support.stop_notes import Notes
from support.wide_server import QUEUE_SECONDS, TIMEOUT_SECONDS, WIDE_SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.first_start import Reloaded
    from support.serving import Parts, Serve
    from vllm_env.serve.server import TritonServer

SLOTS = 2  # max_num_seqs of `long_server`: a third request waits


@pytest.fixture(scope="session")
def long_arguments(parts: Parts) -> dict[str, object]:
    """Engine arguments for answers of half a minute, two at a time."""
    model = models.long_standin(parts.environment)
    return {"model": str(model), "max_model_len": models.LONG_POSITIONS, "max_num_seqs": SLOTS}


@pytest.fixture(scope="session")
def long_server(serving: Serve, long_arguments: dict[str, object]) -> Iterator[TritonServer]:
    """A server whose requests can be met in the middle of their work; it publishes vLLM's metrics, and notices a hung engine."""

    def prepare(model: Path) -> None:
        with_metrics(model)
        with_parameter(model, "ENGINE_TIMEOUT_SECONDS", "20")

    with serving(long_arguments, environment=ONE_THREAD, prepare=prepare) as running:
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
        with_parameter(model, "MAX_ANSWER_TOKENS", str(WIDE_SLOTS * models.LONG_POSITIONS))  # one request may fill all slots
        notes.prepare(model)

    with serving({**long_arguments, "max_num_seqs": WIDE_SLOTS}, environment=ONE_THREAD, prepare=prepare) as running:
        yield running


@pytest.fixture(scope="session")
def first_start(serving: Serve, session_folder: Path) -> Iterator[FirstStart]:
    """A server that starts with an empty vLLM cache, publishes metrics, and loads and unloads its model when told."""
    cache = {"VLLM_CACHE_ROOT": str(session_folder / "first_start"), SET_BY_VLLM: ""}
    sightings = Sightings(cache)
    control = (EXPLICIT, "--load-model=vllm")
    with ExitStack() as stack:
        with sightings.watching():
            server = stack.enter_context(serving(environment={**ONE_THREAD, **cache}, prepare=with_metrics, arguments=control))
        yield FirstStart(server, cache, sightings)


@pytest.fixture(scope="session")
def reloaded(first_start: FirstStart) -> Reloaded:
    """What the unload and the second load of `first_start` showed."""
    return reload(first_start)


@pytest.fixture(scope="session")
def made_models(parts: Parts) -> models.MadeModels:
    """A Llama with two adapters and an embedding model, made once for all workers; read them, do not change them."""

    def make(folder: Path) -> Path:
        models.make_models(parts.environment, folder)
        return folder

    return models.models_in(once("made_models", make), parts.environment)


@pytest.fixture(scope="session")
def llama_server(serving: Serve, made_models: models.MadeModels) -> Iterator[TritonServer]:
    """A server with the Llama and its adapters `one` and `two`."""

    def prepare(model: Path) -> None:
        names = dict(zip(("one", "two"), map(str, made_models.adapters), strict=True))
        (model / "multi_lora.json").write_text(json.dumps(names), encoding="utf-8")

    engine = {"model": str(made_models.llama), "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with serving(engine, environment=ONE_THREAD, prepare=prepare) as running:
        yield running


@pytest.fixture(scope="session")
def embedding_server(serving: Serve, made_models: models.MadeModels) -> Iterator[TritonServer]:
    """A server with the BERT."""
    engine = {"model": str(made_models.embedding), "runner": "pooling", "max_model_len": 128}
    with serving(engine, environment=ONE_THREAD) as running:
        yield running
