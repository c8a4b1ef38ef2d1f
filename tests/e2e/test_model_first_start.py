"""What a first start does ahead of vLLM, with the real vLLM."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT
from vllm_env.base.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.serving import Parts, Serve

pytestmark = pytest.mark.e2e

# In an interpreter of the environment: vLLM's registry looks at a class with any process of its own forbidden, then here.
_LOOK = """
import dataclasses, importlib, json, os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from triton_vllm.loading import inspector
ahead = inspector.start(os.environ)
registry = importlib.import_module(inspector.REGISTRY)
ahead.lend()
real = subprocess.run

def run(command, *others, **options):
    assert command != registry._SUBPROCESS_COMMAND, "one more process"
    return real(command, *others, **options)

subprocess.run = run
model = registry.ModelRegistry.models["OPTForCausalLM"]
found = model.inspect_model_cls()
subprocess.run = real
alone = registry._ModelInfo.from_model_cls(model.load_model_cls())
kept = inspector.start(os.environ) is None
print(json.dumps([dataclasses.asdict(found), dataclasses.asdict(alone), kept, sys.argv[2] in os.environ]))
"""


def test_vllms_own_look_at_a_model_uses_the_process_started_ahead(parts: Parts, tmp_path: Path) -> None:
    """vLLM gets its answer with no other process, the right one, and keeps it; the next start needs no process ahead."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    done = subprocess.run(
        [parts.environment / "bin/python", "-c", _LOOK, str(CHECKOUT / "model_repository/vllm/1"), SET_BY_VLLM],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, alone, kept, is_set = json.loads(done.stdout.splitlines()[-1])
    assert found == alone
    assert found["architecture"] == "OPTForCausalLM"
    assert kept
    assert is_set  # what the next test goes by


INSPECTION = "-m vllm.model_executor.models.registry"
SET_BY_VLLM = "PYTORCH_NVML_BASED_CUDA_CHECK"  # by its first import, of vllm/env_override.py


@dataclass(frozen=True)
class Sighting:
    """A process: its command line, its parent, its start in ticks since the machine's, and the variables that it was given."""

    command: str
    parent: int
    began: int
    variables: frozenset[str]


class Sightings:
    """The processes of one server, by id: those that were given its own VLLM_CACHE_ROOT; other tests' servers run meanwhile."""

    def __init__(self, cache: dict[str, str]) -> None:
        self.seen: dict[int, Sighting] = {}
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
        return min((s.began, pid) for pid, s in self.seen.items() if " vllm_0_0 " in f"{s.command} ")[1]

    def inspections(self) -> list[int]:
        """Return the ids of the stub's children that look at a model's class; theirs do so only until they run something."""
        stub = self.stub()
        return [pid for pid, s in self.seen.items() if s.command.endswith(INSPECTION) and s.parent == stub]

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


def test_a_first_start_begins_the_look_at_once_and_leaves_nothing(serving: Serve, tmp_path: Path) -> None:
    """One process looks at the class, started before vLLM was imported and not after it; the next start has none.

    It has the variables that the stub had when it started it, and vLLM's import sets one. Nor does the next start compile
    anything, though its folder for temporary files is a new one, as in a new container.
    """
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), SET_BY_VLLM: ""}
    first = Sightings(cache)
    with first.watching(), serving(environment=cache):
        (inspection,) = first.inspections()
        assert "VLLM_CACHE_ROOT" in first.seen[inspection].variables
        assert SET_BY_VLLM not in first.seen[inspection].variables
        assert gone(inspection)
    later = Sightings(cache)
    with later.watching(), serving(environment=cache):
        assert later.inspections() == []
    assert not [s.command for s in later.seen.values() if s.command.partition(" ")[0].endswith("cc1plus")]


def test_a_load_that_fails_leaves_no_process(serving: Serve, tmp_path: Path) -> None:
    """The process that was started ahead ends with the load for which it was started."""
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    seen = Sightings(cache)
    with seen.watching(), pytest.raises(CommandError) as failed, serving({"max_model_len": 10**9}, environment=cache):
        pytest.fail("it loaded")
    assert "max_model_len" in failed.value.tail, (failed.value, failed.value.tail)
    (inspection,) = seen.inspections()
    assert gone(inspection)
