"""What a built model has, by a look at its files: to compare with its bill of materials."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from vllm_env.base.filesystem import file_sha256

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_ELF = b"\x7fELF"


@dataclass(frozen=True)
class Materials:
    """The parts of a model.

    Attributes:
        wheels: versions by name.
        conda: versions of conda packages by name.
        files: digests of programs and libraries that are of no package, by path in the environment or in the model's folder.
    """

    wheels: dict[str, str]
    conda: dict[str, str]
    files: dict[str, str]


def listed_in(model: Path) -> Materials:
    """Return what a model's bill of materials lists."""
    listed = json.loads((model / "vllm_env.cdx.json").read_text("utf-8"))["components"]
    files = {one["bom-ref"]: one["hashes"][0]["content"] for one in listed if not one["bom-ref"].startswith("pkg:")}
    assert list(files) == [one["evidence"]["occurrences"][0]["location"] for one in listed if one["bom-ref"] in files]
    return Materials(_versions(listed, "pkg:pypi/"), _versions(listed, "pkg:conda/"), files)


def found_in(model: Path, environment: Path) -> Materials:
    """Return what a model's folder and its unpacked environment have.

    Every ELF file of the environment counts that no wheel's RECORD and no package of conda-forge has. A package made from an
    interpreter of this machine brings this machine's libraries, which count; the interpreter is the package itself.
    """
    (python,) = environment.glob("lib/python3.*")
    packages = python / "site-packages"
    metadata = [*packages.glob("*.dist-info")]
    wheels = {str(canonicalize_name(one.name)): one.version for one in map(PathDistribution, metadata)}
    records = [row[0] for folder in metadata for row in csv.reader((folder / "RECORD").open(encoding="utf-8"))]
    owned = {os.path.normpath(packages / path) for path in records}
    conda = {}
    for file in environment.glob("conda-meta/*.json"):
        package = json.loads(file.read_text("utf-8"))
        conda[package["name"]] = package["version"]
        if not package["build"].startswith("local"):
            owned |= {str(environment / path) for path in package["files"]}
    foreign = [file for file in _elf_files(environment) if str(file) not in owned and not _is_interpreters(file, python)]
    beside = [*model.glob("triton_python_backend_stub"), *model.glob("stub_lib/*")]
    files = {str(file.relative_to(environment)): file_sha256(file) for file in foreign}
    return Materials(wheels, conda, files | {str(file.relative_to(model)): file_sha256(file) for file in beside})


def _versions(listed: Iterable[dict[str, str]], kind: str) -> dict[str, str]:
    return {one["name"]: one["version"] for one in listed if one["bom-ref"].startswith(kind)}


def _elf_files(folder: Path) -> list[Path]:
    found = []
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            with file.open("rb") as stream:
                if stream.read(len(_ELF)) == _ELF:
                    found.append(file)
    return found


def _is_interpreters(file: Path, python: Path) -> bool:
    return file.name.startswith(("libpython3", "python3")) or file.parent == python / "lib-dynload"
