"""Compile an environment to bytecode, and keep that of each wheel and of the interpreter.

Two cores need 20 s to compile an environment. The next pin shares most of its wheels.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_env import inside
from vllm_env.base import report
from vllm_env.base.cache import touch
from vllm_env.base.filesystem import link_or_copy, put_in_place
from vllm_env.base.machine import EPOCH, NEUTRAL_PREFIX
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace

from .file_owners import Distribution, Owned
from .relocate import site_packages

# Raise it when the same sources give other bytecode: through compile_tree.py, or a variable below.
_FORMAT = 1
# Sources that one process compiles. marshal marks a string by how often its process holds it, so
# earlier files show in the bytecode: one file in 25,000 differed between two builds. A chunk has
# files of one wheel only, or of the interpreter, so their bytecode is always the same.
_CHUNK_FILES = 64
# Lists an entry's other files.
_LIST_NAME = "numbers.json"


@dataclass(frozen=True)
class _Group:
    """Sources that are compiled together: those of one wheel, or those that no wheel owns.

    Attributes:
        sources: their paths, relative to the prefix and sorted.
        key: the key of their bytecode in the cache.
    """

    sources: tuple[str, ...]
    key: str

    def compiled(self, tag: str) -> list[str]:
        """Return the paths of the bytecode, relative to the prefix, in the order of the sources.

        ``tag`` is the interpreter's, such as ``cpython-311``.
        """
        paths = []
        for folder, name in map(os.path.split, self.sources):
            stem = name.removesuffix(".py")
            paths.append(f"{folder}/__pycache__/{stem}.{tag}.pyc")
        return paths


def compile_prefix(
    workspace: Workspace, prefix: Path, python: str, installed: Mapping[Distribution, Owned]
) -> None:
    """Compile every source of a prefix. Each source must have the time EPOCH.

    Args:
        workspace: the cache.
        prefix: the prefix.
        python: the version of its interpreter.
        installed: the files of each installed wheel. A file of several counts for the first name.
    """
    tag = "cpython-" + "".join(python.split(".")[:2])
    groups = _groups(prefix, python, installed)
    new = [group for group in groups if not _link_cached(workspace, prefix, group, tag)]
    if new:
        _compile(prefix, new)
    for group in new:
        _add_to_cache(workspace, prefix, group, tag)


def _groups(prefix: Path, python: str, installed: Mapping[Distribution, Owned]) -> list[_Group]:
    """Return the sources of a prefix, grouped by the wheel that owns them."""
    packages = site_packages(prefix).relative_to(prefix)
    remaining = set(_sources(prefix))
    groups = []
    # Sorted: the installed wheels are in the order of a folder, which may differ.
    for name in sorted(installed):
        files = (f"{packages}/{path}" for path in installed[name].files)
        own = sorted(remaining.intersection(files))
        if own:
            groups.append(_Group(tuple(own), _key(prefix, python, own)))
            remaining.difference_update(own)
    # The interpreter's sources, and the few that the builder writes.
    if rest := sorted(remaining):
        groups.append(_Group(tuple(rest), _key(prefix, python, rest)))
    return groups


def _key(prefix: Path, python: str, files: list[str]) -> str:
    """Return the key in the cache of the bytecode of sources, named relative to ``prefix``."""
    # From the installed files: a wheel's RECORD may have outdated digests.
    digest = hashlib.sha256(f"{_FORMAT} {python} {NEUTRAL_PREFIX} {EPOCH}".encode())
    for file in files:
        digest.update(os.fsencode(f"\0{file}\0"))
        # A link that leads nowhere is no source.
        with contextlib.suppress(FileNotFoundError):
            digest.update((prefix / file).read_bytes())
    return digest.hexdigest()[:32]


def _sources(prefix: Path) -> list[str]:
    """Return the Python sources of a prefix, relative to it."""
    paths = []
    for folder, _, files in os.walk(prefix / "lib"):
        inner = os.path.relpath(folder, prefix)
        paths += [f"{inner}/{file}" for file in files if file.endswith(".py")]
    return paths


def _link_cached(workspace: Workspace, prefix: Path, group: _Group, tag: str) -> bool:
    """Link a group's bytecode from the cache into the prefix; return whether the cache has it."""
    entry = workspace.cache.path("bytecode", group.key)
    # The files are named by the numbers of their sources in the group. If an entry's removal was
    # interrupted, the list of the numbers or other files are missing.
    try:
        present = {file.name for file in entry.iterdir()}
        numbers = json.loads((entry / _LIST_NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    if not present.issuperset(f"{number}.pyc" for number in numbers):
        return False
    compiled = group.compiled(tag)
    for folder in {compiled[number].rpartition("/")[0] for number in numbers}:
        (prefix / folder).mkdir(exist_ok=True)
    for number in numbers:
        # A string, not a Path, which is slower for 25,000 files.
        target = f"{prefix}/{compiled[number]}"
        # A wheel may bring bytecode of its own. That file is a link to uv's.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)  # noqa: PTH108
        link_or_copy(f"{entry}/{number}.pyc", target)
    touch(entry)
    return True


def _add_to_cache(workspace: Workspace, prefix: Path, group: _Group, tag: str) -> None:
    """Link a group's bytecode from the prefix into the cache."""
    with workspace.cache.staging() as staging:
        entry = staging / "entry"
        entry.mkdir()
        numbers = []
        for number, file in enumerate(group.compiled(tag)):
            # A source that does not compile has none.
            if (prefix / file).is_file():
                link_or_copy(str(prefix / file), str(entry / f"{number}.pyc"))
                numbers.append(number)
        (entry / _LIST_NAME).write_text(json.dumps(numbers), "utf-8")
        put_in_place(entry, workspace.cache.path("bytecode", group.key))


def _compile(prefix: Path, groups: list[_Group]) -> None:
    """Compile the sources of groups with the prefix's interpreter, on all cores."""
    chunks = [
        group.sources[start : start + _CHUNK_FILES]
        for group in groups
        for start in range(0, len(group.sources), _CHUNK_FILES)
    ]
    # -S: neither the user's packages nor the environment's own hook take part. Not -I, which also
    # ignores the hash seed.
    program = [prefix / "bin" / "python", "-S", inside.FOLDER / "compile_tree.py"]
    # Empty values remove the user's variables, such as PYTHONPYCACHEPREFIX.
    variables = {name: "" for name in os.environ if name.startswith("PYTHON")}
    # Python 3.10 writes a set of constants in the order of its hashes. Without a fixed seed, the
    # bytecode would differ from build to build. Python 3.11 and newer sort the set.
    variables["PYTHONHASHSEED"] = "0"
    job = prefix.parent / "chunks.json"
    job.write_text(json.dumps(chunks), "utf-8")
    run(
        [*program, prefix, NEUTRAL_PREFIX, job, os.cpu_count() or 1],
        what="compile the environment to bytecode",
        env=variables,
        on_line=_show_compiled,
    )
    job.unlink()


def _show_compiled(line: str) -> None:
    """Show the progress that compile_tree.py prints: ``DONE TOTAL`` after each chunk of files."""
    progress = re.fullmatch(r"(\d+) (\d+)", line.strip())
    if progress:
        done, total = map(int, progress.groups())
        # Bytecode is the last part of the progress, from 0.4 to 1.
        report.step(f"bytecode {done}/{total}", fraction=0.4 + 0.6 * done / max(1, total))
