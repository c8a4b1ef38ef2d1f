"""The README's tables and the program agree."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from triton_vllm.admission.limits import Limits
from triton_vllm.loading.settings import Settings
from vllm_env.cli.commands import COMMANDS
from vllm_env.cli.parser import build_parser
from vllm_env.prefix.prune import RULES

ROOT = Path(__file__).resolve().parent.parent.parent
# first words of a row of the README's tables -> the report with its figures, in benchmarks/results
SERVING = {
    "H200, Llama-7B": "serving_h200_llama-7b",
    "H200, OPT-125M": "serving_h200_opt-125m",
    "2 CPU cores, tiny OPT": "serving",
}
STARTS = {
    "H200, archive": ("cold_start_h200", "archive"),
    "H200, `--layout directory`": ("cold_start_h200", "directory"),
    "H200, another run, archive": ("cold_start_h200_warm", "archive"),
    "H200, another run, archive, `--warm`": ("cold_start_h200_warm", "archive-warm"),
    "H200, another run, `--layout directory`": ("cold_start_h200_warm", "directory"),
    "H200, another run, `--layout directory`, `--warm`": ("cold_start_h200_warm", "directory-warm"),
    "2 CPU cores, plain conda-pack archive": ("cold_start", "baseline"),
    "2 CPU cores, archive": ("cold_start", "archive"),
    "2 CPU cores, `--layout directory`": ("cold_start", "directory"),
}


def speed_rows(columns: int) -> dict[str, list[str]]:
    """Return the rows of the README's speed table with this many columns of figures, by their first column."""
    section = (ROOT / "README.md").read_text("utf-8").split("<!-- speed")[1].split("<!-- end of speed")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows if len(row) == columns + 1 and not row[0].startswith("machine")}


def measured(report: str) -> dict[str, Any]:
    """Return a report's content."""
    content: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / f"{report}.json").read_text("utf-8"))
    return content


def closed_loops(report: str) -> list[dict[str, Any]]:
    """Return a report's rounds of the closed loop, without those where vLLM's server merges tokens as we did."""
    rounds = measured(report)["rounds"]
    return [entry for entry in rounds if not entry["cell"].get("rate") and entry["cell"].get("stream_interval", 1) == 1]


def speed_ratio(report: str, in_flight: int, *, stream: bool, to: str) -> str:
    """Return our tokens per second over another's, the median over rounds."""
    speeds: dict[tuple[str, int], float] = {}
    for entry in closed_loops(report):
        if (entry["cell"]["in_flight"], entry["cell"]["stream"]) == (in_flight, stream):
            figures = entry["measured"]
            speeds[entry["target"], entry["number"]] = figures.get("output_throughput") or figures["tokens_per_s"]
    rounds = [number for target, number in speeds if target == "triton"]
    return f"{median(speeds['triton', n] / speeds[to, n] for n in rounds):.2f}"


def ready_seconds(report: str, case: str, *, first: bool) -> str:
    """Return the seconds from launch to ready of a first start, or the median of later ones."""
    starts = [s for s in measured(report)["starts"] if s["case"] == case and s.get("first", s["number"] == 0) == first]
    return f"{median(s['ready_s'] for s in starts):.0f} s"


def test_the_options_table_is_that_of_help():
    """Every option of the parser stands in the README with its argument and its help text, and no other does."""
    table = (ROOT / "README.md").read_text("utf-8").split("<!-- options")[1].split("<!-- end of options")[0]
    documented = dict(re.findall(r"^\| `(--.+?)` \| (.+) \|$", table, re.MULTILINE))
    declared = {}
    for action in build_parser()._actions:
        option = action.option_strings[-1]
        if option in ("--help", "--version"):
            continue
        argument = "|".join(action.choices) if action.choices else action.metavar or ""
        declared[f"{option} {argument}".strip().replace("|", r"\|")] = action.help
    assert documented == declared


def test_the_pinned_versions_of_the_readme_are_those_of_the_spec():
    """The profile that the README shows as an example is the one that the spec pins."""
    readme = (ROOT / "README.md").read_text("utf-8")
    spec = (ROOT / "env" / "vllm_env.toml").read_text("utf-8")
    shown = re.search(r"--vllm (\d+\.\d+\.\d+)", readme)
    assert shown
    assert f'vllm = "{shown[1]}"' in spec


def test_the_parameters_table_is_that_of_the_adapter():
    """Every parameter that the adapter reads from config.pbtxt stands in the README with its default, and no other."""
    table = (ROOT / "README.md").read_text("utf-8").split("<!-- parameters")[1].split("<!-- end of parameters")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| .*? \| (?:`(.*)`)? ?\|$", table, re.MULTILINE))
    source = (ROOT / "model_repository/vllm/1/triton_vllm/loading/settings.py").read_text("utf-8")
    read = dict(re.findall(r'value\("(\w+)", \w+, Settings\.(\w+)\)', source))
    plain = {name: getattr(Settings, field) for name, field in read.items()}
    plain |= {field.name.upper(): field.default for field in fields(Limits)}
    assert documented == {name: _as_parameter(value) for name, value in plain.items()}


def _as_parameter(value: Any) -> str:
    """Write a default as config.pbtxt would have it."""
    if isinstance(value, tuple | str):
        return value if isinstance(value, str) else ",".join(value)
    return str(value).lower() if isinstance(value, bool) else f"{value:.12g}"


def test_the_rules_table_is_that_of_the_program():
    """Every rule by which something is left out stands in the README with its profiles and its reason, and no other."""
    table = (ROOT / "README.md").read_text("utf-8").split("<!-- rules")[1].split("<!-- end of rules")[0]
    documented = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+) \|$", table, re.MULTILINE)
    assert documented == [(rule.name, ", ".join(rule.profiles), rule.reason) for rule in RULES]


def test_every_subcommand_is_named():
    """The README names each subcommand."""
    readme = (ROOT / "README.md").read_text("utf-8")
    section = readme.split("Subcommands:")[1].split("Exit codes")[0]
    assert all(re.search(rf"`(\./gen_vllm_env\.sh )?{name}[ `]", section) for name in COMMANDS), COMMANDS


def test_the_speed_table_is_that_of_the_benchmarks():
    """Every ratio in the README is that of the newest report, and every load of the report's table is in the README."""
    expected = {}
    for label, report in SERVING.items():
        for in_flight in {entry["cell"]["in_flight"] for entry in closed_loops(report)}:
            expected[f"{label}, {in_flight}"] = [
                speed_ratio(report, in_flight, stream=stream, to=to) for to in ("openai", "engine") for stream in (True, False)
            ]
    assert speed_rows(4) == expected


def test_the_table_of_starts_is_that_of_the_benchmarks():
    """Every launch to ready in the README is that of the newest report."""
    assert speed_rows(2) == {
        label: [ready_seconds(report, case, first=first) for first in (True, False)] for label, (report, case) in STARTS.items()
    }
