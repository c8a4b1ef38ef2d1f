"""Two containers on one model repository or cache: neither sees the other's processes, and in both the builder is process 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from support import fake_tritonserver
from support.namespaces import with_own_processes
from support.patience import wait_for
from support.repositories import CHECKOUT
from vllm_env.base.cache import Cache
from vllm_env.publish.exchange import remove_abandoned_staging

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STAGES = """
import os, sys
from pathlib import Path
from vllm_env.publish.exchange import staging_in
assert os.getpid() == 1
with staging_in(Path(sys.argv[1])) as folder:
    (folder / "file").touch()
    print(folder.name, flush=True)
    sys.stdin.read()
    print((folder / "file").exists(), flush=True)
"""
_STAGES_OFTEN = """
import sys
from pathlib import Path
from vllm_env.publish.exchange import staging_in
for _ in range(1000):
    with staging_in(Path(sys.argv[1])) as folder:
        (folder / "file").touch()
        assert (folder / "file").exists()
"""
_PUBLISHES = """
import json, os, sys
from pathlib import Path
from vllm_env.base.cache import Cache
from vllm_env.base.workspace import Workspace
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.publish.model_folder import BuiltSet
from vllm_env.publish.publish import publish
assert os.getpid() == 1
repository, template, tag = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
files = [repository.parent.parent / f"{kind}-{tag}" for kind in ("stub", "env")]
for file in files:
    file.write_text(tag)
built = BuiltSet(*files, LAYOUTS["archive"], json.dumps({"tag": tag}), "{}")
publish(Workspace(Cache(repository.parent.parent)), built, repository, "vllm", template)
"""
_WARMS = """
import os, sys
from pathlib import Path
from vllm_env.base.cache import Cache
from vllm_env.base.workspace import Workspace
from vllm_env.serve.warm import warm
assert os.getpid() == 1
binary, model, log = map(Path, sys.argv[1:])
warm(Workspace(Cache(log.parent)), binary, model, log=log)
"""

_STAGES_IN_CACHE = """
import sys
from pathlib import Path
from vllm_env.base.cache import Cache
with Cache(Path(sys.argv[1])).staging() as folder:
    print(folder.name, flush=True)
    sys.stdin.read()
"""
_TIDIES_CACHE = """
import sys
from pathlib import Path
from vllm_env.base.cache import Cache
print(*(folder.name for folder in Cache(Path(sys.argv[1])).remove_abandoned()))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a published model, "one"; both containers have it."""
    place = tmp_path / "place" / "models"
    _publish(place, "one")
    return place


def _publish(repository: Path, tag: str) -> None:
    with _container(_PUBLISHES, repository, CHECKOUT / "model_repository" / "vllm", tag) as child:
        assert child.wait(300) == 0
    assert _tags(repository / "vllm") == {tag}


@contextmanager
def _container(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [*with_own_processes(), sys.executable, "-c", code, *(str(argument) for argument in arguments)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "env"), "FAKE_TRITON": "fills"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def _tags(model: Path) -> set[str]:
    manifest = json.loads((model / "vllm_env.json").read_text())["tag"]
    return {manifest, (model / "vllm_env.tar.gz").read_text(), (model / "triton_python_backend_stub").read_text()}


def _strays(repository: Path) -> list[Path]:
    return [path for path in repository.parent.rglob("*") if path.name.startswith(".vllm_env")]


@pytest.mark.parametrize("place", [".", "models/vllm"])
def test_what_another_container_stages_stays(repository: Path, place: str) -> None:
    """Beside the repository and inside the model, also when the model's folder is published meanwhile."""
    with _container(_STAGES, repository.parent / place) as other:
        assert other.stdout
        name = other.stdout.readline().strip()
        _publish(repository, "two")
        assert (repository.parent / place / name / "file").exists()
        assert other.communicate("", 300)[0] == "True\n"
    assert _strays(repository) == []


@pytest.mark.parametrize("place", [".", "models/vllm"])
def test_what_a_killed_one_staged_is_removed(repository: Path, place: str) -> None:
    """The kernel frees its lock; the next build removes the folder, though process 1 runs there as well."""
    with _container(_STAGES, repository.parent / place) as other:
        assert other.stdout
        assert other.stdout.readline()
        other.kill()
        assert other.stdout.read() == ""  # until it has ended, which is after the program that is killed with it
    assert len(_strays(repository)) == 1
    _publish(repository, "two")
    assert _strays(repository) == []


def test_a_model_is_published_while_another_container_warms_it(repository: Path, tmp_path: Path) -> None:
    """Both succeed: the new set is in place, and so are the caches."""
    ready = tmp_path / "ready"
    slow = tmp_path / "slow"
    slow.write_text(
        f'#!/bin/sh\nwhile [ ! -e "{ready}" ]; do sleep 0.05; done\nexec "{fake_tritonserver.launcher(tmp_path)}" "$@"\n'
    )
    slow.chmod(0o755)
    with _container(_WARMS, slow, repository / "vllm", tmp_path / "server.log") as warming:

        def is_staged() -> bool:
            assert warming.poll() is None
            return any((repository / "vllm").glob(".vllm_env.staging-*/vllm_cache"))

        wait_for(is_staged, "the staged caches")
        _publish(repository, "two")
        ready.touch()
        assert warming.wait(300) == 0
    assert (repository / "vllm" / "vllm_cache" / "warm.json").read_text() == "new"
    assert _tags(repository / "vllm") == {"two"}
    assert _strays(repository) == []


def test_no_folder_is_taken_between_its_making_and_its_lock(repository: Path) -> None:
    """One stages 1000 times while the other removes what is abandoned without pause."""
    with _container(_STAGES_OFTEN, repository.parent) as other:
        while other.poll() is None:
            remove_abandoned_staging(repository)
        assert other.returncode == 0
    assert _strays(repository) == []


def test_what_is_staged_in_a_shared_cache_stays_until_its_owner_is_dead(tmp_path: Path) -> None:
    """`verify` in one container while another builds; process 1 of the other, which runs here as well, tells nothing."""
    with Cache(tmp_path).staging() as ours, _container(_STAGES_IN_CACHE, tmp_path) as other:
        assert other.stdout
        theirs = other.stdout.readline().strip()
        assert _tidied(tmp_path) == []
        assert ours.is_dir()
        other.kill()
        assert other.stdout.read() == ""  # until it has ended
        assert _tidied(tmp_path) == [theirs]
        assert [*ours.parent.iterdir()] == [ours]


def _tidied(root: Path) -> list[str]:
    with _container(_TIDIES_CACHE, root) as child:
        return child.communicate(timeout=300)[0].split()
