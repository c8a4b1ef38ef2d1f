"""Find files that two distributions own with different contents, and libraries of none.

The distribution that is installed last overwrites the other's file.

uv's preview feature ``detect-module-conflicts`` is not enough. It warns of modules that two wheels
contain, but names neither files nor a remedy.
"""

import csv
import fnmatch
import importlib.metadata
import io
import json
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
from vllm_env.interpreter.layer import LOCAL_CHANNEL

from .relocate import site_packages

# Nothing imports or reads these at run time; projects include them in their wheels by mistake.
_HARMLESS = (
    "build_backend.py", "conftest.py", "setup.py",
    "tests/*", "test/*", "docs/*", "examples/*", "benchmarks/*",
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
    """Return the files and requirements of each distribution in a ``site-packages`` folder."""
    # The RECORD of a wheel lists its files with digests. uv copies these rows unchanged when it
    # installs, so a digest is still the wheel's own even if another wheel has overwritten the file.
    # relocate.py rewrites the rows later. Reading 57,000 of them takes 0.3 s.
    owned = {}
    for installed in importlib.metadata.distributions(path=[str(packages)]):
        metadata = installed.metadata
        distribution = Distribution(str(canonicalize_name(metadata["Name"])), metadata["Version"])
        requires = tuple(metadata.get_all("Requires-Dist") or ())
        owned[distribution] = Owned(_digests(installed.read_text("RECORD") or ""), requires)
    return owned


def _digests(record: str) -> dict[str, str]:
    """Return the digests of a RECORD by path."""
    # Files without a digest (RECORD itself, bytecode) are omitted: they cannot be compared.
    rows = (row for row in csv.reader(io.StringIO(record)) if len(row) > 1 and row[1])
    return {posixpath.normpath(path): digest for path, digest, *_ in rows}


def foreign_libraries(prefix: Path) -> dict[str, Path]:
    """Return the shared libraries that are of no wheel and of no package of conda-forge.

    They are Triton's or this machine's: copied into the prefix because a file needs them, or into
    the conda package that was made from an interpreter of this machine. The keys are their paths in
    the prefix, such as ``lib/libnuma.so.1``.
    """
    packages = site_packages(prefix)
    # The files of wheels, then those of conda's packages, relative to the prefix. A RECORD may have
    # paths such as ../../../bin/NAME.
    owned = {
        posixpath.normpath(packages.relative_to(prefix) / path)
        for distribution in read_installed(packages).values()
        for path in distribution.files
    }
    for record in prefix.glob("conda-meta/*.json"):
        package = json.loads(record.read_text("utf-8"))
        is_from_machine = package["build"].startswith(LOCAL_CHANNEL)
        if not is_from_machine:
            owned.update(package["files"])
    libraries = {f"lib/{file.name}": file for file in (prefix / "lib").glob("lib*.so*")}
    return {
        path: file
        for path, file in libraries.items()
        # libpython is the interpreter itself.
        if path not in owned and not file.is_symlink() and not file.name.startswith("libpython")
    }


def find_clashes(owned: Mapping[Distribution, Owned]) -> tuple[Clash, ...]:
    """Return the files that two distributions own with different contents."""
    owners: dict[str, list[Distribution]] = defaultdict(list)
    for distribution in sorted(owned):
        for path in owned[distribution].files:
            owners[path].append(distribution)
    clashes = []
    for path, distributions in owners.items():
        for one, other in combinations(distributions, 2):
            # Equal files are harmless, such as the empty __init__.py of a namespace.
            if owned[one].files[path] != owned[other].files[path]:
                clashes.append(Clash(one, other, path))
    return tuple(sorted(clashes))


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
    # The message explains one pair, the one with the most files.
    one, other = max(pairs, key=lambda pair: len(pairs[pair]))
    paths = pairs[one, other]
    files = f"{len(paths)} file{'s' if len(paths) > 1 else ''}"
    # A short path is the easiest to recognise.
    example = min(paths, key=lambda path: (path.count("/"), path))
    more = f" {len(pairs) - 1} more pairs of packages clash as well." if len(pairs) > 1 else ""
    sentences = [
        "The one that is installed last wins, for both.",
        _asked_by(one, owned),
        _asked_by(other, owned),
    ]
    raise VllmEnvError(
        f"{one} and {other} own {files} with different contents, such as {example}.{more}",
        cause=" ".join(filter(None, sentences)),
        remedy=_remedy(one, other, len(paths), owned),
    )


def _asked_by(wanted: Distribution, owned: Mapping[Distribution, Owned]) -> str:
    """Return a sentence that names distributions that require ``wanted``; "" if none does."""
    askers = set()
    for distribution, contents in owned.items():
        for text in contents.requires:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                # uv has accepted this metadata, so it must not fail the build here.
                continue
            marker = requirement.marker
            # Without extras: the lock does not tell which extras were asked for.
            applies = marker is None or marker.evaluate({"extra": ""})
            if applies and canonicalize_name(requirement.name) == wanted.name:
                specifier = requirement.specifier
                askers.add(f"{distribution.name} ({specifier})" if specifier else distribution.name)
    return f"{wanted.name} is required by {', '.join(sorted(askers)[:3])}." if askers else ""


def _remedy(
    one: Distribution, other: Distribution, count: int, owned: Mapping[Distribution, Owned]
) -> str:
    """Return the constraint that most probably helps if two distributions clash.

    ``count`` is the number of files that both own with different contents.
    """
    # Two builds of one project, such as opencv-python and opencv-python-headless, share at least
    # half of their files.
    share_half = 2 * count >= max(len(owned[one].files), len(owned[other].files))
    if share_half:
        return (
            f'They are two builds of one project: leave one out (drop = ["{other.name}"] in the '
            "spec)."
        )
    # Two generations of one family, such as cuda-python 12 next to cuda-bindings 13. The older
    # package contains files that later became a package of their own. A release of the newer
    # generation no longer has these files.
    older, newer = sorted((one, other), key=_major)
    is_one_family = older.name.split("-")[0] == newer.name.split("-")[0]
    if is_one_family and _major(older) < _major(newer):
        return (
            "They are of two generations, which do not mix: "
            f"add --with '{older.name}>={_major(newer)}'."
        )
    return (
        "Ask for another release of one of them "
        f"(--with '{one.name}!={one.version}' or '{other.name}!={other.version}'), "
        "or leave one out (drop in the spec)."
    )


def _major(distribution: Distribution) -> int:
    try:
        return Version(distribution.version).major
    except InvalidVersion:
        # A version that does not follow PEP 440 has no major number.
        return 0
