"""The tables of measurements in docs/why.md and docs/speed.md are those of the committed results."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

from support.reports import FIRST_MINUTE, measured, ready_seconds

ROOT = Path(__file__).resolve().parent.parent.parent
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
    section = (ROOT / page).read_text("utf-8").split(f"<!-- {mark}:")[1].split("<!-- end of")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[1:] if len(row) == columns + 1 and not row[0].startswith("machine")}


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


def of_attacks(report: str) -> dict[str, list[tuple[float, float]]]:
    """Return for each attack the neighbour's longest wait in each round, next to that with as many clients."""
    waits: dict[str, list[tuple[float, float]]] = {}
    for row in measured(report)["rows"]:
        waits.setdefault(row["name"], []).append((row["attack"]["wait"], row["clients"]["wait"]))
    assert {len(rounds) for rounds in waits.values()} == {3}
    return waits


def medians(waits: dict[str, list[tuple[float, float]]]) -> list[list[float]]:
    """Return the medians of both waits for each attack."""
    return [[median(side) for side in zip(*rounds, strict=True)] for rounds in waits.values()]


def test_the_table_of_waits_is_that_of_its_runs():
    """The longest waits by kind, as medians of the rounds, and those of the older run."""
    before = measured("neighbour_before_h100-20261126-1549-1f45eb2")["rows"]
    expected = {}
    for label, cells in rows_of("docs/speed.md", "waits", 6).items():
        report = cells[-1].strip("`")
        rows = measured(report)["rows"]
        assert {row["kind"] for row in rows} == {label}
        refused = {row["name"] for row in rows if row["attack"]["reason"]}
        pairs = medians(of_attacks(report))
        worse = max(one - many for one, many in pairs)
        most = [max(side) for side in zip(*pairs, strict=True)]
        old = max(row["attack"]["wait"] for row in before if row["kind"] == label)
        shown_most = [f"{most[0]:.2f}", f"{most[1]:.2f}", f"{worse:+.2f}", f"{old:.2f}"]
        expected[label] = [f"{len(pairs)}, {len(refused)}", *shown_most, cells[-1]]
    assert rows_of("docs/speed.md", "waits", 6) == expected
    assert len(expected) == 4


def test_the_wait_with_a_thread_for_each_core_is_that_of_its_run():
    """The text below the table names the run and its largest difference."""
    report = "neighbour_lists-20261127-1545-7daa8884"
    worse = max(one - many for one, many in medians(of_attacks(report)))
    assert f"last row was {worse:+.2f} s\n(`{report}`" in (ROOT / "docs/speed.md").read_text("utf-8")


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


TWO_FRONT_ENDS = "serving_h100_llama-7b_count_2-20261127-2329-440b9965"
OLDER_TWO_FRONT_ENDS = "serving_h100_llama-7b_count_2-20261125-2323-1d50583"
OPENAI_PORT = "serving_h100_openai_port-20261125-2331-1d50583"
SAME_PYTHON = "serving_h100_openai_port-20261126-1223-8f0cb582"


def compared(rounds: list[dict[str, Any]], target: str, *figures: str) -> list[str]:
    """Return our tokens per second over vLLM's server's, then each figure in ms: ours, and the server's."""
    ours, theirs = (of_rounds(rounds, name, "output_throughput") for name in (target, "openai"))
    cells = [shown([ours[number] / theirs[number] for number in ours], 2)]
    return cells + [shown(list(of_rounds(rounds, name, f).values()), 1, 1000) for f in figures for name in (target, "openai")]


def test_the_tables_of_front_ends_on_an_h100():
    """Two front ends each at all loads; one front end each, asked by the OpenAI port and by gRPC."""
    for marker, report in (("h100_newest", TWO_FRONT_ENDS), ("h100", OLDER_TWO_FRONT_ENDS)):
        figures = ("ttft_p50", "ttft_p99", "itl_p99")
        two = {f"{load[0]}": compared(rounds, "triton", *figures) for load, rounds in cells_of(report).items()}
        found = rows_of("docs/speed.md", marker, 7)
        found.pop("streams", None)
        assert found == two
        assert len(two) == 4
    for marker, report, grpc in (("h100", OPENAI_PORT, "grpc"), ("h100_libpython", SAME_PYTHON, "triton")):
        one = {
            f"{load[0]}, {name}": compared(rounds, target, "ttft_p50", "itl_p99")
            for load, rounds in cells_of(report).items()
            for target, name in {"port": "OpenAI port", grpc: "gRPC"}.items()
        }
        found = rows_of("docs/speed.md", marker, 5)
        found.pop("streams, asked by", None)
        assert found == one
        assert len(one) == 4


def test_the_table_of_why_has_32_and_256_streams_with_one_and_two_front_ends():
    """The same figures as in docs/speed.md, each next to a server with as many front ends."""
    runs = {"one": H200["Llama-7B"], "two": TWO_FRONT_ENDS}
    expected = {
        f"{front_ends}, {load[0]}": compared(rounds, "triton", "itl_p99")
        for front_ends, report in runs.items()
        for load, rounds in cells_of(report).items()
        if load[0] in (32, 256)
    }
    assert rows_of("docs/why.md", "speed", 3) == expected
    assert len(expected) == 4
    ratios = sorted(cells[0].split()[0] for cells in expected.values())
    assert f"{ratios[0]} to {ratios[-1]} times the tokens/s" in (ROOT / "README.md").read_text("utf-8")


STEPS = {
    "build, empty cache": "empty",
    "build with nothing to do": "again",
    "build, wheels and bytecode in the cache": "wheels",
    "build in a fresh clone, whole cache": "filled",
    "first start": "first",
    "later start": "later",
    "`vllm serve`": "vllm",
}


def test_the_table_of_builds_and_starts():
    """Both commits, every step of the run; only builds have processor seconds."""

    def values(commit: str, step: str, figure: str) -> list[float]:
        return [one[figure] for one in measured(FIRST_MINUTE) if (one["commit"], one["step"]) == (commit, step)]

    expected = {}
    for label, step in STEPS.items():
        seconds = [shown(values(commit, step, "seconds"), 1) for commit in ("1f45eb2", "707bb022")]
        used = [values(commit, step, "processor_s") for commit in ("1f45eb2", "707bb022")]
        expected[label] = seconds + [f"{median(one):.0f}" if label.startswith("build") else "-" for one in used]
    found = rows_of("docs/speed.md", "first_minute", 4)
    assert {label: cells for label, cells in found.items() if label != "step"} == expected
    assert len(values("707bb022", "empty", "seconds")) == 5


def test_the_table_of_the_open_loop():
    """Time to the first token at each rate, in milliseconds."""
    expected: dict[str, dict[str, list[float]]] = {}
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
