"""What conda-pack puts into an archive, and how it is written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from support.small_build import small_lock
from support.small_fixtures import copy_slim, workspace_in
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.filesystem import file_sha256
from vllm_env.base.workspace import CHECKOUT
from vllm_env.layout import LAYOUTS
from vllm_env.layout.archive import _explained
from vllm_env.layout.tar import plan_archive, write_archive
from vllm_env.prefix.prefix import Prefix
from vllm_env.prefix.relocate import make_relocatable, site_packages

pytestmark = pytest.mark.long

LAYOUT = LAYOUTS["archive"]


@pytest.fixture(scope="module")
def prefix(bare_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix from whose conda package a file was left out, as the prune rules do."""
    prefix = tmp_path_factory.mktemp("pack") / "env"
    copy_slim(bare_prefix, prefix)
    (prefix / "lib/python3.11/this.py").unlink()
    (prefix / "own.txt").write_text("not of conda")
    cache = prefix / "lib/python3.11/__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "os.cpython-311.pyc").write_bytes(b"bytecode")
    make_relocatable(prefix, site_packages(prefix))
    return prefix


@dataclasses.dataclass
class Packed:
    """An archive of the prefix, its digest as it was returned, and how far the packing said it was."""

    path: Path
    digest: str
    seen: list[float]


@pytest.fixture(scope="module")
def packed(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """The prefix, packed once for all tests."""
    path = tmp_path_factory.mktemp("packed") / "env.tar.gz"
    seen: list[float] = []
    return Packed(path, write_archive(plan_archive(prefix), path, lambda _, fraction: seen.append(fraction)), seen)


def test_the_plan_holds_conda_files_other_files_and_the_activation(packed: Packed) -> None:
    """Triton needs bin/activate, which conda-pack adds; conda-unpack, which nobody runs, is left out."""
    assert packed.digest == hashlib.sha256(packed.path.read_bytes()).hexdigest()
    with tarfile.open(packed.path) as archive:
        names = set(archive.getnames())
        stream = archive.extractfile(next(n for n in names if n.startswith("conda-meta/python-")))
        assert stream
        record = json.load(stream)
    assert {"bin/activate", "bin/python3.11", "own.txt", "conda-meta/history"} <= names
    assert "lib/python3.11/__pycache__/os.cpython-311.pyc" in names  # conda-pack leaves it out by itself
    assert "bin/conda-unpack" not in names
    assert "lib/python3.11/this.py" not in names
    assert set(record["files"]) <= names
    assert record["link"]["source"] == ""


def test_progress_reaches_the_end(packed: Packed) -> None:
    """The bar goes up to 1."""
    assert packed.seen == sorted(packed.seen)
    assert packed.seen[-1] == 1.0


def test_one_worker_writes_the_same_bytes(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with other cores gives the same archive."""
    digests = []
    for cores in ({0}, set(range(16))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        digests.append(write_archive(plan_archive(prefix), tmp_path / f"{len(cores)}.tar.gz"))
    assert digests[0] == digests[1]


def test_an_archive_is_packed_once(prefix: Path, tmp_path: Path) -> None:
    """The second call takes it from the cache with all its facts, and leaves its time: Triton extracts again otherwise."""
    workspace = workspace_in(tmp_path / "cache")
    finished = Prefix(prefix, "key", small_lock(), (), reused=False)
    first = LAYOUT.pack(workspace, finished)
    assert first.path == tmp_path / "cache/archives" / f"{LAYOUT.key('key')}.tar.gz"
    assert (first.identity, first.environment.size) == (file_sha256(first.path), first.path.stat().st_size)
    facts = first.path.with_name(f"{LAYOUT.key('key')}.json")
    for file in (first.path, facts):
        os.utime(file, (1000, 1000))
    assert LAYOUT.pack(workspace, finished) == dataclasses.replace(first, reused=True)
    assert first.path.stat().st_mtime == 1000
    assert facts.stat().st_mtime > 1000  # by which the cache knows what is used
    assert list(workspace.cache.path("build").iterdir()) == []
    with first.path.open("r+b") as stream:
        stream.truncate(first.environment.size - 1)  # through the link of a published model, say
    assert LAYOUT.pack(workspace, finished) == first


def test_a_full_disk_is_found_out_before_packing(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the unpacked size must be free, and nothing is begun without it."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**6}))
    with pytest.raises(VllmEnvError, match="No space: the archive needs"):
        LAYOUT.pack(workspace_in(tmp_path), Prefix(prefix, "key", small_lock(), (), reused=False))
    assert list(tmp_path.iterdir()) == []


def test_a_prefix_can_be_packed_by_itself(prefix: Path, packed: Packed, tmp_path: Path) -> None:
    """``python -m vllm_env.layout`` writes what a build would, and prints its digest: the benchmarks measure it."""
    command: list[str | Path] = [sys.executable, "-m", "vllm_env.layout", prefix, tmp_path / "own.tar.gz"]
    printed = subprocess.check_output(command, text=True, env={"PYTHONPATH": str(CHECKOUT / "env")})
    assert printed == f"{packed.digest}\n"
    assert file_sha256(tmp_path / "own.tar.gz") == packed.digest


@pytest.mark.parametrize(
    ("message", "cause", "remedy"),
    [
        ("Truncated input file: No space left on device", "cut off or damaged", "Build it again"),
        ("Can't write: No space left on device", "The file system is full", "Free some space"),
        ("anything else", "archive_read_next_header() answers -30", "Build it again"),
    ],
)
def test_cause_and_remedy_belong_together(message: str, cause: str, remedy: str) -> None:
    """A message may look like two faults; the remedy is that of the cause which is named."""
    refused = {"message": message, "call": "archive_read_next_header", "status": -30, "member": "lib/a"}
    error = _explained(Path("env.tar.gz"), refused)
    assert cause in error.cause
    assert remedy in error.remedy


def test_the_key_follows_the_prefix() -> None:
    """Another prefix is another archive."""
    assert LAYOUT.key("a") != LAYOUT.key("b")
