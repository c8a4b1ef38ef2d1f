"""Measure a built model on a GPU: its starts, and its speed next to vLLM's own server.

    python3 benchmarks/gpu.py REPOSITORY --triton-root ROOT

First it unpacks the environment. Then `cold_start.py` measures the starts, and `serving.py` the
speed. This model and vLLM's server have two front ends each. Each benchmark writes a report.

All other options, after REPOSITORY, are for `serving.py`. To try it without a GPU, add `--device
cpu --shape tiny-opt --instances 1`.
"""

from __future__ import annotations

import argparse
import shutil
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
# The streams of the README's table. With 32 or more, each server gets more than 1,000 requests on
# an H100.
_TABLE = [
    *("--device", "gpu", "--shape", "llama-7b", "--tokens", "128", "--modes", "stream"),
    *("--targets", "openai", "triton", "--instances", "2"),
    *("--in-flight", "256", "32", "8", "1", "--rounds", "5", "--seconds", "8"),
]


def commands(arguments: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return three command lines: of ``gen_vllm_env.sh``, ``cold_start.py`` and ``serving.py``.

    They are without the program. The first one unpacks the environment for the last one.

    Args:
        arguments: this program's own. Options that it does not know are passed to ``serving.py``.

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
        help="logs, homes and the unpacked environment, which stay; default a new temporary "
        "directory",
    )
    # The names of the two reports end with _starts and _serving.
    results.add_options(parser, Path("benchmarks/results/gpu"))
    options, more = parser.parse_known_args(arguments)
    repository = str(options.repository)
    if not Path(repository, "vllm", "config.pbtxt").is_file():
        parser.error(f"{repository} has no model vllm: build it with gen_vllm_env.sh")
    # Parsed only to find here what is wrong in the other options, and not after the starts.
    others = serving_options.parse(["--environment", "", *_TABLE, *more], None)
    if others.device == "gpu" and not shutil.which("nvidia-smi"):
        parser.error("this machine has no NVIDIA GPU: see --help for a try without one")
    work = (options.work or Path(tempfile.mkdtemp(prefix="gpu_"))).absolute()
    environment = str(work / "environment")
    common = ["--triton-root", str(options.triton_root), "--commit", options.commit]

    def folders(name: str) -> list[str]:
        """Return the options with the folder and the report of one benchmark."""
        return ["--work", str(work / name), "--out", f"{options.out}_{name}"]

    unpack = ["unpack", environment, "--model-repository", repository]
    starts = [f"built={repository}", *common, *folders("starts")]
    built = ["--environment", environment, "--model-repository", repository]
    # Of an option that is given twice, the last one counts.
    return unpack, starts, [*built, *common, *folders("serving"), *_TABLE, *more]


def main(arguments: list[str]) -> int:
    """Unpack the environment, and measure the starts and the speed; return the exit code.

    It ends at the first command that fails.
    """
    unpack, starts, speed = commands(arguments)
    # serving.py needs it for vLLM's server, and would say so only after the starts.
    require_openai_client()
    _, environment, *_ = unpack
    Path(environment).parent.mkdir(parents=True, exist_ok=True)
    # First, because it refuses a folder that is not empty.
    status = subprocess.run([_CHECKOUT / "gen_vllm_env.sh", *unpack], check=False).returncode
    return status or cold_start.main(starts) or serving.main(speed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
