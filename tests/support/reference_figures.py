"""The figures of `vllm bench serve` for given time stamps: ``python reference_figures.py REQUEST.json ANSWER.json``.

The request holds ``requests`` with ``sent``, ``times``, ``tokens``, ``input_tokens`` and ``failed``, ``duration``, ``percents``
and ``goals``; the answer, the figures under the names of vLLM's result file.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
from vllm.benchmarks.serve import calculate_metrics

PLAIN = ("completed", "failed", "request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
PEAKS = ("max_output_tokens_per_s", "max_concurrent_requests")


def output_of(request: dict[str, Any]) -> RequestFuncOutput:
    """Return what vLLM's client would have noted."""
    if request["failed"]:
        return RequestFuncOutput(success=False, start_time=request["sent"], error="failed")
    times = request["times"]
    return RequestFuncOutput(
        success=True,
        start_time=request["sent"],
        ttft=times[0] - request["sent"],
        latency=times[-1] - request["sent"],
        itl=[later - earlier for earlier, later in pairwise(times)],
        output_tokens=request["tokens"],
        prompt_len=request["input_tokens"],
    )


def main(given: str, made: str) -> None:
    """Read the time stamps, and write the figures."""
    asked = json.loads(Path(given).read_text(encoding="utf-8"))
    outputs = [output_of(request) for request in asked["requests"]]
    metrics, _ = calculate_metrics([None] * len(outputs), outputs, asked["duration"], None, asked["percents"], asked["goals"])
    figures = {name: getattr(metrics, name) for name in (*PLAIN, *PEAKS)}
    figures |= {"total_input_tokens": metrics.total_input, "total_output_tokens": metrics.total_output}
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "std", "median"):
            figures[f"{kind}_{name}_ms"] = getattr(metrics, f"{kind}_{name}_ms")
        for percent, value in getattr(metrics, f"percentiles_{name}_ms"):
            figures[f"p{percent:g}_{name}_ms"] = value
    Path(made).write_text(json.dumps({name: float(value) for name, value in figures.items()}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
