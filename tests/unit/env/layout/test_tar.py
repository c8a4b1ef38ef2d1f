"""The archive's bytes: the same for the same tree, and readable by everyone."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
from typing import TYPE_CHECKING

import libarchive
import pytest

from vllm_env.base.machine import EPOCH
from vllm_env.layout.tar import TarContents, compress_chunk

if TYPE_CHECKING:
    from pathlib import Path

_LONG = "lib/" + "/".join(["a-folder-with-a-long-name"] * 8) + "/" + "n" * 120 + ".py"
_BIG = 9 * 2**20 + 17  # bytes; over two chunks' borders


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Every kind of member: program, text, big file, empty file, empty folder, long name, links, non-ASCII."""
    contents = {
        "bin/tool": b"#!/bin/sh\n",
        "etc/text": b"x" * 513,
        "lib/big": os.urandom(_BIG),
        "empty": b"",
        _LONG: b"long",
    }
    contents["share/ключ-é"] = b"name"
    for name, data in contents.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(0o600)
    (tmp_path / "bin/tool").chmod(0o700)
    (tmp_path / "void").mkdir()
    (tmp_path / "link").symlink_to("bin/tool")
    (tmp_path / "long-link").symlink_to("x" * 150)
    return tmp_path


def _contents(tree: Path) -> TarContents:
    contents = TarContents(left_out=frozenset({"left-out"}))
    for path in sorted(tree.rglob("*")):
        if path.is_symlink() or path.is_file() or not any(path.iterdir()):
            contents.add(str(path), path.relative_to(tree).as_posix())
    contents.add_bytes(str(tree / "bin/tool"), b"new", "made")
    contents.add_bytes(str(tree / "bin/tool"), b"new", "left-out")
    return contents


@pytest.mark.parametrize(("values", "stored"), [(256, True), (200, True), (64, False)])
def test_what_hardly_shrinks_is_stored(values: int, stored: bool) -> None:
    """It unpacks four times as fast, on the one core that a server has for it; with 200 values deflate gains 4 %."""
    data = random.Random(5).choices(bytes(range(values)), k=2**20)
    member = bytes(compress_chunk([bytes(data)]))
    kind = member[10] >> 1 & 3  # after gzip's header (RFC 1952, 2.3); 0 is a stored block (RFC 1951, 3.2.3)
    assert (kind == 0) == stored
    assert (len(member) < 0.8 * len(data)) != stored
    assert gzip.decompress(member) == bytes(data)


def _archive(contents: TarContents) -> bytes:
    return b"".join(compress_chunk(chunk) for chunk in contents.chunks())


_NAMES = ["a", "x" * 100, "x" * 101, "\u00e9" * 50, "\u00e9" * 51, "y" * 255, "d/" * 300, "\udcff" * 3]
_LINKS = ["l", "l" * 100, "l" * 101, "\u00e9" * 70]


@pytest.mark.parametrize(("name", "link"), zip(_NAMES, 2 * _LINKS, strict=True))
def test_names_and_links_of_any_length_are_read_back(tmp_path: Path, name: str, link: str) -> None:
    """Also bytes that are no UTF-8; conda packages have both."""
    place = tmp_path / name / "link"
    place.parent.mkdir(parents=True)
    place.symlink_to(link)
    contents = TarContents()
    contents.add(str(place), place.relative_to(tmp_path).as_posix())
    contents.add(str(place.parent), place.parent.relative_to(tmp_path).as_posix())
    with tarfile.open(fileobj=io.BytesIO(_archive(contents))) as archive:
        assert [(m.name, m.linkname, m.isdir(), m.mtime) for m in archive] == [
            (place.relative_to(tmp_path).as_posix(), link, False, EPOCH),
            (name.rstrip("/"), "", True, EPOCH),
        ]


def test_tarfile_reads_every_member_back(tree: Path) -> None:
    """Names, kinds, modes, times and contents survive."""
    with tarfile.open(fileobj=io.BytesIO(_archive(_contents(tree)))) as archive:
        members = {m.name: m for m in archive}
        assert members[_LONG].size == 4
        assert members["bin/tool"].mode == members["made"].mode == 0o755
        assert members["etc/text"].mode == 0o644
        assert members["void"].isdir()
        assert members["link"].issym()
        assert members["long-link"].linkname == "x" * 150
        assert {m.mtime for m in members.values()} == {EPOCH}
        assert {(m.uid, m.gid, m.uname, m.gname) for m in members.values()} == {(0, 0, "", "")}
        for name in ("lib/big", "empty", _LONG, "share/ключ-é", "etc/text"):
            stream = archive.extractfile(name)
            assert stream
            assert stream.read() == (tree / name).read_bytes()
    assert "left-out" not in members


def test_libarchive_reads_it_too(tree: Path) -> None:
    """Triton extracts with libarchive, which must go on after the first gzip member."""
    with libarchive.memory_reader(_archive(_contents(tree))) as archive:
        sizes = {entry.pathname: entry.size for entry in archive}
    assert sizes["lib/big"] == _BIG
    assert sizes[_LONG] == 4
    assert sizes["made"] == 3
    assert set(sizes) == {*(m for m in sizes if (tree / m).is_symlink() or (tree / m).exists()), "made"}


def test_a_file_that_shrank_is_an_error_and_no_broken_archive(tree: Path) -> None:
    """A file cut off between the choice of the files and the writing would shift all that follows."""
    contents = _contents(tree)
    (tree / "lib/big").write_bytes(b"short")
    with pytest.raises(OSError, match="changed while it was packed"):
        _archive(contents)
