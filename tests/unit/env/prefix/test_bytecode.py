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
from vllm_env.prefix.file_owners import Distribution, Owned

PYTHON = platform.python_version()
PACKAGES = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
SOURCES = {
    "one/__init__.py": "X = 1\n",
    "one/broken.py": "print 'Python 2'\n",
    "two.py": "Y = {'a', 'b'}\n",
    "common.py": "Z = 2\n",
}
OWNED = {
    Distribution("one", "1"): Owned(
        {"one/__init__.py": "sha256=1", "one/broken.py": "sha256=2", "common.py": "sha256=3", "one/data.txt": "sha256=4"}
    ),
    Distribution("two", "1"): Owned(
        {"two.py": "sha256=5", "common.py": "sha256=6", "removed.py": "sha256=7", "../../../bin/script.py": "sha256=8"}
    ),
}


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
    """All bytecode is linked, also that of a file with two owners, or with none, as the interpreter's."""
    own = {"hook.py": "H = 1\n"}
    first, second, fresh = (prefix_in(tmp_path / name / "env", own) for name in ("first", "second", "fresh"))
    compile_prefix(workspace_in(tmp_path / "cache"), first, PYTHON, OWNED)
    compile_prefix(workspace_in(tmp_path / "cache"), second, PYTHON, dict(reversed(OWNED.items())))
    compile_prefix(workspace_in(tmp_path / "other"), fresh, PYTHON, OWNED)
    assert compiled(first) == compiled(second) == compiled(fresh)
    names = {Path(name).name.partition(".")[0]: name for name in compiled(first)}
    linked = {key: (first / name).samefile(second / name) for key, name in names.items()}
    assert linked == {"__init__": True, "two": True, "common": True, "hook": True}
    assert [line.split()[1] for line in totals if line.split()[0] == line.split()[1]] == ["5", "5"]
    assert not list(tmp_path.rglob("chunks.json"))


def test_other_sources_are_compiled(tmp_path: Path) -> None:
    """Each package by itself: the contents of its files that are there, and the interpreter, whatever RECORD says."""
    workspace = workspace_in(tmp_path / "cache")
    first = prefix_in(tmp_path / "first" / "env")
    compile_prefix(workspace, first, PYTHON, OWNED)
    second = prefix_in(tmp_path / "second" / "env", {"two.py": "Y = {'b', 'a'}\n"})
    compile_prefix(workspace, second, PYTHON, OWNED)
    third = prefix_in(tmp_path / "third" / "env")
    (third / PACKAGES / "one/broken.py").unlink()
    compile_prefix(workspace, third, PYTHON, OWNED)
    one, two = (
        f"{PACKAGES / name}.{sys.implementation.cache_tag}.pyc" for name in ("one/__pycache__/__init__", "__pycache__/two")
    )
    assert (first / one).samefile(second / one)
    assert not (first / two).samefile(second / two)
    assert not (first / one).samefile(third / one)
    assert (first / two).samefile(third / two)
    fourth = prefix_in(tmp_path / "fourth" / "env")
    compile_prefix(workspace, fourth, f"{PYTHON}.1", OWNED)
    assert not (first / two).samefile(fourth / two)


@pytest.mark.parametrize("lost", ["numbers.json", "0.pyc"])
def test_an_entry_that_is_not_whole_is_made_again(tmp_path: Path, lost: str) -> None:
    """Its removal was interrupted: a source without bytecode would count as one that does not compile."""
    workspace = workspace_in(tmp_path / "cache")
    first, second = (prefix_in(tmp_path / name / "env") for name in ("first", "second"))
    compile_prefix(workspace, first, PYTHON, OWNED)
    for entry in workspace.cache.path("bytecode").iterdir():
        (entry / lost).unlink()
    compile_prefix(workspace, second, PYTHON, OWNED)
    assert compiled(second) == compiled(first)
    assert all((entry / lost).is_file() for entry in workspace.cache.path("bytecode").iterdir())


def test_bytecode_of_a_wheel_is_replaced_and_not_written_to(tmp_path: Path) -> None:
    """Its file is a link to that of uv's cache."""
    workspace = workspace_in(tmp_path / "cache")
    first, second = (prefix_in(tmp_path / name / "env") for name in ("first", "second"))
    compile_prefix(workspace, first, PYTHON, OWNED)
    (tmp_path / "uv.pyc").write_bytes(b"uv's")
    two = second / PACKAGES / f"__pycache__/two.{sys.implementation.cache_tag}.pyc"
    two.parent.mkdir()
    two.hardlink_to(tmp_path / "uv.pyc")
    compile_prefix(workspace, second, PYTHON, OWNED)
    assert (tmp_path / "uv.pyc").read_bytes() == b"uv's"
    assert compiled(second) == compiled(first)


def test_a_conda_forge_prefix_has_a_link_to_its_library_folder(tmp_path: Path) -> None:
    """lib/python3.1 sorts before the real one; packages are found all the same."""
    workspace = workspace_in(tmp_path / "cache")
    prefix = prefix_in(tmp_path / "env")
    (prefix / "lib/python3.1").symlink_to(PACKAGES.parent.name)
    compile_prefix(workspace, prefix, PYTHON, OWNED)
    assert len(list(workspace.cache.path("bytecode").iterdir())) == 2


def test_bytecode_is_compiled_with_a_fixed_hash_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, totals: list[str]) -> None:
    """Python 3.10 compiles sets in the order of their hashes. The user's own variables do not count."""
    code = "import os, sys; print(sys.flags.hash_randomization, *(name for name in os.environ if name.startswith('PYTHON')))"
    (tmp_path / "compile_tree.py").write_text(code)
    monkeypatch.setattr(inside, "FOLDER", tmp_path)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    compile_prefix(workspace_in(tmp_path / "cache"), prefix_in(tmp_path / "made" / "env"), PYTHON, {})
    assert [line.strip() for line in totals] == ["0 PYTHONHASHSEED"]
