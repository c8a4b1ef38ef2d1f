"""What the package logs by Python's ``logging``."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from triton_vllm.base import python_logs


@pytest.fixture
def lines():
    """What reaches the server's log."""
    found: list[tuple[str, str]] = []
    log = SimpleNamespace(**{kind: lambda text, kind=kind: found.append((kind, text)) for kind in ("info", "warning", "error")})
    logger = logging.getLogger("triton_vllm")
    before = logger.handlers, logger.level
    python_logs.send_to(log)
    yield found
    logger.handlers, logger.level = before


def test_warnings_and_errors_reach_the_servers_log(lines):
    """Once each, with their arguments; those of other packages do not."""
    ours = logging.getLogger("triton_vllm.constraints.trials")
    ours.info("nothing")
    ours.warning("%s is refused", "a regex")
    ours.error("it failed")
    logging.getLogger("triton_vllmx").error("another's")
    assert lines == [("warning", "a regex is refused"), ("error", "it failed")]


def test_the_last_model_takes_them(lines):
    """A model that is loaded again in this process logs each line once."""
    log = SimpleNamespace(warning=lambda text: lines.append(("second", text)))
    python_logs.send_to(log)
    logging.getLogger("triton_vllm.chat").warning("once")
    assert lines == [("second", "once")]
