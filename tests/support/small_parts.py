"""A small archive and parts as a start finds them, and processes that use them as a stub does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_env import inside
from vllm_env.inside import parts_unpack
from vllm_env.inside.parts_places import VARIABLE
from vllm_env.inside.parts_unpack import FOLDER
from vllm_env.layout import parts
from vllm_env.layout.tar import TarContents, write_archive

KEY = uuid.uuid4().hex  # the last place is the same for all runs
SITE = Path("lib/python3.11/site-packages")
USE = """
import os, sys
sys.path.insert(0, sys.argv[1])
sys.prefix = sys.argv[3]  # as in an interpreter of the environment
import _vllm_env_unpack as unpack
print(unpack.use(sys.argv[2]))
import one
print(one.__file__)
print(sys.prefix)
print(os.environ["PATH"])
print(sys.argv[1] in sys.path)
sys.stdout.flush()
input()
"""


@dataclass
class Small:
    """A small archive as Triton has extracted it, and a model's folder with its parts."""

    folder: Path
    model: Path
    facts: dict[str, Any]

    @property
    def parts(self) -> str:
        return str(self.model / FOLDER)

    def start(self, place: Path, *launcher: str, code: str = USE, **variables: str) -> subprocess.Popen[str]:
        """A process that uses the environment until its standard input is closed.

        ``launcher`` is a program that runs the command after it; ``code`` is what the process does.
        """
        environment = {
            "PATH": f"{self.folder}/bin:/bin",
            "HOME": str(self.folder.parent / "home"),
            VARIABLE: str(place),
            **variables,
        }
        python = [sys.executable, "-I", "-S", "-c", code]
        command: list[str | Path] = [*launcher, *python, self.folder / SITE, self.model, self.folder]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self, place: Path, *launcher: str, code: str = USE, **variables: str) -> tuple[int, list[str], str]:
        """Status, what was printed, and the log of a process that uses the environment and ends."""
        process = self.start(place, *launcher, code=code, **variables)
        out, log = process.communicate("\n", timeout=120)
        return process.returncode, out.splitlines(), log


def make_small(place: Path) -> Small:
    """Three parts: a module, a file of several megabytes with its links, and a deep name."""
    source, model, folder = place / "source", place / "model", place / "small"
    long = SITE / ("d" * 90) / ("e" * 90) / "long.txt"
    for name, data in ((SITE / "one.py", b"ONE = 1\n"), (SITE / "big.bin", os.urandom(5_000_000)), (long, b"long")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / SITE / "tool").write_text("#!/bin/sh\n")
    (source / SITE / "tool").chmod(0o755)
    (source / SITE / "link").symlink_to("big.bin")
    (source / SITE / "empty").mkdir()
    (model / FOLDER).mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for number, names in enumerate(((SITE / "one.py", SITE / "tool"), (SITE / "big.bin", SITE / "link"), (long, SITE / "empty"))):
        contents = TarContents()
        for name in names:
            contents.add(str(source / name), str(name))
        file = model / FOLDER / f"{number:03}.tar.gz"
        digest = write_archive(contents, file)
        sizes = {"size": file.stat().st_size, "members": contents.members, "unpacked": contents.size}
        rows.append({"name": file.name, "sha256": digest, **sizes})
    facts: dict[str, Any] = {"key": KEY, "unpacked": sum(row["unpacked"] for row in rows), "parts": rows, "modules": ["one"]}
    (folder / SITE).mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "lib" / "base.txt").write_text("base")
    for packed, shipped in parts._UNPACKER.items():
        if packed.startswith("_vllm_env_unpack/"):
            (folder / SITE / packed).parent.mkdir(exist_ok=True)
            shutil.copy(inside.FOLDER / shipped, folder / SITE / packed)
    (folder / SITE / parts_unpack.DESCRIPTION).write_text(json.dumps(facts))
    return Small(folder, model, facts)
