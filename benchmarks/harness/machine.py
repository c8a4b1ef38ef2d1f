"""Describe the conditions of a measurement: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROBE = "import torch, vllm; print(vllm.__version__, torch.__version__)"


@dataclass(frozen=True)
class Machine:
    """The facts for the head of a report, each as one string."""

    processor: str
    memory: str
    gpus: str
    system: str
    python: str
    vllm: str
    torch: str
    triton: str
    commit: str
    when: str

    def lines(self) -> list[str]:
        """Return the lines for the head of a report."""
        # Without a GPU, that part is left out.
        hardware = filter(None, (self.processor, self.memory, self.gpus, self.system))
        versions = (
            f"vLLM {self.vllm}, torch {self.torch}, tritonserver {self.triton}, "
            f"load generator Python {self.python}"
        )
        return [
            f"- machine: {', '.join(hardware)}",
            f"- versions: {versions}",
            f"- commit {self.commit}, {self.when}",
        ]


def versions_of(environment: Path) -> dict[str, str]:
    """Return the versions of vLLM and torch in an unpacked environment."""
    # -B: write no bytecode into an environment that may be packed or started later.
    output = _output([str(environment / "bin" / "python"), "-B", "-c", _PROBE])
    # vLLM may print other lines before.
    versions = output.split()[-2:]
    return dict(zip(("vllm", "torch"), versions, strict=False))


def describe(versions: Mapping[str, str], triton_root: Path, *, commit: str = "") -> Machine:
    """Read the facts of this machine.

    Args:
        versions: those of vLLM and torch.
        triton_root: the Triton root.
        commit: for a copy of the project without git history.
    """
    gpus = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return Machine(
        processor=f"{os.cpu_count()} cores of {_processor()}",
        memory=f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        gpus=gpus.replace("\n", ", "),
        system=f"Linux {platform.release()}",
        python=platform.python_version(),
        vllm=versions.get("vllm", "?"),
        torch=versions.get("torch", "?"),
        triton=_triton_version(triton_root),
        commit=commit or _commit(),
        when=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _processor() -> str:
    """Return the name of the processor, or of its architecture if the kernel gives no name."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    # An Arm kernel does not give a name.
    return platform.machine()


def _triton_version(root: Path) -> str:
    """Return the version of a Triton root; "?" if it is unknown."""
    # NVIDIA's containers have this file, and so has a root that gen_vllm_env.sh has made.
    path = root / "TRITON_VERSION"
    if path.is_file():
        return path.read_text(encoding="utf-8").strip()
    return os.environ.get("TRITON_SERVER_VERSION", "?")


def _commit() -> str:
    """Return the short commit of this checkout, with a note if tracked files are changed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = _output([*git, "rev-parse", "--short", "HEAD"])
    # Reports of earlier runs are untracked, and change nothing.
    changed = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit or 'unknown'}{' with changes' if changed else ''}"


def _output(command: list[str]) -> str:
    """Return the output of a command; an empty string if it fails, or takes over 180 s."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=180
        ).stdout.strip()
    # A missing fact must not end a benchmark.
    except (OSError, subprocess.SubprocessError):
        return ""


def tree_size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
