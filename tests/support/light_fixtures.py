"""Servers for tests that would pass with any model: without an engine, and with `--slow` with the real vLLM.

See `support.engineless`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import pytest

from support import engineless
from support.once import once
from support.reference import ONE_THREAD
from support.serving import Parts, Serve, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_env.serve.server import TritonServer

LONG_POSITIONS = 65_536


@pytest.fixture(scope="session")
def light_parts(request: pytest.FixtureRequest, parts: Parts) -> Parts:
    """What light servers are made of; with `--slow` the same as all others."""
    if request.config.getoption("--slow"):
        return parts
    environment = once("engineless", functools.partial(engineless.make_environment, parts.environment))
    return dataclasses.replace(parts, environment=environment)


@pytest.fixture(scope="session")
def light_serving(light_parts: Parts) -> Serve:
    """Starts a light server of a test's own, as `serving` does."""
    return functools.partial(serve, light_parts)


@pytest.fixture(scope="session")
def light_long_arguments(request: pytest.FixtureRequest) -> dict[str, object]:
    """Engine arguments for answers of half a minute and more, two at a time."""
    if request.config.getoption("--slow"):
        return dict(request.getfixturevalue("long_arguments"))
    return {"max_model_len": LONG_POSITIONS, "max_num_seqs": 2}


@pytest.fixture(scope="session")
def light_server(light_serving: Serve) -> Iterator[TritonServer]:
    """A light server, shared by all tests that leave it as they found it."""
    with light_serving(environment=ONE_THREAD) as running:
        yield running
