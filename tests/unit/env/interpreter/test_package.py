"""The conda package of a folder: the format, and the same bytes each time."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest
import zstandard

from vllm_env.interpreter.package import write_conda_package

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A program, a library folder with a link, and a text."""
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin/tool").write_text("#!/bin/sh\n")
    (tree / "bin/tool").chmod(0o700)
    (tree / "lib").mkdir()
    (tree / "lib/a.txt").write_text("text")
    (tree / "lib/b.txt").symlink_to("a.txt")
    return tree


def _pack(tree: Path, folder: Path) -> Path:
    return write_conda_package(tree, folder, name="demo", version="1.2", build="local_0")


def _part(package: Path, prefix: str) -> tarfile.TarFile:
    with zipfile.ZipFile(package) as archive:
        data = archive.read(next(n for n in archive.namelist() if n.startswith(prefix)))
    return tarfile.open(fileobj=io.BytesIO(zstandard.ZstdDecompressor().decompressobj().decompress(data)))


def test_the_package_is_of_the_conda_format(tree: Path, tmp_path: Path) -> None:
    """metadata.json, and the two tars with the files and their records; digests and sizes are true."""
    package = _pack(tree, tmp_path)
    with zipfile.ZipFile(package) as archive:
        assert json.loads(archive.read("metadata.json")) == {"conda_pkg_format_version": 2}
        assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
    with _part(package, "info-") as info:
        index, paths = (json.load(info.extractfile(f"info/{n}.json")) for n in ("index", "paths"))
    assert (index["name"], index["version"], index["subdir"]) == ("demo", "1.2", "linux-64")
    by_path = {p["_path"]: p for p in paths["paths"]}
    assert by_path["lib/a.txt"]["sha256"] == hashlib.sha256(b"text").hexdigest()
    assert by_path["lib/b.txt"]["path_type"] == "softlink"


def test_modes_and_links_survive(tree: Path, tmp_path: Path) -> None:
    """Programs stay programs, links stay links, and nobody's user id is in it."""
    with _part(_pack(tree, tmp_path), "pkg-") as files:
        members = {m.name: m for m in files}
    assert members["bin/tool"].mode == 0o755
    assert members["lib/a.txt"].mode == 0o644
    assert members["lib/b.txt"].linkname == "a.txt"
    assert {(m.uid, m.uname, m.mtime) for m in members.values()} == {(0, "", 0)}
