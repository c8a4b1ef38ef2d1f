"""Watch which processes a server starts for a model, however short they live."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

INSPECTION = "-m vllm.model_executor.models.registry"


@dataclass(frozen=True)
class Sighting:
    """A process: its command line, its parent, its start in ticks since the machine's, and the variables that it was given."""

    command: str
    parent: int
    began: int
    variables: frozenset[str]


class Sightings:
    """The processes of one server, by id: those that were given its own VLLM_CACHE_ROOT; other tests' servers run meanwhile.

    Of one that runs already, they are those that it starts after this was made.
    """

    def __init__(self, cache: dict[str, str], model: str = "vllm") -> None:
        self.seen: dict[int, Sighting] = {}
        self._model = model
        self._mark = f"VLLM_CACHE_ROOT={cache['VLLM_CACHE_ROOT']}"
        self._before = {(pid, sighting.began) for pid, sighting in self._look().items()}

    def look(self) -> None:
        """Note what is there now and was not before, in a server that was started with the same cache."""
        self.seen |= {pid: s for pid, s in self._look().items() if (pid, s.began) not in self._before}

    def _look(self) -> dict[int, Sighting]:
        found = {}
        for folder in (f for f in Path("/proc").iterdir() if f.name.isdigit()):
            with contextlib.suppress(OSError, IndexError):  # it ends meanwhile
                command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                given = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                variables = frozenset(one.partition("=")[0] for one in given)
                if command and self._mark in given:  # a zombie has no command
                    found[int(folder.name)] = Sighting(command, int(fields[1]), int(fields[19]), variables)
        return found

    def stub(self) -> int:
        """Return the id of the model's stub: the first of its command line, for it forks."""
        return min((self.seen[pid].began, pid) for pid in self._stubs())[1]

    def _stubs(self) -> list[int]:
        """Return the ids of the model's stub and its forks, and those of a load that the server gave up and did again."""
        return [pid for pid, s in self.seen.items() if f" {self._model}_0_0 " in f"{s.command} "]

    def inspections(self) -> list[int]:
        """Return the ids of the stub's children that look at a model's class; theirs do so only until they run something."""
        stubs = self._stubs()
        return [pid for pid, s in self.seen.items() if s.command.endswith(INSPECTION) and s.parent in stubs]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look ten times a second."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(0.1):
                self.look()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def gone(process: int) -> bool:
    """Whether a process has ended."""
    return not Path(f"/proc/{process}").exists()
