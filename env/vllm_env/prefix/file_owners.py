"""Find files that two distributions own with different contents: the one installed last overwrites the other's file.

The RECORD files of wheels list all files with digests. When uv installs a wheel, it copies these rows unchanged. So the
environment's RECORD files can be read until relocate.py rewrites them. Reading 57,000 rows takes 0.3 s.

uv's preview feature ``detect-module-conflicts`` is not enough: it warns of modules that two wheels contain, but names
neither files nor a remedy.
"""

import csv
import fnmatch
import importlib.metadata
import io
import posixpath
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_env.base.errors import VllmEnvError

# Nothing imports or reads these at run time; projects include them in their wheels by mistake.
_HARMLESS = (
    "build_backend.py", "conftest.py", "setup.py", "tests/*", "test/*", "docs/*", "examples/*", "benchmarks/*",
    "LICENSE*", "NOTICE*", "README*", "CHANGELOG*", "CHANGES*",
)  # fmt: skip


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


@dataclass(frozen=True)
class Owned:
    """The files of a distribution (digests by path), and its requirements from its metadata."""

    files: Mapping[str, str]
    requires: tuple[str, ...] = ()


def read_installed(packages: Path) -> dict[Distribution, Owned]:
    """Return the files of each distribution in a ``site-packages`` folder; call it before RECORD files are rewritten."""
    owned = {}
    for found in importlib.metadata.distributions(path=[str(packages)]):
        metadata = found.metadata
        distribution = Distribution(str(canonicalize_name(metadata["Name"])), metadata["Version"])
        owned[distribution] = Owned(
            _rows(found.read_text("RECORD") or ""), tuple(metadata.get_all("Requires-Dist") or ())
        )
    return owned


def _rows(record: str) -> dict[str, str]:
    """Return the digests of a RECORD by path; omit files without one (RECORD itself, bytecode): they cannot be compared."""
    rows = (row for row in csv.reader(io.StringIO(record)) if len(row) > 1 and row[1])
    return {posixpath.normpath(row[0]): row[1] for row in rows}


def find_clashes(owned: Mapping[Distribution, Owned]) -> tuple[Clash, ...]:
    """Return the files that two distributions own with different contents. Equal files, as of namespaces, are harmless."""
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
    """Raise an error if two distributions clash in files that are read at run time.

    Raises:
        VllmEnvError: names both distributions and the constraint that would help.
    """
    pairs: dict[tuple[Distribution, Distribution], list[str]] = defaultdict(list)
    for clash in clashes:
        if not any(fnmatch.fnmatchcase(clash.path, pattern) for pattern in _HARMLESS):
            pairs[clash.one, clash.other].append(clash.path)
    if not pairs:
        return
    (one, other), paths = max(pairs.items(), key=lambda item: len(item[1]))
    more = f" {len(pairs) - 1} more pairs of packages clash as well." if len(pairs) > 1 else ""
    count, shortest = (
        f"{len(paths)} file{'s' if len(paths) > 1 else ''}",
        min(paths, key=lambda path: (path.count("/"), path)),
    )
    raise VllmEnvError(
        f"{one} and {other} own {count} with different contents, such as {shortest}.{more}",
        cause=" ".join(
            [
                "The one that is installed last wins, for both.",
                *_asked_by(one, owned),
                *_asked_by(other, owned),
            ]
        ),
        remedy=_remedy(one, other, len(paths), owned),
    )


def _asked_by(wanted: Distribution, owned: Mapping[Distribution, Owned]) -> list[str]:
    """Return one sentence about the distributions that require ``wanted``; an empty list if no distribution does."""
    found = []
    for distribution, has in sorted(owned.items()):
        for text in has.requires:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if canonicalize_name(requirement.name) == wanted.name and applies:
                found.append(
                    f"{distribution.name} ({requirement.specifier})"
                    if requirement.specifier
                    else distribution.name
                )
    return [f"{wanted.name} is required by {', '.join(sorted(set(found))[:3])}."] if found else []


def _remedy(
    one: Distribution, other: Distribution, count: int, owned: Mapping[Distribution, Owned]
) -> str:
    """Return the constraint that most probably helps.

    There are two known cases:

    - Two releases of one family, such as cuda-python 12 next to cuda-bindings 13. The older package contains files that later
      became a package of their own. A release of the newer generation no longer has these files.
    - Two builds of one project, such as opencv-python and opencv-python-headless. They share at least half of their files;
      one of them has to be left out.
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
