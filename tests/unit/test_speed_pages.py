"""The tables of measurements in docs/speed.md and benchmarks/results are those of the committed results."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from support.reports import measured

ROOT = Path(__file__).resolve().parent.parent.parent


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


H200 = {
    "Llama-7B": "serving_h200_llama-7b-20261123-0619-d502e19",
    "OPT-125M": "serving_h200_opt-125m-20261123-0635-d502e19",
    "OPT-125M `count: 4`": "serving_h200_opt-125m_count_4-20261123-0636-d502e19",
}


def shown(values: list[float], digits: int, factor: float = 1.0) -> str:
    """Return a median with the least and the most, as tables show them."""
    middle, least, most = (f"{factor * value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} ({least}-{most})"


TWO_FRONT_ENDS = "serving_h100_llama-7b_count_2-20261127-2329-440b9965"


def compared(rounds: list[dict[str, Any]], target: str, *figures: str) -> list[str]:
    """Return our tokens per second over vLLM's server's, then each figure in ms: ours, and the server's."""
    ours, theirs = (of_rounds(rounds, name, "output_throughput") for name in (target, "openai"))
    cells = [shown([ours[number] / theirs[number] for number in ours], 2)]
    return cells + [shown(list(of_rounds(rounds, name, f).values()), 1, 1000) for f in figures for name in (target, "openai")]


def front_ends(*figures: str) -> dict[str, list[str]]:
    """Return the rows of both runs, each next to a server with as many front ends."""
    runs = {"one": H200["Llama-7B"], "two": TWO_FRONT_ENDS}
    return {
        f"{front_ends}, {load[0]}": compared(rounds, "triton", *figures)
        for front_ends, report in runs.items()
        for load, rounds in sorted(cells_of(report).items())
    }


def test_the_range_of_the_readme_is_that_of_both_runs():
    """Least and most of all medians."""
    ratios = sorted(cells[0].split()[0] for cells in front_ends("itl_p99").values())
    assert f"{ratios[0]} to {ratios[-1]} times the tokens/s" in (ROOT / "README.md").read_text("utf-8")


def test_the_page_of_speed_has_all_loads_of_both_runs():
    """docs/speed.md: tokens per second, the first token, and the gaps."""
    found = rows_of("docs/speed.md", "speed", 5)
    assert found == front_ends("ttft_p50", "itl_p99")
    assert len(found) == 8
