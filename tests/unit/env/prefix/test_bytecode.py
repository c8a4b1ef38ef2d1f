"""An environment's bytecode: of each source, and the same whether it is compiled or from the cache."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from support.small_fixtures import workspace_in
from vllm_env import inside
from vllm_env.base.machine import EPOCH
from vllm_env.prefix import bytecode
from vllm_env.prefix.bytecode import compile_prefix
from vllm_env.prefix.file_owners import Owned

PYTHON = platform.python_version()
PACKAGES = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
SOURCES = {
    "one/__init__.py": "X = 1\n",
    "one/broken.py": "print 'Python 2'\n",
    "two.py": "Y = {'a', 'b'}\n",
    "common.py": "Z = 2\n",
}
OWNED = [
    Owned({"one/__init__.py": "sha256=1", "one/broken.py": "sha256=2", "common.py": "sha256=3", "one/data.txt": "sha256=4"}),
    Owned({"two.py": "sha256=5", "common.py": "sha256=6", "removed.py": "sha256=7", "../../../bin/script.py": "sha256=8"}),
]


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the number of sources that each compilation so far was asked for, as its last line of progress."""
    lines: list[str] = []
    monkeypatch.setattr(bytecode, "_show_compiled", lines.append)
    return lines


def prefix_in(folder: Path, more: dict[str, str] | None = None) -> Path:
    """Make a prefix with this Python and the sources."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    for name, text in {**SOURCES, **(more or {})}.items():
        file = folder / PACKAGES / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        os.utime(file, (EPOCH, EPOCH))
    return folder


def compiled(prefix: Path) -> dict[str, bytes]:
    """Return the bytecode by its path in the prefix."""
    return {str(file.relative_to(prefix)): file.read_bytes() for file in prefix.rglob("*.pyc")}


def test_the_cache_gives_what_would_be_compiled(tmp_path: Path, totals: list[str]) -> None:
    """A package's bytecode is linked; a file with two owners is compiled again: it may be either's."""
    first, second, fresh = (prefix_in(tmp_path / name / "env") for name in ("first", "second", "fresh"))
    compile_prefix(workspace_in(tmp_path / "cache"), first, PYTHON, OWNED)
    compile_prefix(workspace_in(tmp_path / "cache"), second, PYTHON, OWNED)
    compile_prefix(workspace_in(tmp_path / "other"), fresh, PYTHON, OWNED)
    assert compiled(first) == compiled(second) == compiled(fresh)
    names = {Path(name).name.partition(".")[0]: name for name in compiled(first)}
    assert set(names) == {"__init__", "two", "common"}
    linked = {key: (first / name).samefile(second / name) for key, name in names.items()}
    assert linked == {"__init__": True, "two": True, "common": False}
    assert [line.split()[1] for line in totals if line.split()[0] == line.split()[1]] == ["4", "1", "4"]
    assert not list(tmp_path.rglob("chunks.json"))


def test_other_sources_are_compiled(tmp_path: Path) -> None:
    """Each package by itself: its digests, its files that are there, and the interpreter count."""
    workspace = workspace_in(tmp_path / "cache")
    first = prefix_in(tmp_path / "first" / "env")
    compile_prefix(workspace, first, PYTHON, OWNED)
    second = prefix_in(tmp_path / "second" / "env", {"two.py": "Y = 3\n"})
    changed = [OWNED[0], Owned({**OWNED[1].files, "two.py": "sha256=9"})]
    compile_prefix(workspace, second, PYTHON, changed)
    third = prefix_in(tmp_path / "third" / "env")
    (third / PACKAGES / "one/broken.py").unlink()
    compile_prefix(workspace, third, PYTHON, OWNED)
    one, two = (str(PACKAGES / name) for name in ("one/__pycache__/__init__", "__pycache__/two"))
    tag = f".{sys.implementation.cache_tag}.pyc"
    assert (first / f"{one}{tag}").samefile(second / f"{one}{tag}")
    assert compiled(second)[f"{two}{tag}"] != compiled(first)[f"{two}{tag}"]
    assert not (first / f"{one}{tag}").samefile(third / f"{one}{tag}")
    assert (first / f"{two}{tag}").samefile(third / f"{two}{tag}")


def test_bytecode_is_compiled_with_a_fixed_hash_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, totals: list[str]) -> None:
    """Python 3.10 compiles sets in the order of their hashes. The user's own variables do not count."""
    code = "import os, sys; print(sys.flags.hash_randomization, *(name for name in os.environ if name.startswith('PYTHON')))"
    (tmp_path / "compile_tree.py").write_text(code)
    monkeypatch.setattr(inside, "FOLDER", tmp_path)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    compile_prefix(workspace_in(tmp_path / "cache"), prefix_in(tmp_path / "made" / "env"), PYTHON, [])
    assert [line.strip() for line in totals] == ["0 PYTHONHASHSEED"]
