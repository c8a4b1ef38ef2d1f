"""Writes a folder as a conda package (the ``.conda`` format: a ZIP of two zstd tars), the same bytes for the same folder.

The library conda-package-streaming would write the time of packing into the ZIP.
"""

import hashlib
import io
import json
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zstandard

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest time that ZIP can hold


def write_conda_package(tree: Path, folder: Path, *, name: str, version: str, build: str) -> Path:
    """Pack the files below ``tree`` and return the package's path, ``folder/NAME-VERSION-BUILD.conda``."""
    files = sorted(p for p in tree.rglob("*") if p.is_symlink() or p.is_file())
    index = {
        "name": name, "version": version, "build": build, "build_number": 0, "depends": [], "subdir": "linux-64",
        "arch": "x86_64", "platform": "linux", "license": "PSF-2.0", "timestamp": 0,
    }  # fmt: skip
    paths = {"paths_version": 1, "paths": [_path_entry(tree, file) for file in files]}
    with tempfile.TemporaryDirectory() as scratch:
        info = Path(scratch, "info")
        info.mkdir()
        for file, document in (("index.json", index), ("paths.json", paths)):
            (info / file).write_text(json.dumps(document, indent=1, sort_keys=True), "utf-8")
        packed_info = _tar(info.parent, sorted(info.iterdir()))
    stem = f"{name}-{version}-{build}"
    target = folder / f"{stem}.conda"
    folder.mkdir(parents=True, exist_ok=True)
    members = {
        "metadata.json": json.dumps({"conda_pkg_format_version": 2}).encode(),
        f"pkg-{stem}.tar.zst": _tar(tree, files),
        f"info-{stem}.tar.zst": packed_info,
    }
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for member, data in members.items():
            archive.writestr(zipfile.ZipInfo(member, _EPOCH), data)
    return target


def _path_entry(tree: Path, file: Path) -> dict[str, Any]:
    kind, data = ("softlink", b"") if file.is_symlink() else ("hardlink", file.read_bytes())
    path = file.relative_to(tree).as_posix()
    return {"_path": path, "path_type": kind, "sha256": hashlib.sha256(data).hexdigest(), "size_in_bytes": len(data)}


def _tar(tree: Path, files: Sequence[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for file in files:
            tar.add(file, file.relative_to(tree).as_posix(), recursive=False, filter=_neutral)
    return zstandard.ZstdCompressor(level=3).compress(buffer.getvalue())


def _neutral(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member
