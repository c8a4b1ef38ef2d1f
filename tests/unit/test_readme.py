"""The README and the documentation agree with the program, with the measurements and with each other."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from support.pages import IN_CONTAINERS, TYPED, blocks_in
from triton_vllm.base.dialect import Dialect
from triton_vllm.base.limits import Limits
from triton_vllm.base.official import NAME
from triton_vllm.startup.settings import Settings
from vllm_env.cli.commands import COMMANDS
from vllm_env.cli.main import _next_commands
from vllm_env.cli.parser import build_parser
from vllm_env.lock.pylock import read_pylock
from vllm_env.plan import BuildRequest
from vllm_env.prefix.prefix import BUILD_SPACE, EXTRACTED_SPACE
from vllm_env.prefix.prune import RULES
from vllm_env.serve.standin import FACTS
from vllm_env.triton.root import TritonRoot, rules_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    *("README.md", "docs/README.md", "docs/command_line.md", "docs/first_start.md", "docs/how_it_works.md", "docs/parameters.md"),
    *("docs/serving.md", "docs/several_machines.md", "docs/troubleshooting.md"),
)
"""Each block of code of these is run by a test, or the page says why not."""
# first words of a row of the tables in docs/speed.md -> the report with its figures, in benchmarks/results
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


def rows_of(page: str, mark: str, columns: int) -> dict[str, list[str]]:
    """Return the rows of a page's marked tables with this many columns after the first, by their first column."""
    section = (ROOT / page).read_text("utf-8").split(f"<!-- {mark}")[1].split("<!-- end of")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[1:] if len(row) == columns + 1 and not row[0].startswith("machine")}


def measured(report: str) -> dict[str, Any]:
    """Return a report's content."""
    content: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / f"{report}.json").read_text("utf-8"))
    return content


def of_rounds(rounds: list[dict[str, Any]], target: str, figure: str) -> dict[int, float]:
    """Return a target's figure in each round, under its name of now or, in older reports, of then."""
    names = (figure, {"output_throughput": "tokens_per_s", "itl_p99": "gap_p99"}.get(figure, figure))
    mine = [entry for entry in rounds if entry["target"] == target]
    return {entry["number"]: next(entry["measured"][name] for name in names if name in entry["measured"]) for entry in mine}


def ratios(rounds: list[dict[str, Any]], to: str) -> list[float]:
    """Return our tokens per second over another's, round by round."""
    ours, theirs = (of_rounds(rounds, target, "output_throughput") for target in ("triton", to))
    return [ours[number] / theirs[number] for number in ours]


def cells_of(report: str) -> dict[tuple[int, ...], list[dict[str, Any]]]:
    """Return the closed loop's rounds of each load: in flight, prompt's tokens, answer's tokens, and whether it streams."""
    found: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for entry in measured(report)["rounds"]:
        cell = entry["cell"]
        if cell.get("rate") or cell.get("stream_interval", 1) > 1:
            continue
        load = (cell["in_flight"], cell["prompt_tokens"], cell["answer_tokens"], cell["stream"])
        found.setdefault(load, []).append(entry)
    return found


def speed_cells(report: str, in_flight: int) -> list[str]:
    """Return a row of the table: medians over rounds with the least and the most, and the gaps of streams."""
    found = {load[-1]: rounds for load, rounds in cells_of(report).items() if load[0] == in_flight}
    speeds = [ratios(found[stream], to) for to in ("openai", "engine") for stream in (True, False)]
    gaps = [1000 * median(of_rounds(found[True], target, "itl_p99").values()) for target in ("triton", "openai")]
    return [f"{median(s):.2f} ({min(s):.2f}-{max(s):.2f})" for s in speeds] + [f"{gaps[0]:.1f} / {gaps[1]:.1f}"]


def ready_seconds(report: str, case: str, *, first: bool) -> str:
    """Return the seconds from launch to ready of a first start, or the median of later ones."""
    starts = [s for s in measured(report)["starts"] if s["case"] == case and s.get("first", s["number"] == 0) == first]
    return f"{median(s['ready_s'] for s in starts):.0f} s"


def test_the_options_table_is_that_of_help():
    """Every option of the parser is in docs/command_line.md with its argument and its help text, and no other is."""
    table = (ROOT / "docs/command_line.md").read_text("utf-8").split("<!-- options")[1].split("<!-- end of options")[0]
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
    assert f"built, vLLM {shown[1]} for Triton" in readme


def test_the_parameters_table_is_that_of_the_adapter():
    """Every parameter that the adapter reads from config.pbtxt is in docs/parameters.md with its default, and no other."""
    table = (ROOT / "docs/parameters.md").read_text("utf-8").split("<!-- parameters")[1].split("<!-- end of parameters")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| .*? \| (?:`(.*)`)? ?\|$", table, re.MULTILINE))
    source = (ROOT / "model_repository/vllm/1/triton_vllm/startup/settings.py").read_text("utf-8")
    read = dict(re.findall(r'value\("(\w+)", \w+, Settings\.(\w+)\)', source))
    plain = {name: getattr(Settings, field) for name, field in read.items()}
    plain |= {field.name.upper(): field.default for field in fields(Limits)}
    assert documented == {name: _as_parameter(value) for name, value in plain.items()}


def _as_parameter(value: Any) -> str:
    """Write a default as config.pbtxt would have it."""
    if isinstance(value, Dialect):
        return NAME if value.is_official else ""
    if isinstance(value, tuple | str):
        return value if isinstance(value, str) else ",".join(value)
    return str(value).lower() if isinstance(value, bool) else f"{value:.12g}"


def test_the_rules_table_is_that_of_the_program():
    """Every rule by which something is left out is in docs/command_line.md with its profiles and its reason, and no other."""
    table = (ROOT / "docs/command_line.md").read_text("utf-8").split("<!-- rules")[1].split("<!-- end of rules")[0]
    documented = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+) \|$", table, re.MULTILINE)
    assert documented == [(rule.name, ", ".join(rule.profiles), rule.reason) for rule in RULES]


def test_every_subcommand_is_named():
    """docs/command_line.md names each subcommand."""
    page = (ROOT / "docs/command_line.md").read_text("utf-8")
    section = page.split("\n## Subcommands\n")[1].split("\n## ")[0]
    assert all(re.search(rf"`(\./gen_vllm_env\.sh )?{name}[ `]", section) for name in COMMANDS), COMMANDS


def test_the_speed_table_is_that_of_the_benchmarks():
    """Every ratio and gap in docs/speed.md is that of the report, and every load of the report is there."""
    expected = {}
    for label, report in SERVING.items():
        for in_flight in {load[0] for load in cells_of(report)}:
            expected[f"{label}, {in_flight}"] = speed_cells(report, in_flight)
    assert rows_of("docs/speed.md", "speed", 5) == expected


def test_the_table_of_starts_is_that_of_the_benchmarks():
    """Every launch to ready in docs/speed.md is that of the report."""
    assert rows_of("docs/speed.md", "speed", 2) == {
        label: [ready_seconds(report, case, first=first) for first in (True, False)] for label, (report, case) in STARTS.items()
    }


def test_the_page_says_that_executors_differ_for_as_long_as_they_do():
    """A worker of its own in vLLM's server and none in ours: the lead is not the model's, and the page must say so."""
    used = {entry["target"]: entry["cpu_s"] for entry in measured("serving")["rounds"]}
    assert ("worker" in used["openai"], "worker" in used["triton"]) == (True, False), (
        "now equal: the words of docs/speed.md are no longer true"
    )
    words = (ROOT / "docs/speed.md").read_text("utf-8").split("<!-- speed")[0].split("## Each with its own executor")[1]
    assert "On two CPU cores the lead comes from the executor" in words


def test_tokens_of_a_response_are_those_of_the_benchmark():
    """With 32 streams on two cores."""
    (rounds,) = (rounds for load, rounds in cells_of("serving").items() if load[0] == 32 and load[-1])
    pieces = median(of_rounds(rounds, "triton", "pieces_per_answer").values())
    said = re.search(r"with 32 in flight, (\d+) tokens", (ROOT / "docs/speed.md").read_text("utf-8"))
    assert said
    assert float(said[1]) == round(rounds[0]["cell"]["answer_tokens"] / pieces)


def test_the_table_of_gaps_is_that_of_its_run():
    """Tokens a second over the engine's, gaps and pieces, by the medians of the first table of gaps_h200.md."""
    run = (ROOT / "benchmarks/results/gaps_h200.md").read_text("utf-8").split("## What was tried")[0]
    found = {}
    for line in run.splitlines():
        where, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
        if len(cells) == 5 and where.partition(", ")[0] in ("llama-7b", "opt-125m"):
            found[where, cells[0]] = [cell.split(" ")[0].replace(",", "") for cell in cells[1:]]
    expected = {}
    for (where, target), (speed, gap, pieces, _) in found.items():
        if target.startswith("triton"):
            engine, theirs = found[where, "engine in process"], found.get((where, "vLLM's server"), ["-", "-"])
            label = f"{where}{target.removeprefix('triton')}".replace("llama-7b", "Llama-7B").replace("opt-125m", "OPT-125M")
            expected[label] = [f"{float(speed) / float(engine[0]):.2f}", gap, theirs[1], pieces]
    assert rows_of("docs/speed.md", "gaps", 4) == expected
    assert len(expected) == 8


H200 = {
    "Llama-7B": "serving_h200_llama-7b-20261123-0619-d502e19",
    "OPT-125M": "serving_h200_opt-125m-20261123-0635-d502e19",
    "OPT-125M `count: 4`": "serving_h200_opt-125m_count_4-20261123-0636-d502e19",
}
OPEN_LOOP = "serving_h200_open_loop-20261123-0618-d502e19"


def shown(values: list[float], digits: int, factor: float = 1.0) -> str:
    """Return a median with the least and the most, as tables show them."""
    middle, least, most = (f"{factor * value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} ({least}-{most})"


def h200_rows() -> dict[str, list[str]]:
    """Return the rows of all closed loops of the runs on H200s."""
    expected = {}
    for label, report in H200.items():
        for load, rounds in cells_of(report).items():
            theirs = bool(of_rounds(rounds, "openai", "itl_p99"))
            gap = {name: list(of_rounds(rounds, name, "itl_p99").values()) for name in ("triton", "openai")}
            pieces = median(of_rounds(rounds, "triton", "pieces_per_answer").values())
            expected[f"{label}, {load[0]}"] = [
                shown(ratios(rounds, "engine"), 2),
                shown(ratios(rounds, "openai"), 2) if theirs else "-",
                shown(gap["triton"], 1, 1000),
                shown(gap["openai"], 1, 1000) if theirs else "-",
                f"{pieces:.1f}",
            ]
    return expected


def test_the_table_of_the_newest_vllm_on_h200s():
    """Every closed loop of its runs, and no other."""
    assert rows_of("docs/speed.md", "h200", 5) == h200_rows()
    assert len(h200_rows()) == 6


def test_the_readme_has_every_load_of_the_model_that_both_served():
    """All rows of docs/speed.md with a figure of vLLM's server, and at most four."""
    expected = {
        load: [over_server, over_engine, gap, server_gap]
        for load, (over_engine, over_server, gap, server_gap, _) in h200_rows().items()
        if over_server != "-"
    }
    assert rows_of("README.md", "h200", 4) == expected
    assert len(expected) <= 4


def test_the_table_of_the_open_loop():
    """Time to the first token at each rate, in milliseconds."""
    expected = {}
    for entry in measured(OPEN_LOOP)["rounds"]:
        if entry["cell"]["rate"]:
            row = expected.setdefault(f"{entry['cell']['rate']:.0f}", {"triton": [], "openai": []})
            row[entry["target"]].append(entry["measured"]["ttft_p99"])
    found = rows_of("docs/speed.md", "h200", 2)
    found.pop("requests/s")
    assert found == {rate: [shown(row[name], 0, 1000) for name in ("triton", "openai")] for rate, row in expected.items()}
    assert len(expected) == 3


def test_other_loads_are_those_of_their_runs():
    """The least and the most of the medians, over every load of the run with as many requests in flight."""
    section = (ROOT / "docs/speed.md").read_text("utf-8").split("<!-- loads")[1].split("<!-- end of loads")[0]
    rows = re.findall(r"^\| (.+), (\d+)(?: to (\d+))? \| ([\d, ]+) \| ([\d, ]+) \| (.+) \| `(\w+)` \|$", section, re.MULTILINE)
    assert len(rows) == 4
    for _, least, most, prompts, answers, said, report in rows:
        chosen = {load: r for load, r in cells_of(report).items() if int(least) <= load[0] <= int(most or least)}
        assert {load[1] for load in chosen} == {int(n) for n in prompts.split(",")}
        assert {load[2] for load in chosen} == {int(n) for n in answers.split(",")}
        medians = [median(ratios(rounds, "openai")) for rounds in chosen.values()]
        assert said == f"{min(medians):.2f} to {max(medians):.2f}"


def test_what_a_page_leads_to_is_there():
    """Links with their headings, and files of this repository that are named in backquotes."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert [f"{page.name}: {target}" for page in pages for target in dead_links(page)] == []


def dead_links(page: Path) -> list[str]:
    """Return the links of a page whose file or heading is missing, and the files that it names and that are not there."""
    text = page.read_text("utf-8")
    dead = [target for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text) if not is_there(page, target)]
    dead += [
        name
        for name in re.findall(r"`((?:docs|tests|tools|env|client|benchmarks)/[\w./-]*\w)`", text)
        if not (ROOT / name).exists()
    ]
    for name in re.findall(r"`(\w+\.(?:md|svg))`", text):
        if not (ROOT / "benchmarks/results" / name).is_file() and not (ROOT / name).is_file():
            dead.append(name)
    return dead


def is_there(page: Path, target: str) -> bool:
    """Return whether a link leads to a file, and to a heading of it."""
    name, _, heading = target.partition("#")
    file = page.parent / name if name else page
    if not file.is_file():
        return False
    headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
    return not heading or heading in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


def test_nothing_that_a_build_leaves_is_for_git():
    """Each file and folder of the table in docs/command_line.md; an ignored file is not added by accident."""
    section = (ROOT / "docs/command_line.md").read_text("utf-8").split("\n## What a build leaves\n")[1].split("\n## ")[0]
    names = re.findall(r"^\| `([\w.]+/?)` \|", section, re.MULTILINE)
    assert len(names) > 5
    for name in [*names, "vllm_env/", "vllm_engine_args.json"]:
        path = f"model_repository/vllm/{name}"
        assert subprocess.run(["git", "check-ignore", "--quiet", "--no-index", path], cwd=ROOT, check=False).returncode == 0, name


def test_the_readme_is_short():
    """What does not fit is for a page of docs."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(readme.splitlines()) <= 130
    assert len(readme.split()) <= 1600


def test_each_page_is_in_the_index():
    """docs/README.md leads to all the others."""
    index = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/README.md").read_text("utf-8")))
    assert index == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_run_or_says_why_not(page):
    """A command of README that no test runs has to get one, or a reason."""
    blocks = [block for block in blocks_in(ROOT / page) if not block.reason]
    assert {block.language for block in blocks} <= {"sh"}
    assert [command for block in blocks for command in block.commands if not (page == "README.md" and is_run(command))] == []


def is_run(command: str) -> bool:
    """Return whether a test runs a command of README; `support.pages.requests_in` takes each of its `curl` lines."""
    return command.startswith("curl ") or command in TYPED or any(re.search(line, command) for line in IN_CONTAINERS)


def test_what_is_run_is_in_the_readme():
    """Each command that a test is said to type is there, and so is the test."""
    commands = [command for block in blocks_in(ROOT / "README.md") for command in block.commands]
    assert set(TYPED) <= set(commands)
    assert all((ROOT / "tests/e2e" / test).is_file() for test in TYPED.values())
    assert all(any(re.search(line, command) for command in commands) for line in IN_CONTAINERS)


def test_the_readme_types_what_a_build_names_next(monkeypatch):
    """The commands after "Next:", which test_published.py runs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("vllm_env.cli.main.TOOLS", ROOT / ".tools/venv/bin")
    built = SimpleNamespace(triton=TritonRoot(ROOT / ".triton", "24.10", rules_of("24.10")))
    request = BuildRequest(repository=ROOT / "model_repository")
    assert {shlex.join(command) for command in _next_commands(built, request)} <= set(TYPED)


def test_the_readme_shows_real_answers():
    """Those that the stand-in was taught, which the end-to-end tests receive."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"^# ('.+' -> '.+')$", readme, re.MULTILINE) == [f"{prompt!r} -> {answer!r}" for prompt, answer in FACTS]
    assert re.findall(r'"text_output":"(.+)"', readme) == ["".join(FACTS[2])]


def test_the_price_is_that_of_locks_and_reports():
    """Bytes by the locks, space as the build asks for it, and the starts of the report."""
    table = (ROOT / "README.md").read_text("utf-8").split("\n## Price\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    cost = {name: [cpu, cuda] for name, cpu, cuda in rows}
    profiles = ("cpu", "cuda")
    locks = [read_pylock(ROOT / f"env/pylock.vllm_env-{profile}.toml") for profile in profiles]
    assert cost["wheels to download"] == [f"{sum(wheel.size for wheel in lock.wheels) / 1e6:,.0f} MB" for lock in locks]
    space = [f"{BUILD_SPACE[profile] / 1e9:g} GB; {EXTRACTED_SPACE[profile] / 1e9:g} GB" for profile in profiles]
    assert cost["free disk for the build; in the server's `/tmp` for each model (layout `archive`)"] == space
    starts = [ready_seconds("cold_start", "archive", first=first) for first in (True, False)]
    assert cost["launch to ready, first and later starts"][0].startswith(f"{' and '.join(starts)} on two cores")


def test_messages_that_are_explained_exist():
    """The pieces of each message in docs/troubleshooting.md are in the sources; Triton's own are in tests."""
    sources = "\n".join(read_sources())
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    cells = re.findall(r"^\| (.+?) \| ", page, re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`(.+?)`", cell)]
    assert len(messages) > 50
    assert [message for message in messages if any(piece not in sources for piece in message.split("…"))] == []


def read_sources() -> Iterator[str]:
    """Yield the product's sources and one test's, with strings that go over several lines joined."""
    folders = ("env/vllm_env", "model_repository/vllm/1", "client")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    for file in (*files, ROOT / "gen_vllm_env.sh", ROOT / "tests/e2e/test_model_chat.py"):
        yield re.sub(r'"\s*\n\s*f?"', "", file.read_text("utf-8"))
