"""A driver's library without a driver: loaded by ld.so itself, with every function that is asked for."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library, make_program, soname_of
from vllm_env.base.elf import read_dynamic_section
from vllm_env.verify.driver_standin import driver_functions, shared_library, write_driver_standin

if TYPE_CHECKING:
    from pathlib import Path

_NO_DEVICE = 100
_FUNCTIONS = ("cuInit", "cuMemAlloc_v2", "cuTensorMapEncodeTiled")


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
    command = [sys.executable, "-I", "-c", load, environment / "lib" / "extension.so"]
    without = subprocess.run(command, capture_output=True, text=True, check=False, env={})
    assert "libcuda.so.1: cannot open" in without.stderr
    given = subprocess.run(command, capture_output=True, text=True, check=False, env={"LD_LIBRARY_PATH": str(folder)})
    assert given.stdout.strip() == str(_NO_DEVICE), given.stderr


@pytest.mark.parametrize("functions", [(), _FUNCTIONS, tuple(f"cuFunction{n}" for n in range(700))])
def test_every_function_is_found_by_its_name(tmp_path: Path, functions: tuple[str, ...]) -> None:
    """None, a few and more than a page of them; one that was not asked for is not there."""
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(shared_library("libcuda.so.1", functions))
    ask = "import ctypes, sys; d = ctypes.CDLL(sys.argv[1]); print({getattr(d, f)() for f in sys.argv[2:]}, hasattr(d, 'cuNo'))"
    answer = subprocess.check_output([sys.executable, "-c", ask, library, *functions], text=True)
    assert answer.split() == ["{100}" if functions else "set()", "False"]


def test_it_is_an_ordinary_library(tmp_path: Path) -> None:
    """It has its soname, its stack is not executable, and no page is writable and executable at once."""
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(shared_library("libcuda.so.1", _FUNCTIONS))
    section = read_dynamic_section(str(library))
    assert section is not None
    assert section.needed == ()
    assert soname_of(library) == "libcuda.so.1"
    segments = subprocess.check_output(["readelf", "-lW", library], text=True)
    assert "RWE" not in segments
    assert "GNU_STACK" in segments


def test_a_program_that_names_it_starts(tmp_path: Path) -> None:
    """It is loaded at a program's start as well, by its soname in LD_LIBRARY_PATH."""
    driver = make_library(tmp_path / "linker", "libcuda.so.1", symbol="cuInit")
    program = make_program(tmp_path / "program", (driver,), body="int cuInit(); return cuInit();")
    (tmp_path / "libcuda.so.1").write_bytes(shared_library("libcuda.so.1", _FUNCTIONS))
    assert subprocess.run([program], env={"LD_LIBRARY_PATH": str(tmp_path)}, check=False).returncode == _NO_DEVICE
