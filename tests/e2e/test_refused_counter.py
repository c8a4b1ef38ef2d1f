"""Requests that are refused are counted on Triton's metrics page, by reason, from both APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.metrics_page import read_metrics
from support.model_requests import ask
from support.patience import wait_for
from support.reference import ONE_THREAD
from support.settings import openai_url, with_metrics, with_openai
from support.triton_client import post
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from pathlib import Path

    from support.serving import Parts, Serve

pytestmark = pytest.mark.e2e
NAME = "vllm_env_requests_refused_total"
PROMPT, _ = FACTS[2]


def test_refused_requests_are_counted(light_serving: Serve, light_parts: Parts) -> None:
    """Each once, and none that was answered; each reason is there from the start. Only the real vLLM has the OpenAI port."""

    def prepare(model: Path) -> None:
        with_metrics(model)
        if light_parts.engine:
            with_openai(model)

    with light_serving(environment=ONE_THREAD, prepare=prepare) as server:
        page = f"http://127.0.0.1:{server.ports.metrics}/metrics"

        def counted() -> dict[str, float]:
            return {labels["reason"]: value for name, labels, value in read_metrics(page).samples if name == NAME}

        none = {"invalid_arg": 0.0, "unsupported": 0.0, "unavailable": 0.0, "internal": 0.0}
        wait_for(lambda: counted() == none, "the counter")
        assert not ask(server, PROMPT, {"max_tokens": 1}).error
        refused = 2
        for _ in range(refused):
            assert ask(server, PROMPT, {"max_token": 1}).error
        if light_parts.engine:
            refused += 1
            body = {"model": "vllm", "prompt": PROMPT, "n": 100_000}
            assert post(openai_url(server), "/v1/completions", body, timeout=300)[0] == 400
        wait_for(lambda: counted() == {**none, "invalid_arg": refused}, lambda: f"{refused} refusals: {counted()}")
