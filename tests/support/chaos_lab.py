"""A build that is to be interrupted: started, watched by its stages, and looked after for what it leaves."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from support import small_build
from support.patience import LIMIT
from vllm_env.base.filesystem import file_sha256

if TYPE_CHECKING:
    import signal

STAGES = ("lock", "prefix", "parts", "verify", "publish")


@dataclass
class Lab:
    """Folders of a series of builds: cache, spec, repository and TMPDIR, all below ``place``."""

    place: Path
    spec: Path
    targets: list[str] = field(default_factory=lambda: ["packaging", "pluggy"])
    variables: dict[str, str] = field(default_factory=dict)
    replaced: str | None = None
    layout: str = "parts"

    @property
    def cache(self) -> Path:
        """VLLM_ENV_CACHE of the builds."""
        return self.place / "cache"

    @property
    def repository(self) -> Path:
        """Where they publish."""
        return self.place / "models"

    @property
    def model(self) -> Path:
        """The model's folder in it."""
        return self.repository / "vllm"

    @property
    def temporary(self) -> Path:
        """TMPDIR of the builds."""
        return self.place / "tmp"

    def make_cold(self) -> None:
        """Forget what was built, so that every stage has work to do, and pick another target than the published one."""
        published = self.published()
        if published != self.replaced:  # the current target has been published since
            self.targets.reverse()
        self.replaced = published
        for name in ("prefixes", "bytecode", "archives", "locks", "verified"):
            shutil.rmtree(self.cache / name, ignore_errors=True)

    def start(self, *launcher: str, smoke: bool = False, **variables: str) -> Build:
        """Start a build of the current target; ``launcher`` is a program that runs the command after it."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        environment = small_build.environment(self.cache, **{"TMPDIR": str(self.temporary), **self.variables, **variables})
        options = ["--spec", self.spec, "--with", self.targets[0], "--layout", self.layout]
        argv = small_build.command(self.repository, *options, smoke=smoke)
        return Build(
            subprocess.Popen([*launcher, *argv], env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        )

    def finish(self) -> str:
        """Run a build of the current target to its end, which must be a good one; return its messages."""
        build = self.start()
        status = build.wait()
        assert status == 0, build.text()
        assert self.published() is not None
        return build.text()

    def published(self) -> str | None:
        """The key of the set in the repository, which must be whole; None if there is none."""
        if not (self.model / "vllm_env.json").exists():
            return None
        manifest = json.loads((self.model / "vllm_env.json").read_text())
        for record in (manifest["archive"], *manifest["parts"], manifest["stub"]):
            assert file_sha256(self.model / record["name"]) == record["sha256"], f"{record['name']} is torn"
        assert (self.model / "config.pbtxt").is_file()
        assert (self.model / "1" / "model.py").is_file()
        return str(manifest["key"])

    def stray_files(self) -> list[Path]:
        """Files that no finished or cleanly interrupted build may leave."""
        beside = [p for p in self.place.iterdir() if p.name not in {"cache", "models", "tmp", "spec"}]
        inside = [p for p in self.repository.rglob("*") if p.name.startswith(".")]
        staged = list((self.cache / "build").glob("*"))
        return [*beside, *inside, *staged, *self.temporary.iterdir(), *self.spec.parent.glob(".*")]

    def stray_processes(self) -> list[str]:
        """Processes that have this lab's cache in their environment."""
        wanted, found = f"VLLM_ENV_CACHE={self.cache}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{folder.name} {command.decode(errors='replace')}")
            except OSError:  # it has just ended
                continue
        return found


class Build:
    """A running build whose messages are read as they come."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.child.stderr or ():
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def text(self) -> str:
        """What it has said so far."""
        return "".join(self._lines)

    def wait_for(self, text: str, seconds: float = 300.0) -> None:
        """Return when a line begins with ``text``, or the build has ended."""
        with self._news:
            self._news.wait_for(
                lambda: any(line.startswith(text) for line in self._lines) or not self._reader.is_alive(), seconds
            )

    def wait(self, seconds: float = 600.0) -> int:
        """Wait for its end and return its status."""
        status = self.child.wait(seconds)
        self._reader.join(LIMIT)
        if self.child.stderr and not self._reader.is_alive():
            self.child.stderr.close()
        return status

    def signal(self, number: signal.Signals) -> int:
        """Send a signal and return the status with which it ended."""
        self.child.send_signal(number)
        return self.wait(300)
