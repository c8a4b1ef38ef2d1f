"""The clients at their recorded versions, and the two servers that they ask.

`package.json` and `requirements.txt` have the versions. They are installed once into ``clients/`` of the tests' data folder. The
clients reach nothing but this machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.reference import file_digest
from support.repositories import data_folder
from vllm_env.base.locks import locked

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

HERE = Path(__file__).parent
INSTALL_SECONDS = 900
RUN_SECONDS = 600
CLOSED = "http://127.0.0.1:9"  # the port `discard`, on which nobody listens
ALONE = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), CLOSED),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # LiteLLM would fetch prices
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
}
"""The whole environment of a client, but for its home."""


@dataclass(frozen=True)
class Lane:
    """Both servers, with one model under one name: Triton, its OpenAI port, and vLLM's own server."""

    triton: TritonServer
    ours: str
    theirs: str


@dataclass(frozen=True)
class Clients:
    """Where the clients are."""

    folder: Path

    def agent(self, package: str, program: str) -> Path:
        """Return a coding agent's program, which is in npm's package for this kind of machine."""
        (found,) = (self.folder / "node_modules").glob(f"{package}-linux-x64/**/{program}")
        return found

    def run(self, program: str, *urls: str, home: Path) -> dict[str, Any]:
        """Return what each call of a program of this folder said."""
        answers = home / "answers.json"
        argv = [self.folder / "python" / "bin" / "python", "-B", HERE / program, *urls, answers]
        done = subprocess.run(
            argv, env={**ALONE, "HOME": str(home)}, cwd=home, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(answers.read_text(encoding="utf-8"))


def install() -> Clients:
    """Return all clients, installed now or by an earlier run."""
    folder = data_folder() / "clients"
    recorded = [HERE / "package.json", HERE / "requirements.txt"]
    stamp = " ".join([sys.executable, sys.version, *map(file_digest, recorded)])
    noted = folder / "stamp"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock"), lambda: None):
        if not noted.is_file() or noted.read_text(encoding="utf-8") != stamp:
            shutil.rmtree(folder, ignore_errors=True)
            _install(folder)
            noted.write_text(stamp, encoding="utf-8")
    return Clients(folder)


def _install(folder: Path) -> None:
    folder.mkdir()
    shutil.copy(HERE / "package.json", folder)
    bin_folder = folder / "python" / "bin"
    pip: list[str | Path] = [bin_folder / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    npm: list[str | Path] = [
        bin_folder / "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--no-package-lock",
        "--cache",
        "npm-cache",
    ]
    commands: list[list[str | Path]] = [
        [sys.executable, "-m", "venv", "python"],
        [*pip, "--requirement", HERE / "requirements.txt"],
        [*npm, "--ignore-scripts"],  # those of the agents would fetch from elsewhere what npm has brought
    ]
    for command in commands:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        assert done.returncode == 0, f"{command[0]} cannot install the clients:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    shutil.rmtree(folder / "npm-cache")
