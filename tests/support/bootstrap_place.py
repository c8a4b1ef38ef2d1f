"""A checkout whose lock is one small wheel, with a program in the packager's place: what the bootstrap is tried in."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from support.repositories import CHECKOUT

_PROGRAM = """\
import json, os, sys, tool
print(json.dumps([tool.VERSION, sys.prefix, sys.argv[1:], os.environ.get("XDG_CACHE_HOME")]))
sys.stdout.flush()
sys.stdin.read()
"""


class Place:
    """A checkout, a folder with the wheels of its lock, and the variables of a user whose pip takes them from there."""

    def __init__(self, folder: Path) -> None:
        self.root, self.wheels = folder / "checkout", folder / "wheels"
        self.tools = self.root / ".tools"
        ignore = shutil.ignore_patterns("__pycache__", "*.toml")
        shutil.copytree(CHECKOUT / "env", self.root / "env", ignore=ignore)
        shutil.copy(CHECKOUT / "gen_vllm_env.sh", self.root)
        (self.root / "env/vllm_env/__main__.py").write_text(_PROGRAM)
        self.wheels.mkdir()
        (folder / "home").mkdir()
        self.env = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "PYTHON": sys.executable}
        self.env |= {"PIP_FIND_LINKS": str(self.wheels), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
        self.cwd = Path("/")
        self.lock("1.0")

    def lock(self, version: str) -> None:
        """Make a wheel of the tool and lock it."""
        wheel, info = self.wheels / f"tool-{version}-py3-none-any.whl", f"tool-{version}.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tool.py", f"VERSION = {version!r}\n")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tool\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", f"tool.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
        line = f"tool=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
        (self.root / "env/requirements.txt").write_text(line)

    def start(self, *arguments: str, before: tuple[object, ...] = (), **variables: str) -> subprocess.Popen[str]:
        """Start gen_vllm_env.sh; the program in the packager's place runs until its input ends."""
        argv = [*before, self.root / "gen_vllm_env.sh", *arguments]
        environment, pipe = {**self.env, **variables}, subprocess.PIPE
        command = [str(a) for a in argv]
        return subprocess.Popen(command, env=environment, cwd=self.cwd, text=True, stdin=pipe, stdout=pipe, stderr=pipe)

    def run(self, *arguments: str, before: tuple[object, ...] = (), **variables: str) -> tuple[int, str, str]:
        """Run gen_vllm_env.sh; return its status, its result and its messages."""
        child = self.start(*arguments, before=before, **variables)
        out, err = child.communicate(timeout=600)
        return child.returncode, out, err

    def environments(self) -> list[Path]:
        return sorted(self.tools.glob("venv*"))
