"""A driver's library without a driver: loaded by ld.so itself, with every function that is asked for."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library, soname_of
from vllm_env.base.elf import read_dynamic_section
from vllm_env.prefix.relocate import COMPILER
from vllm_env.verify.driver_standin import driver_functions, write_driver_standin

if TYPE_CHECKING:
    from pathlib import Path

_NO_DEVICE = 100
_CC = shutil.which("cc")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment whose extension calls the driver, bound as Python binds it; the driver is not in it."""
    driver = make_library(tmp_path / "linker", "libcuda.so.1", symbol="cuInit")
    other = make_library(tmp_path / "linker", "libother.so.1", symbol="cuOther")
    folder = tmp_path / "env" / "lib"
    make_library(folder, "extension.so", needs=(driver,), uses="cuInit", symbol="own")
    make_library(folder, "unrelated.so", needs=(other,), uses="cuOther", symbol="own")
    make_library(folder, "curious.so", needs=(driver,), uses="curious", symbol="own")
    return tmp_path / "env"


def test_names_what_is_asked_of_the_driver(environment: Path) -> None:
    """The driver's functions only, and only in files that name the driver."""
    assert driver_functions(environment) == ("cuInit",)


def test_an_extension_is_imported_with_the_standin_and_not_without(environment: Path, tmp_path: Path) -> None:
    """ld.so binds every symbol at once (RTLD_NOW), as for ``import``; the call answers that there is no device."""
    folder = tmp_path / "driver"
    folder.mkdir()
    write_driver_standin(environment, folder)
    load = "import ctypes, os, sys; print(ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW).calls_cuInit())"
    command: list[str | Path] = [sys.executable, "-I", "-c", load, environment / "lib" / "extension.so"]
    without = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    assert "libcuda.so.1: cannot open" in without.stderr
    given = subprocess.run(command, capture_output=True, text=True, check=False, env={"LD_LIBRARY_PATH": str(folder)})
    assert given.stdout.strip() == str(_NO_DEVICE), given.stderr


def test_it_is_an_ordinary_library(environment: Path, tmp_path: Path) -> None:
    """It has its soname and its function alone, its stack is not executable, and no page is writable and executable at once."""
    library = tmp_path / "libcuda.so.1"
    write_driver_standin(environment, tmp_path)
    section = read_dynamic_section(str(library))
    assert section is not None
    assert section.needed == ()
    assert soname_of(library) == "libcuda.so.1"
    assert ctypes.CDLL(str(library)).cuInit() == _NO_DEVICE
    assert not hasattr(ctypes.CDLL(str(library)), "cuOther")
    segments = subprocess.check_output(["readelf", "-lW", library], text=True)
    assert "RWE" not in segments
    assert "GNU_STACK" in segments


def test_the_environments_own_compiler_is_taken_first(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has none; where the environment has none either, there is no stand-in."""
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not write_driver_standin(environment, tmp_path)
    own = environment / "bin" / COMPILER
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\nPATH=/usr/bin:/bin exec {_CC} "$@"\n')
    own.chmod(0o755)
    assert write_driver_standin(environment, tmp_path)
    assert ctypes.CDLL(str(tmp_path / "libcuda.so.1")).cuInit() == _NO_DEVICE
