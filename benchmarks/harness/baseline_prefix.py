"""The conda prefix that a user would make without this project: the baseline of `cold_start.py`.

The interpreter as conda installs it and the wheels of the repository's lock as `uv pip install` puts them, without bytecode
of theirs, or as pip does, which compiles them; nothing left out, none of the packager's changes. Both come from a wheelhouse
that `gen_vllm_env.sh wheelhouse` fills. Run by the packager's Python (`.tools/venv-…`), which has rattler, uv and pip.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import rattler

from harness.machine import tree_size

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Contents:
    """What a prefix holds; `compiled` counts vLLM's compiled modules, `hooked` tells of the packager's hook."""

    distributions: int
    size: int
    compiled: int
    hooked: bool


def make(prefix: Path, model: Path, triton_root: Path, *, by_pip: bool = False) -> None:
    """Make the prefix with the wheels of a built model's lock; about 30 s (pip: some minutes) and 3 GB for the CPU profile.

    Raises:
        SystemExit: the checkout's lock is no longer the one that the model was built from.
    """
    with tempfile.TemporaryDirectory(dir=prefix.parent) as folder:
        house = Path(folder) / "wheelhouse"
        _fill(house, model, triton_root)
        try:
            asyncio.run(_install_interpreter((house / "conda").absolute().as_uri(), prefix))
            python = prefix / "bin" / "python"
            wheels = [wheel for wheel in house.glob("*.whl") if not wheel.name.startswith("nvidia_pytriton-")]
            install(python, wheels, by_pip=by_pip)
            # as conda-forge's interpreter has it; that of a local channel comes without
            library = next(prefix.glob("lib/python3.*/os.py")).parent
            subprocess.run([python, "-m", "compileall", "-q", "-x", "site-packages", library], check=True)
        except BaseException:
            shutil.rmtree(prefix, ignore_errors=True)  # what is there is taken for whole
            raise


def install(python: Path, wheels: list[Path], *, by_pip: bool) -> None:
    """Install wheels into the prefix of `python` with the defaults of uv, or of pip, of which only pip compiles."""
    offline = ["--quiet", "--no-deps"]
    if by_pip:
        pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--python", python]
        command = [*pip, "install", *offline, "--no-index", "--no-warn-script-location", *wheels]
    else:
        uv = [Path(sys.executable).parent / "uv", "pip", "install", "--no-config", "--offline"]
        command = [*uv, *offline, "--python", python, *wheels]
    subprocess.run(command, check=True)


def _fill(house: Path, model: Path, triton_root: Path) -> None:
    built = json.loads((model / "vllm_env.json").read_text("utf-8"))
    command = [CHECKOUT / "gen_vllm_env.sh", "wheelhouse", "--json", "--profile", built["spec"]["profile"]]
    done = subprocess.run([*command, "--triton-root", triton_root, house], check=True, stdout=subprocess.PIPE, text=True)
    if json.loads(done.stdout)["lock_digest"] != built["lock_digest"]:
        raise SystemExit(f"{model} was built from another lock than this checkout's: build it again, or --baseline-prefix")


async def _install_interpreter(channel: str, prefix: Path) -> None:
    records = await rattler.solve([channel], ["python"], platforms=["linux-64", "noarch"])
    await rattler.install(records, prefix, show_progress=False)


def inspect(prefix: Path) -> Contents:
    """Count what a prefix holds."""
    packages = next(prefix.glob("lib/python3.*/site-packages"))
    return Contents(
        distributions=len(list(packages.glob("*.dist-info"))),
        size=tree_size(prefix),
        compiled=sum(1 for _ in (packages / "vllm").rglob("*.pyc")),
        hooked=(packages / "_vllm_env_runtime.py").exists(),
    )
