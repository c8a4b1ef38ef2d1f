"""Writes a folder as a conda package (the ``.conda`` format: a ZIP of two zstd tars), the same bytes for the same folder."""

import hashlib
import io
import json
import tarfile
import zipfile
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
    info = {"info/index.json": index, "info/paths.json": paths}
    stem = f"{name}-{version}-{build}"
    target = folder / f"{stem}.conda"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "metadata.json", json.dumps({"conda_pkg_format_version": 2}).encode())
        _add(archive, f"pkg-{stem}.tar.zst", _compress(_tar_of_files(tree, files)))
        _add(archive, f"info-{stem}.tar.zst", _compress(_tar_of_documents(info)))
    return target


def _path_entry(tree: Path, file: Path) -> dict[str, Any]:
    relative = file.relative_to(tree).as_posix()
    if file.is_symlink():
        return {
            "_path": relative,
            "path_type": "softlink",
            "sha256": hashlib.sha256(b"").hexdigest(),
            "size_in_bytes": 0,
        }
    data = file.read_bytes()
    return {
        "_path": relative,
        "path_type": "hardlink",
        "sha256": hashlib.sha256(data).hexdigest(),
        "size_in_bytes": len(data),
    }


def _tar_of_files(tree: Path, files: list[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for file in files:
            member = tar.gettarinfo(file, file.relative_to(tree).as_posix())
            member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            if member.isreg():
                with file.open("rb") as stream:
                    tar.addfile(member, stream)
            else:
                tar.addfile(member)
    return buffer.getvalue()


def _tar_of_documents(documents: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, document in documents.items():
            data = json.dumps(document, indent=1, sort_keys=True).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(data)


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
