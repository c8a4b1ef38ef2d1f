"""Show the figures of a run, and write them as JSON.

``report.schema.json`` describes the file.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from loadtest.answers import writing
from loadtest.plot import draw

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

    from loadtest.run import Result

_COMPARED = {
    "output_throughput": "Output tokens/s",
    "median_ttft_ms": "TTFT p50",
    "median_tpot_ms": "TPOT p50",
    "median_e2el_ms": "E2EL p50",
}


def figures_of(options: argparse.Namespace, result: Result) -> dict[str, Any]:
    """Return the contents of the report: the load, the figures, and the client's own part.

    A figure that cannot be known is None.
    """
    figures = result.measures.figures(result.duration, options.metric_percentiles)
    client = result.overhead.figures()
    # Figures that the client has spoiled do not say whether the server reached the goals.
    if client["bottleneck"]:
        figures["request_goodput"] = None
    rate = options.request_rate
    found = {
        "date": f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}",
        "backend": options.backend,
        "model_id": result.model,
        "num_prompts": result.planned,
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": "inf" if options.burstiness == float("inf") else options.burstiness,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
        "goodput": options.goodput,
        "streaming": options.streaming_mode,
        "interrupted": result.interrupted,
        "server_gone": result.gone or None,
        "tokens_counted": result.measures.tokens_counted,
        **figures,
        "client": client,
        "versus": result.comparison.figures() if result.comparison else None,
    }
    return _with_none_for(_unknown_figures(options, result), found)


def _unknown_figures(options: argparse.Namespace, result: Result) -> list[str]:
    """Return patterns for the names of the figures that the answers cannot have."""
    times = _unknown_times(options, result)
    patterns = [f"_{name}_ms$" for name in times]
    # The goodput needs the time of each goal.
    if "tpot" in options.goodput and "tpot" in times:
        patterns.append("^request_goodput$")
    if not result.measures.tokens_counted:
        patterns += ["^total_(in|out)put_tokens$", "^max_output_tokens_per_s$"]
    return patterns


def _unknown_times(options: argparse.Namespace, result: Result) -> list[str]:
    """Return the names of the times that the answers do not have."""
    # A whole answer comes in one piece.
    if not options.streaming_mode:
        return ["ttft", "tpot", "itl"]
    return [] if result.measures.tokens_counted else ["tpot"]


def _with_none_for(patterns: list[str], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures, with None for each whose name matches one of the patterns."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if any(re.search(pattern, name) for pattern in patterns):
            found[name] = None
        elif isinstance(value, dict):
            found[name] = _with_none_for(patterns, value)
        else:
            found[name] = value
    return found


def write_report(path: Path, figures: Mapping[str, Any]) -> None:
    """Write the figures as JSON.

    Raises:
        ClientError: the file cannot be written.
    """
    with writing(path, "--report"):
        text = json.dumps(figures, indent=1, allow_nan=False)
        path.write_text(f"{text}\n", encoding="utf-8")


def write_plot(path: Path, options: argparse.Namespace, result: Result) -> None:
    """Write the picture of the run.

    Raises:
        ClientError: the file cannot be written.
    """
    rate = options.request_rate
    load = "closed loop" if rate == float("inf") else f"{rate:g} requests/s"
    title = f"{result.model} at {options.url}, {load}"
    picture = draw(result.measures, title, without=_unknown_times(options, result))
    with writing(path, "--plot"):
        path.write_text(picture, encoding="utf-8")


def summary(options: argparse.Namespace, figures: Mapping[str, Any]) -> list[str]:
    """Return lines with the figures for the terminal."""
    lines = [_requests(figures)]
    if not figures["completed"]:
        return lines
    lines.append(_speed(figures))
    names = _times_to_show(options, figures)
    lines += [_percentile_line(name, figures, options.metric_percentiles) for name in names]
    if not figures["streaming"]:
        lines.append("TTFT, TPOT: need --streaming-mode; a whole answer comes in one piece")
    if options.is_load_test:
        lines += _details(figures, options.metric_percentiles)
    lines += _cautions(figures)
    if figures["versus"]:
        lines += _versus(figures)
    return lines


def _times_to_show(options: argparse.Namespace, figures: Mapping[str, Any]) -> list[str]:
    """Return the names of the times that these answers have and this run shows."""
    if not figures["streaming"]:
        return ["e2el"]
    names = ["ttft", "tpot", "itl", "e2el"]
    if not figures["tokens_counted"]:
        names.remove("tpot")
    if not options.is_load_test:
        names.remove("itl")
    return names


def _requests(figures: Mapping[str, Any]) -> str:
    parts = [f"{figures['sent']} sent", *_outcomes(figures)]
    if figures["cancelled"]:
        parts.append(f"{figures['cancelled']} cancelled")
    return f"Requests: {', '.join(parts)}, in {figures['duration']:.2f} s"


def _outcomes(figures: Mapping[str, Any]) -> list[str]:
    parts = [f"{figures['completed']} answered"]
    if figures["failed"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in figures["failures"].items())
        parts.append(f"{figures['failed']} failed ({kinds})")
    return parts


def _speed(figures: Mapping[str, Any]) -> str:
    """Return the line with the throughput: in tokens, too, if those of all answers are known."""
    requests = f"{figures['request_throughput']:.4g} requests/s"
    if not figures["tokens_counted"]:
        return f"Throughput: {requests}; this server does not count tokens"
    if figures["uncounted"]:
        return f"Throughput: {requests}"
    tokens = f"{figures['output_throughput']:,.0f} output tokens/s"
    return f"Throughput: {tokens} ({figures['total_output_tokens']:,} tokens), {requests}"


def _percentile_line(name: str, figures: Mapping[str, Any], percents: tuple[float, ...]) -> str:
    """Return the line with the median and the percentiles of a time, such as ``ttft``."""
    percentiles = [f"p50 {_milliseconds(figures[f'median_{name}_ms'])}"]
    percentiles += [f"p{p:g} {_milliseconds(figures[f'p{p:g}_{name}_ms'])}" for p in percents]
    return f"{name.upper()}: {', '.join(percentiles)}"


def _milliseconds(value: float | None) -> str:
    # The report has no number for what never ended.
    return "infinite" if value is None else f"{value:.1f} ms"


def _details(figures: Mapping[str, Any], percents: tuple[float, ...]) -> list[str]:
    """Return the lines that only a load test has."""
    planned = figures["from_planned_time"]
    names = ("ttft", "e2el") if figures["streaming"] else ("e2el",)
    lines = [f"{_percentile_line(name, planned, percents)} from the planned time" for name in names]
    if figures["failed"]:
        worst = figures["with_failures"]
        lines.append(f"{_percentile_line('e2el', worst, percents)} with failures as infinite")
    client = figures["client"]
    lines.append(
        f"Client: {client['cpu']:.0%} of a core, woke up {client['p99_lag_ms']:.1f} ms late (p99)"
    )
    if figures["goodput"]:
        lines.append(_goodput(figures))
    return lines


def _cautions(figures: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason why figures are less exact than they look."""
    lines = []
    if figures["tokens_counted"] and figures["uncounted"]:
        lines.append(_uncounted("The server", figures))
    if figures["histogram"]:
        rounded = ", ".join(name.upper() for name in figures["histogram"])
        lines.append(f"{rounded}: percentiles from a histogram, with an error of at most 1 %")
    reasons = figures["client"]["bottleneck"]
    # With goals, the line of the goodput says it.
    if reasons and not figures["goodput"]:
        lines.append(f"The client was the bottleneck: {' and '.join(reasons)}")
    return lines


def _uncounted(server: str, figures: Mapping[str, Any]) -> str:
    which = f"{figures['uncounted']} of {figures['completed']} answers"
    return f"{server} did not count the tokens of {which}: no output tokens/s; TPOT is without them"


def _versus(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines that compare the second server with the first one.

    There are no differences in them if the client was the bottleneck.
    """
    versus = figures["versus"]
    answers = ", ".join(_outcomes(versus))
    blocks = f"{versus['blocks']} blocks each"
    lines = [f"{versus['url']} compared with this server, {blocks}: {answers}"]
    if versus["uncounted"]:
        lines.append(_uncounted(versus["url"], versus))
    if reasons := figures["client"]["bottleneck"]:
        return [*lines, f"No verdict: the client was the bottleneck: {' and '.join(reasons)}"]
    for name, title in _COMPARED.items():
        if versus[name] is not None:
            lines.append(f"{title}: {_difference(versus[name], versus['blocks'])}")
        # If the first server lacks the figure, too, the answers cannot have it.
        elif figures[name] is not None:
            lines.append(f"{title}: no difference, too few pairs of blocks have this figure")
    return lines


def _difference(found: Mapping[str, Any], blocks: int) -> str:
    """Return the difference of a figure with its interval, as text.

    Args:
        found: the difference, as in the report.
        blocks: number of pairs of blocks. Not all of them may have the figure.
    """
    interval = f"95 % interval {found['low']:+.1%} to {found['high']:+.1%}"
    used = found["pairs"]
    pairs = f", {used} of {blocks} pairs" if used < blocks else ""
    is_clear = not found["low"] <= 0 <= found["high"]
    verdict = ", a clear difference" if is_clear else ""
    return f"{found['difference']:+.1%} ({interval}{pairs}{verdict})"


def _goodput(figures: Mapping[str, Any]) -> str:
    """Return the line with the goodput, or with the reason why it is not known."""
    goals = " ".join(f"{name}:{limit:g}" for name, limit in figures["goodput"].items())
    if reasons := figures["client"]["bottleneck"]:
        return (
            f"Goodput ({goals}): no verdict, the client was the bottleneck: "
            f"{' and '.join(reasons)}; start several clients, or run it on another machine"
        )
    reached = figures["request_goodput"]
    if reached is None:
        return f"Goodput ({goals}): no verdict, this server does not count tokens"
    return f"Goodput ({goals}): {reached:.4g} requests/s"
