"""Servers that several modules of end-to-end tests share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support import models
from support.reference import ONE_THREAD
from support.settings import with_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
    """A server whose requests can be met in the middle of their work; it publishes vLLM's metrics."""
    with serving(long_arguments, environment=ONE_THREAD, prepare=with_metrics) as running:
        yield running


@pytest.fixture(scope="session")
def made_models(parts: Parts, session_folder: Path) -> models.MadeModels:
    """A Llama with two adapters and an embedding model."""
    return models.make_models(parts.environment, session_folder / "made_models")


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
