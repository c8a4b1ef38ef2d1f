"""What conda-pack puts into an archive, and how it is written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest

from support.small_fixtures import copy_slim
from vllm_env.layout.archive import _refusal_error
from vllm_env.layout.tar import contents_of, write_archive
from vllm_env.prefix.relocate import make_relocatable, site_packages

pytestmark = pytest.mark.long


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
    return Packed(path, write_archive(contents_of(prefix), path, lambda _, fraction: seen.append(fraction)), seen)


def test_an_archive_holds_conda_files_other_files_and_the_activation(packed: Packed) -> None:
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


def test_an_archive_is_on_the_disk_when_its_digest_is_known(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache keeps the digest: after a loss of power it must not be that of another file."""
    synced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append((os.fstat(handle).st_ino, os.fstat(handle).st_size)))
    write_archive(contents_of(prefix), tmp_path / "env.tar.gz")
    status = (tmp_path / "env.tar.gz").stat()
    assert synced == [(status.st_ino, status.st_size)]


def test_one_worker_writes_the_same_bytes(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with other cores gives the same archive."""
    digests = []
    for cores in ({0}, set(range(16))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        digests.append(write_archive(contents_of(prefix), tmp_path / f"{len(cores)}.tar.gz"))
    assert digests[0] == digests[1]


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
    error = _refusal_error(Path("env.tar.gz"), refused)
    assert cause in error.cause
    assert remedy in error.remedy
