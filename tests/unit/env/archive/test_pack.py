"""What conda-pack puts into an archive, and how it is written."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from typing import TYPE_CHECKING

import pytest

from vllm_env.archive import pack
from vllm_env.archive.pack import archive_key, plan_archive, write_archive
from vllm_env.prefix.relocate import make_relocatable
from vllm_env.prefix.runtime import site_packages

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def prefix(bare_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix from whose conda package a file was left out, as the prune rules do."""
    prefix = tmp_path_factory.mktemp("pack") / "env"
    shutil.copytree(bare_prefix, prefix, symlinks=True)
    (prefix / "lib/python3.11/this.py").unlink()
    (prefix / "own.txt").write_text("not of conda")
    make_relocatable(prefix, site_packages(prefix))
    return prefix


def test_the_plan_holds_conda_files_other_files_and_the_activation(prefix: Path, tmp_path: Path) -> None:
    """Triton needs bin/activate, which conda-pack adds; conda-unpack, which nobody runs, is left out."""
    plan = plan_archive(prefix)
    digest = write_archive(plan, tmp_path / "env.tar.gz")
    assert digest == hashlib.sha256((tmp_path / "env.tar.gz").read_bytes()).hexdigest()
    with tarfile.open(tmp_path / "env.tar.gz") as archive:
        names = set(archive.getnames())
        stream = archive.extractfile(next(n for n in names if n.startswith("conda-meta/python-")))
        assert stream
        record = json.load(stream)
    assert {"bin/activate", "bin/python3.11", "own.txt", "conda-meta/history"} <= names
    assert "bin/conda-unpack" not in names
    assert "lib/python3.11/this.py" not in names
    assert set(record["files"]) <= names
    assert record["link"]["source"] == ""


def test_progress_reaches_the_end(prefix: Path, tmp_path: Path) -> None:
    """The bar goes up to 1."""
    seen: list[float] = []
    write_archive(plan_archive(prefix), tmp_path / "env.tar.gz", lambda fraction, _: seen.append(fraction))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_one_worker_writes_the_same_bytes(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with other cores gives the same archive."""
    many = write_archive(plan_archive(prefix), tmp_path / "many.tar.gz")
    monkeypatch.setattr(pack.os, "cpu_count", lambda: 1)
    assert write_archive(plan_archive(prefix), tmp_path / "one.tar.gz") == many


def test_the_key_follows_the_prefix() -> None:
    """Another prefix is another archive."""
    assert archive_key("a") != archive_key("b")
