"""Finds files that two distributions own with different contents: the one that is installed last wins, for both.

The wheels' own RECORD files tell it exactly. uv copies their rows as they are when it installs, so the environment's
RECORD files can be read instead, up to the step that makes them anew (relocate.py): 57,000 rows take 0.3 s. uv's preview
feature ``detect-module-conflicts`` warns of modules that two wheels have and names neither files nor remedy.
"""

from __future__ import annotations

import csv
import fnmatch
import io
import posixpath
import re
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, BinaryIO

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_env.base.errors import VllmEnvError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# Nothing imports or reads these at run time; projects leave them in their wheels by mistake.
_HARMLESS = (
    "build_backend.py", "conftest.py", "setup.py", "tests/*", "test/*", "docs/*", "examples/*", "benchmarks/*",
    "LICENSE*", "NOTICE*", "README*", "CHANGELOG*", "CHANGES*",
)  # fmt: skip
_DATA = re.compile(r"[^/]+\.data/(?P<scheme>purelib|platlib|scripts|data)/(?P<rest>.+)")
_PLACES = {"purelib": "", "platlib": "", "scripts": "../../../bin/", "data": "../../../"}


@dataclass(frozen=True, order=True)
class Distribution:
    """A distribution by its normalised name and its version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, order=True)
class Clash:
    """A file, relative to ``site-packages``, that two distributions own with different contents."""

    one: Distribution
    other: Distribution
    path: str

    @property
    def is_harmless(self) -> bool:
        """Whether nothing reads the file at run time."""
        return any(fnmatch.fnmatchcase(self.path, pattern) for pattern in _HARMLESS)


@dataclass(frozen=True)
class Owned:
    """What a distribution owns: digests by path, and what it requires, as its metadata says."""

    files: Mapping[str, str]
    requires: tuple[str, ...] = ()


def read_installed(packages: Path) -> dict[Distribution, Owned]:
    """Read what the distributions in a ``site-packages`` folder own, before anything rewrites their RECORD files."""
    owned = {}
    for record in sorted(packages.glob("*.dist-info/RECORD")):
        metadata = record.with_name("METADATA")
        requires = _requires(metadata.read_text("utf-8", "replace")) if metadata.is_file() else ()
        owned[_distribution(record.parent.name)] = Owned(_rows(record.read_text("utf-8")), requires)
    return owned


def read_wheel(wheel: Path | BinaryIO) -> tuple[Distribution, Owned]:
    """Read what a wheel will own once it is installed; the stream may be one that fetches what is read of it.

    Raises:
        VllmEnvError: it is not a wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", n))
            rows = _rows(archive.read(record).decode("utf-8"))
            requires = _requires(archive.read(posixpath.dirname(record) + "/METADATA").decode("utf-8", "replace"))
    except (zipfile.BadZipFile, StopIteration, KeyError) as error:
        raise VllmEnvError(f"{wheel} is not a wheel: it has no RECORD.", remedy="Download it again.") from error
    files = {_installed_path(path): digest for path, digest in rows.items()}
    return _distribution(posixpath.dirname(record)), Owned(files, requires)


def _distribution(folder: str) -> Distribution:
    name, _, version = folder.removesuffix(".dist-info").partition("-")
    return Distribution(str(canonicalize_name(name)), version)


def _rows(record: str) -> dict[str, str]:
    """Return the digests of a RECORD by path; files without one (RECORD itself, bytecode) cannot be compared."""
    rows = (row for row in csv.reader(io.StringIO(record)) if len(row) > 1 and row[1])
    return {posixpath.normpath(row[0]): row[1] for row in rows}


def _requires(metadata: str) -> tuple[str, ...]:
    head = metadata.partition("\n\n")[0]
    return tuple(re.findall(r"^Requires-Dist:\s*(.+?)\s*$", head, re.MULTILINE))


def _installed_path(path: str) -> str:
    match = _DATA.fullmatch(path)
    return _PLACES[match["scheme"]] + match["rest"] if match else path


def find_clashes(owned: Mapping[Distribution, Owned]) -> tuple[Clash, ...]:
    """Return the files that two distributions own with different contents; equal ones, as of namespaces, are fine."""
    owners: dict[str, list[Distribution]] = defaultdict(list)
    for distribution in sorted(owned):
        for path in owned[distribution].files:
            owners[path].append(distribution)
    return tuple(
        sorted(
            Clash(one, other, path)
            for path, several in owners.items()
            for one, other in combinations(several, 2)
            if owned[one].files[path] != owned[other].files[path]
        )
    )


def check_clashes(clashes: Iterable[Clash], owned: Mapping[Distribution, Owned]) -> None:
    """Refuse clashes of files that something reads at run time.

    Raises:
        VllmEnvError: naming both distributions and the constraint that would help.
    """
    pairs: dict[tuple[Distribution, Distribution], list[str]] = defaultdict(list)
    for clash in clashes:
        if not clash.is_harmless:
            pairs[clash.one, clash.other].append(clash.path)
    if not pairs:
        return
    (one, other), paths = max(pairs.items(), key=lambda item: len(item[1]))
    more = f" {len(pairs) - 1} more pairs of packages clash as well." if len(pairs) > 1 else ""
    raise VllmEnvError(
        f"{one} and {other} own {_count(paths)} with different contents, such as {min(paths, key=_depth)}.{more}",
        cause=" ".join(["The one that is installed last wins, for both.", *_asked_by(one, owned), *_asked_by(other, owned)]),
        remedy=_remedy(one, other, len(paths), owned),
    )


def _count(paths: list[str]) -> str:
    return f"{len(paths)} file{'s' if len(paths) > 1 else ''}"


def _depth(path: str) -> tuple[int, str]:
    return path.count("/"), path


def _asked_by(wanted: Distribution, owned: Mapping[Distribution, Owned]) -> list[str]:
    """Return one sentence on which distributions require ``wanted``, or none."""
    found = []
    for distribution, has in sorted(owned.items()):
        for text in has.requires:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if canonicalize_name(requirement.name) == wanted.name and applies:
                found.append(f"{distribution.name} ({requirement.specifier})" if requirement.specifier else distribution.name)
    return [f"{wanted.name} is required by {', '.join(sorted(set(found))[:3])}."] if found else []


def _remedy(one: Distribution, other: Distribution, count: int, owned: Mapping[Distribution, Owned]) -> str:
    """Return the constraint that most probably helps.

    Two releases of one family, such as cuda-python 12 beside cuda-bindings 13: the older package had what became a
    package of its own, so a release of the newer's generation does not have the files. Two that share most of their
    files are builds of one project, such as opencv-python and opencv-python-headless: one of them has to go.
    """
    if 2 * count >= max(len(owned[d].files) for d in (one, other)):
        return f'They are two builds of one project: leave one out (drop = ["{other.name}"] in the spec).'
    older, newer = sorted((one, other), key=_major)
    if _major(older) < _major(newer) and older.name.split("-")[0] == newer.name.split("-")[0]:
        return f"They are of two generations, which do not mix: add --with '{older.name}>={_major(newer)}'."
    return (
        f"Ask for another release of one of them (--with '{one.name}!={one.version}' or '{other.name}!={other.version}'), "
        "or leave one out (drop in the spec)."
    )


def _major(distribution: Distribution) -> int:
    try:
        return Version(distribution.version).major
    except InvalidVersion:
        return 0
