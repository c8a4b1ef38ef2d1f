"""Servers for tests that would pass with any model: without an engine, and with `--slow` with the real vLLM.

See `support.engineless`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest

from support import engineless, models
from support.once import once
from support.reference import ONE_THREAD
from support.serving import MORE_ARGUMENTS, Parts, Serve, serve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from vllm_env.serve.server import TritonServer


@pytest.fixture(scope="session")
def light_parts(request: pytest.FixtureRequest, parts: Parts) -> Parts:
    """What light servers are made of; with `--slow` the same as all others."""
    if request.config.getoption("--slow"):
        return parts
    environment = once("engineless", functools.partial(engineless.make_environment, parts.environment))
    return dataclasses.replace(parts, environment=environment, engine=False)


@pytest.fixture(scope="session")
def light_serving(request: pytest.FixtureRequest, light_parts: Parts) -> Serve:
    """Starts a light server of a test's own, as `serving` does."""
    if request.config.getoption("--slow"):
        return functools.partial(serve, light_parts)

    def start(engine_args: Mapping[str, Any] | None = None, **options: Any) -> AbstractContextManager[TritonServer]:
        others = {name: None for name in MORE_ARGUMENTS if name not in engineless.TAKEN}  # this machine's, for a real engine
        return serve(light_parts, {**others, **(engine_args or {})}, **options)

    return start


@pytest.fixture(scope="session")
def light_long_arguments(request: pytest.FixtureRequest, light_parts: Parts) -> dict[str, object]:
    """Engine arguments for answers of half a minute and more, two at a time."""
    arguments: dict[str, object] = {"max_model_len": models.LONG_POSITIONS, "max_num_seqs": 2}
    if request.config.getoption("--slow"):
        arguments["model"] = str(models.long_standin(light_parts.environment))
    return arguments


@pytest.fixture(scope="session")
def light_server(light_serving: Serve) -> Iterator[TritonServer]:
    """A light server, shared by all tests that leave it as they found it."""
    with light_serving(environment=ONE_THREAD) as running:
        yield running
