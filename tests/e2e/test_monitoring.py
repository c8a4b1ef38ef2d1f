"""The dashboard and the rules of deploy/monitoring against a running server, by a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from support.metrics_page import read_metrics
from support.model_requests import ask
from support.monitoring import FOLDER, queries, used
from support.patience import wait_for
from vllm_env.serve.server import free_ports
from vllm_env.serve.standin import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.first_start import FirstStart

pytestmark = pytest.mark.e2e
SCRAPES = 5


def test_queries_name_only_metrics_and_labels_that_the_server_has(first_start: FirstStart) -> None:
    """Under the names of the pinned vLLM and of this Triton."""
    found = read_metrics(first_start.page).samples
    there = {(name, label) for name, labels, _ in found for label in ["", *labels]}
    assert used() - there == set()


@pytest.fixture
def prometheus(first_start: FirstStart, tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus with the files of deploy/monitoring, which reads the server each second."""
    if not shutil.which("prometheus"):
        pytest.skip("there is no prometheus (apt-get install prometheus)")
    shutil.copytree(FOLDER, tmp_path / "monitoring")
    config = tmp_path / "monitoring/prometheus.yml"
    text = config.read_text("utf-8")
    target = urllib.parse.urlsplit(first_start.page).netloc
    assert ("localhost:8002" in text, "scrape_interval: 15s" in text) == (True, True)
    config.write_text(text.replace("localhost:8002", target).replace("scrape_interval: 15s", "scrape_interval: 1s"))
    address = f"127.0.0.1:{free_ports().http}"
    options = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}"]
    log = tmp_path / "prometheus.log"
    with log.open("wb") as output, subprocess.Popen(["prometheus", *options], stdout=output, stderr=output) as process:
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def got(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
        return json.load(answer)["data"]


def test_a_prometheus_loads_it_and_answers_each_query(prometheus: str, first_start: FirstStart) -> None:
    """Each query has a series of the model, and each rule is evaluated."""
    prompt, _ = FACTS[0]

    def has_figures() -> bool:
        ask(first_start.server, prompt, {"temperature": 0})
        with contextlib.suppress(OSError):  # it does not listen yet
            counted = got(prometheus, "/api/v1/query", query='count_over_time(vllm:num_requests_running{model="vllm"}[1m])')
            return bool(counted["result"]) and int(counted["result"][0]["value"][1]) >= SCRAPES
        return False

    wait_for(has_figures, "figures in Prometheus")
    empty = [query for query in queries() if not got(prometheus, "/api/v1/query", query=query)["result"]]
    assert empty == []

    def evaluated() -> list[Any]:
        (group,) = got(prometheus, "/api/v1/rules")["groups"]
        return group["rules"] if all(rule["health"] != "unknown" for rule in group["rules"]) else []

    rules = wait_for(evaluated, "the rules' first evaluation")
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {"TritonDown", "VllmGone"}.isdisjoint(rule["name"] for rule in rules if rule["state"] != "inactive")
