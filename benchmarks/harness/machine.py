"""The conditions of a measurement: machine, versions, commit."""

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
    """The facts for the head of a report, each as one text."""

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
        versions = f"vLLM {self.vllm}, torch {self.torch}, tritonserver {self.triton}, load generator Python {self.python}"
        hardware = (
            f"{self.processor}, {self.memory}{f', {self.gpus}' if self.gpus else ''}, {self.system}"
        )
        return [
            f"- machine: {hardware}",
            f"- versions: {versions}",
            f"- commit {self.commit}, {self.when}",
        ]


def versions_of(environment: Path) -> dict[str, str]:
    """Return the versions of vLLM and torch in an unpacked environment."""
    # -B: write no bytecode into an environment that may be packed or started later.
    vllm, torch = [
        *_output([str(environment / "bin" / "python"), "-B", "-c", _PROBE]).split()[-2:],
        "?",
        "?",
    ][:2]
    return {"vllm": vllm, "torch": torch}


def describe(versions: Mapping[str, str], triton_root: Path, *, commit: str = "") -> Machine:
    """Read the facts of this machine.

    Args:
        versions: those of vLLM and torch.
        triton_root: the Triton root.
        commit: for a copy of the project without git history.
    """
    return Machine(
        processor=f"{os.cpu_count()} cores of {_processor()}",
        memory=f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        gpus=_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).replace(
            "\n", ", "
        ),
        system=f"Linux {platform.release()}",
        python=platform.python_version(),
        vllm=versions.get("vllm", "?"),
        torch=versions.get("torch", "?"),
        triton=_triton_version(triton_root),
        commit=commit or _commit(),
        when=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _triton_version(root: Path) -> str:
    """Return the version from the root's own files; RELEASE exists in a root that gen_vllm_env.sh has made."""
    for name in ("TRITON_VERSION", "RELEASE"):
        if (root / name).is_file():
            return (root / name).read_text(encoding="utf-8").strip()
    return os.environ.get("TRITON_SERVER_VERSION", "?")


def _commit() -> str:
    here = str(Path(__file__).resolve().parent)
    commit = _output(["git", "-C", here, "rev-parse", "--short", "HEAD"])
    changed = _output(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit or 'unknown'}{' with changes' if changed else ''}"


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def tree_size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
