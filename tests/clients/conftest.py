"""What the tests of real clients share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clients import standin
from clients.lane import HERE, Clients, Lane, install
from support import models
from support.openai_server import openai_server
from support.reference import ONE_THREAD
from support.serving import CPU_ARGUMENTS, EXPLICIT
from support.settings import openai_url, with_openai

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.serving import Parts, Serve


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave these tests to ``--slow`` and to runs that name their folder."""
    if not any("tests/clients" in argument for argument in config.args):
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def clients() -> Clients:
    """All clients, at their recorded versions."""
    return install()


@pytest.fixture(scope="session")
def lane(serving: Serve, parts: Parts, session_folder: Path) -> Iterator[Lane]:
    """The two servers; Triton's loads and unloads its model when told."""
    model = models.chatting(parts.environment, standin.REQUEST)
    engine = {**CPU_ARGUMENTS, "model": str(model), "max_model_len": standin.POSITIONS, "reasoning_parser": "deepseek_r1"}
    options = {**engine, "served_model_name": "vllm", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    arguments = (EXPLICIT, "--load-model=vllm")
    with (
        openai_server(parts.environment, options, session_folder / "openai.log") as theirs,
        serving({**engine, "tool_parser": "hermes"}, environment=ONE_THREAD, prepare=with_openai, arguments=arguments) as triton,
    ):
        yield Lane(triton, openai_url(triton), theirs)
