"""The client against stock tritonserver with a model that waits for known times and says when it sent what."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from loadtest.measures import Measures
from loadtest.record import Outcome, Record, Request
from support.reference import run_reference
from support.repositories import CHECKOUT, client_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.serving import Parts, Serve
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
MODEL = CHECKOUT / "tests" / "support" / "known_delays.py"
FIRST_MS, GAP_MS, TOKENS = 60, 15, 8


def prepare(model: Path) -> None:
    """Put the model of known delays in the place of vLLM's."""
    shutil.rmtree(model / "1")
    (model / "1").mkdir()
    shutil.copy(MODEL, model / "1" / "model.py")


@pytest.fixture(scope="module")
def delays(light_serving: Serve) -> Iterator[TritonServer]:
    with light_serving(prepare=prepare) as running:
        yield running


def run(server: TritonServer, folder: Path, parameters: dict[str, Any], *arguments: str) -> tuple[dict[str, Any], list[Any]]:
    """Run the client; return its report and its records in the order of their requests."""
    (folder / "p.jsonl").write_text(json.dumps({"prompt": "x", "parameters": parameters}))
    files = ["--input-prompts", "p.jsonl", "--results-format", "jsonl", "--results-file", "r.jsonl", "--report", "report.json"]
    argv = client_command("-u", server.grpc_url, *files, *arguments)
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (folder / "r.jsonl").read_text().splitlines()]
    return json.loads((folder / "report.json").read_text()), sorted(records, key=lambda record: record["index"])


def test_times_are_those_of_the_model(delays: TritonServer, tmp_path: Path) -> None:
    """Each piece came after the model had sent it, and not all at the end; the figures are those of the pieces."""
    parameters = {"first_ms": FIRST_MS, "gap_ms": GAP_MS, "max_tokens": TOKENS}
    shape = ["-s", "--num-prompts", "60", "--max-concurrency", "3", "--num-warmups", "3"]
    report, records = run(delays, tmp_path, parameters, *shape)
    streamed = False
    for record in records:
        came, *sent = map(float, record["completions"][0].split())
        assert len(record["times"]) == record["output_tokens"] == len(sent) == TOKENS
        start = record["sent"]
        took = [piece - came for piece in sent]  # as the model saw it
        seen = [piece - start for piece in record["times"]]  # as the client did
        assert all(there >= (FIRST_MS + number * GAP_MS) / 1e3 for number, there in enumerate(took))
        assert all(there <= here for there, here in zip(took, seen, strict=True))
        streamed = streamed or seen[0] < took[-1]
    assert streamed  # even a busy machine is in time once
    assert report["median_ttft_ms"] == pytest.approx(1e3 * median(r["times"][0] - r["sent"] for r in records))
    assert report["median_e2el_ms"] == pytest.approx(1e3 * median(r["times"][-1] - r["sent"] for r in records))
    gaps = [later - earlier for record in records for earlier, later in pairwise(record["times"])]
    assert report["mean_itl_ms"] == pytest.approx(1e3 * sum(gaps) / len(gaps))
    assert report["total_output_tokens"] == 60 * TOKENS


def test_latency_grows_when_the_rate_passes_the_capacity(delays: TritonServer, tmp_path: Path) -> None:
    """One at a time of 40 ms is 25 a second; with twice as many each waits longer than the one before, from when it was due."""
    parameters = {"first_ms": 40, "gap_ms": 0, "max_tokens": 1, "alone": True}
    report, records = run(delays, tmp_path, parameters, "--num-prompts", "60", "--request-rate", "50", "--burstiness", "inf")
    dues = sorted(record["due"] for record in records)
    ends = sorted(record["times"][-1] for record in records)
    # the n-th request is due after 20 ms each, and no machine can answer it before 40 ms each
    for number, (due, end) in enumerate(zip(dues, ends, strict=True)):
        assert end - due >= 0.9 * number * (0.040 - 0.020)
    assert report["request_throughput"] <= 25.5
    assert report["max_concurrent_requests"] > 10
    assert report["from_planned_time"]["p99_e2el_ms"] >= report["p99_e2el_ms"]


def test_concurrency_holds_requests_back_and_the_planned_time_shows_it(delays: TritonServer, tmp_path: Path) -> None:
    """One time is measured from the send. The other one is measured from the planned time, and includes the wait."""
    parameters = {"first_ms": 40, "gap_ms": 0, "max_tokens": 1}
    shape = ["--num-prompts", "60", "--request-rate", "1000", "--max-concurrency", "2"]
    report, records = run(delays, tmp_path, parameters, *shape)
    ends = sorted([(record["sent"], 1) for record in records] + [(record["times"][-1], -1) for record in records])
    running = [sum(change for _, change in ends[: number + 1]) for number in range(len(ends))]
    assert max(running) == 2
    assert report["median_e2el_ms"] == pytest.approx(1000 * median(record["times"][-1] - record["sent"] for record in records))
    # All are due within about 60 ms. With two at a time, no machine can answer the 30th before 600 ms.
    assert report["from_planned_time"]["median_e2el_ms"] > 400


def test_the_same_time_stamps_give_the_figures_of_vllm_bench_serve(parts: Parts) -> None:
    """Its own code calculates them in the environment: answers of one token and of many, several in a piece, and failures."""
    source = random.Random(5)
    requests: list[dict[str, Any]] = []
    for number in range(400):
        sent = source.uniform(0, 9) if number else 0.0
        pieces = source.randint(1, 30)
        times = [sent + source.expovariate(20)]
        for _ in range(pieces - 1):
            times.append(times[-1] + source.expovariate(40))
        tokens = pieces + source.randint(0, 3)
        failed = number % 17 == 5
        requests.append({"sent": sent, "times": times, "tokens": tokens, "input_tokens": number, "failed": failed})
    asked = {
        "requests": requests,
        "duration": 12.5,
        "percents": [25, 90, 99, 99.9],
        "goals": {"ttft": 60, "tpot": 25, "e2el": 700},
    }
    theirs = run_reference(parts.environment, "reference_figures.py", asked)
    measures = Measures(asked["goals"])
    for each in sorted(requests, key=lambda request: request["sent"]):
        request = Request(0, "", {}, stream=True)
        record = Record(
            request, due=each["sent"], sent=each["sent"], output_tokens=each["tokens"], input_tokens=each["input_tokens"]
        )
        record.times = each["times"]
        record.outcome = Outcome.FAILED if each["failed"] else Outcome.ANSWERED
        measures.add(record)
    ours = measures.figures(asked["duration"], asked["percents"])
    assert len(theirs) > 30
    assert 0 < theirs["request_goodput"] < theirs["request_throughput"]
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-9)
