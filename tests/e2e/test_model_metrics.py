"""vLLM's metrics on Triton's metrics endpoint, against those of vLLM's own server under the same load."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from support.first_start import FIRST, TEXTS, settled
from support.metrics_page import Metrics, read_metrics
from support.model_requests import ask
from support.openai_server import openai_server
from support.patience import wait_for
from support.reference import kept
from support.serving import CPU_ARGUMENTS
from support.triton_client import post
from triton_vllm.base.dialect import HISTOGRAMS, OFFICIAL_COUNTERS
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from support.first_start import FirstStart, Reloaded
    from support.serving import Parts

pytestmark = pytest.mark.e2e
PROMPT, ANSWER = FACTS[2]
COUNTS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count")
DOCUMENTED = {  # by the official backend, with the names that vLLM has given them in turn, without a sample's suffix
    "prompt tokens": ("prompt_tokens",),
    "generation tokens": ("generation_tokens",),
    "time to first token": ("time_to_first_token_seconds",),
    "time per output token": (
        "time_per_output_token_seconds",  # deprecated in 0.11 for the next one, then removed
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
    ),
    "end-to-end latency": ("e2e_request_latency_seconds",),
    "prompt tokens per request": ("request_prompt_tokens",),
    "generation tokens per request": ("request_generation_tokens",),
    "best_of": ("request_params_best_of",),
    "n": ("request_params_n",),
}
GONE = {"best_of"}  # from vLLM's V1 engine


@pytest.fixture(scope="module")
def openai_metrics(parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """What vLLM's own server exports after the load, with the same engine arguments."""
    arguments = {"model": str(parts.standin), **CPU_ARGUMENTS}
    requests = [{"model": arguments["model"], "prompt": text, **FIRST} for text in TEXTS]

    def ask_vllm() -> Any:
        with openai_server(parts.environment, arguments, tmp_path_factory.mktemp("openai") / "server.log") as url:
            for request in requests:
                status, body = post(url, "/v1/completions", request, timeout=300)
                assert status == 200, body
            found = settled(url + "/metrics")
            assert found.total("vllm:e2e_request_latency_seconds_count") == len(TEXTS)  # else it is not kept
            return found.samples

    samples = kept(parts.environment, "openai_server.py", [arguments, requests], parts.standin, ask_vllm)
    return Metrics(tuple((name, labels, value) for name, labels, value in samples))


@pytest.fixture
def triton_metrics(first_start: FirstStart) -> Metrics:
    """What Triton exports after the same load, half of it streamed."""
    return first_start.metrics


def test_all_of_vllms_metrics_with_equal_counts(triton_metrics: Metrics, openai_metrics: Metrics) -> None:
    """Every sample that vLLM's server exports is there, labelled with the model; tokens and requests are counted alike."""
    metrics = triton_metrics
    assert openai_metrics.names("vllm:") - metrics.names("vllm:") == set()
    assert {name: metrics.total(name) for name in COUNTS} == {name: openai_metrics.total(name) for name in COUNTS}
    assert metrics.total("vllm:generation_tokens_total") == 16 * len(TEXTS)
    assert all(labels["model"] == "vllm" and labels["version"] == "1" for labels in metrics.labels("vllm:"))
    assert {labels.get("model_name", "vllm") for labels in metrics.labels("vllm:")} == {"vllm"}
    assert metrics.total("vllm:num_requests_running") == metrics.total("vllm:num_requests_waiting") == 0


@pytest.mark.parametrize("meaning", DOCUMENTED)
def test_a_documented_metric_has_vllms_name_and_count(meaning: str, triton_metrics: Metrics, openai_metrics: Metrics) -> None:
    """All samples of the metric, under the names that this vLLM gives it, and as much counted as by vLLM's own server."""
    family = re.compile(rf"vllm:(?:{'|'.join(DOCUMENTED[meaning])})_(total|bucket|sum|count)")
    samples = {name for name in openai_metrics.names("vllm:") if family.fullmatch(name)}
    assert samples or meaning in GONE
    assert {name for name in triton_metrics.names("vllm:") if family.fullmatch(name)} == samples
    exact = re.compile(r".*(_total|_count|_tokens_sum|_params_\w+_sum)")  # other sums are seconds
    counts = {name: triton_metrics.total(name) for name in samples if exact.fullmatch(name)}
    assert counts == {name: openai_metrics.total(name) for name in counts}
    assert all(counts.values())
    assert bool(counts) == bool(samples)


def test_official_buckets_are_among_vllms(triton_metrics: Metrics) -> None:
    """So their counts are exact with COMPATIBILITY=official; and vLLM has several times as many metrics."""
    names = {name.rpartition("_")[0] for name in triton_metrics.names("vllm:") if name.endswith("_count")}
    for name, (_, bounds) in HISTOGRAMS.items():
        found = {float(s[1]["le"]) for s in triton_metrics.samples if s[0] == f"{name}_bucket"}
        assert set(bounds) <= found or not found
    assert sum(name in names for name in HISTOGRAMS) >= len(HISTOGRAMS) - 1  # one has two names, an older and a newer one
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in triton_metrics.names("vllm:")}
    assert len(families) > 3 * len({*OFFICIAL_COUNTERS, *(name for name, _ in HISTOGRAMS.values())})


def test_metrics_leave_with_the_model_and_come_back_with_it(first_start: FirstStart, reloaded: Reloaded) -> None:
    """An unload lets the request in flight finish and removes the metrics; a load brings the model and them back."""
    assert (reloaded.end.error, reloaded.end.final) == ("", True)
    assert PROMPT + "".join(reloaded.parts) == reloaded.whole
    assert ask(first_start.server, PROMPT, {"temperature": 0}).text == PROMPT + ANSWER
    wait_for(lambda: read_metrics(first_start.page).total("vllm:generation_tokens_total") > 0, "metrics of the loaded model")
