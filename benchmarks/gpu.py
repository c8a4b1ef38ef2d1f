"""Measure a built model on a GPU: its starts, then its speed next to vLLM's own server.

    python3 benchmarks/gpu.py REPOSITORY --triton-root ROOT

First `cold_start.py` measures the starts. Then `gen_vllm_env.sh unpack` unpacks the environment,
and `serving.py` measures the speed with two front ends on each side. Each benchmark writes a
report.

Other options are for `serving.py`. Without a GPU, try it with `--device cpu --shape tiny-opt
--instances 1`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import cold_start
import serving
from harness import options as serving_options
from harness import results
from harness.targets import require_openai_client

_CHECKOUT = Path(__file__).resolve().parents[1]
# The table of the README. With 32 streams or more, five rounds are over 1,000 requests a side on an
# H100.
_TABLE = [
    *("--device", "gpu", "--shape", "llama-7b", "--tokens", "128", "--modes", "stream"),
    *("--targets", "openai", "triton", "--instances", "2"),
    *("--in-flight", "256", "32", "8", "1", "--rounds", "5", "--seconds", "8"),
]


def commands(arguments: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the arguments of ``cold_start.py``, ``gen_vllm_env.sh`` and ``serving.py``.

    Raises:
        SystemExit: the arguments are wrong.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("repository", type=Path, metavar="REPOSITORY", help="with the built model vllm in it")
    add("--triton-root", type=Path, default=Path("/opt/tritonserver"), metavar="DIR")
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="logs and the unpacked environment; default a new temporary directory",
    )
    results.add_options(parser, Path("benchmarks/results/gpu"))
    options, more = parser.parse_known_args(arguments)
    repository = str(options.repository)
    folder = (options.work or Path(tempfile.mkdtemp(prefix="gpu_"))).absolute()
    environment = str(folder / "environment")
    common = ["--triton-root", str(options.triton_root), "--commit", options.commit]

    def places(name: str) -> list[str]:
        return ["--work", str(folder / name), "--out", f"{options.out}_{name}"]

    starts = [f"built={repository}", *common, *places("starts")]
    unpack = ["unpack", environment, "--model-repository", repository]
    built = ["--environment", environment, "--model-repository", repository]
    # Of an option that is given twice, the last one counts.
    table = [*built, *common, *places("serving"), *_TABLE, *more]
    # Wrong arguments are found here, not after the starts.
    cold_start.parse(starts)
    serving_options.parse(table, None)
    return starts, unpack, table


def main(arguments: list[str]) -> int:
    """Measure the starts, unpack the environment, and measure the speed."""
    starts, unpack, table = commands(arguments)
    # serving.py needs it for vLLM's server, and would say so only after the starts.
    require_openai_client()
    cold_start.main(starts)
    subprocess.run([_CHECKOUT / "gen_vllm_env.sh", *unpack], check=True)
    return serving.main(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
