"""The conda package of a local interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.small_fixtures import PYTHON
from vllm_env.base.elf import read_needs
from vllm_env.base.errors import VllmEnvError
from vllm_env.interpreter import local as interpreter
from vllm_env.interpreter.local import NEUTRAL_PREFIX, find_interpreter


def _run(prefix: Path, code: str) -> str:
    return subprocess.check_output(
        [prefix / "bin/python", "-I", "-c", code], text=True, env={"PATH": "/usr/bin:/bin"}, stderr=subprocess.STDOUT
    ).strip()


def test_an_interpreter_with_a_shared_libpython_is_found() -> None:
    """The stub loads libpython, so only an interpreter that has one will do."""
    found = find_interpreter(PYTHON)
    assert found.version.startswith(PYTHON + ".")
    assert found.library.name.startswith(f"libpython{PYTHON}.so")
    assert found.library.is_file()


def test_a_python_that_is_not_there_is_refused_with_where_was_looked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message names the version, what was looked at and why it will not do, and how to get one."""
    program = tmp_path / "python3.99"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VllmEnvError, match=r"no Python 3\.99 to pack") as caught:
        find_interpreter("3.99")
    assert f"{program} (does not start)" in caught.value.cause
    assert "--python" in caught.value.remedy


def test_another_version_behind_the_name_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program's name is no proof of its version."""
    (tmp_path / "python3.99").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VllmEnvError) as caught:
        find_interpreter("3.99")
    assert "is cpython 3." in caught.value.cause


def test_the_installed_interpreter_is_complete_and_its_own(bare_prefix: Path) -> None:
    """It starts where it was installed, finds its own library, and has the modules that packages import."""
    code = "import sys, ssl, sqlite3, ctypes, lzma, bz2, zlib, hashlib; print(sys.prefix, sys.base_prefix)"
    assert _run(bare_prefix, code) == f"{bare_prefix} {bare_prefix}"
    mapped = _run(bare_prefix, "print([l.split()[-1] for l in open('/proc/self/maps') if 'libpython' in l][0])")
    assert Path(mapped).parent == bare_prefix / "lib"


def test_libraries_look_into_the_environment_alone(bare_prefix: Path) -> None:
    """No library path leads back to where the interpreter came from."""
    origin = str(find_interpreter(PYTHON).prefix)
    files = [bare_prefix / f"bin/python{PYTHON}", *(bare_prefix / "lib").glob("lib*.so*")]
    files += (bare_prefix / f"lib/python{PYTHON}/lib-dynload").glob("*.so")
    for file in files:
        needs = read_needs(file)
        assert needs is not None
        dynamic = subprocess.check_output(["readelf", "-d", file], text=True)
        paths = [line for line in dynamic.splitlines() if "RUNPATH" in line or "RPATH" in line]
        assert not any(origin in line for line in paths), file


def test_text_files_do_not_name_where_it_came_from(bare_prefix: Path) -> None:
    """_sysconfigdata and the like hold a neutral folder: torch and setuptools read them at run time."""
    origin = str(find_interpreter(PYTHON).prefix)
    if origin in {"/usr", "/usr/local"}:
        pytest.skip("a system interpreter's folder is neutral enough")
    data = next(bare_prefix.glob(f"lib/python{PYTHON}/_sysconfigdata*.py")).read_text()
    assert origin not in data
    assert NEUTRAL_PREFIX in data


def test_what_no_server_needs_is_left_out(bare_prefix: Path) -> None:
    """Tests, Tk and the installer of pip stay behind; the headers, which torch compiles against, come along."""
    stdlib = bare_prefix / f"lib/python{PYTHON}"
    assert not any((stdlib / name).exists() for name in ("test", "tkinter", "idlelib", "ensurepip"))
    assert (bare_prefix / f"include/python{PYTHON}/Python.h").is_file()


def test_equal_interpreters_give_equal_packages(channel, tmp_path: Path) -> None:
    """The lock names the package by digest, so another build on the same machine must give the same one."""
    made = interpreter.make_package(find_interpreter(PYTHON), tmp_path / "out", tmp_path)
    first = channel.root / "conda/channel/linux-64" / made.name
    assert made.read_bytes() == first.read_bytes()
