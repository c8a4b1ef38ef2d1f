"""What is read out of ELF files that a compiler has just made, and of files that are none."""

from __future__ import annotations

import os
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library, make_program
from vllm_env.base.elf import needed_python, read_dynamic_section, walk

if TYPE_CHECKING:
    from pathlib import Path


def test_reads_names_and_versions(tmp_path: Path) -> None:
    """Soname, needed libraries and the newest symbol version of the C library come out as the linker was told."""
    library = make_library(tmp_path, "libclock.so.6", "GLIBC_2.99")
    program = make_program(tmp_path / "program", (library,))
    section = read_dynamic_section(str(library))
    assert section is not None
    asks = read_dynamic_section(str(program))
    assert asks is not None
    assert asks.needed[0] == "libclock.so.6"
    assert asks.glibc == (2, 99)


def test_a_library_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    """What was read is kept, but only for the same file."""
    first = make_library(tmp_path, "libfirst.so", symbol="first")
    file = make_library(tmp_path, "libuser.so", needs=(first,), uses="first", symbol="user")
    before = read_dynamic_section(file)
    assert before
    assert "libfirst.so" in before.needed
    assert read_dynamic_section(file) is before
    make_library(tmp_path / "new", "libuser.so", symbol="user").replace(file)
    after = read_dynamic_section(file)
    assert after
    assert "libfirst.so" not in after.needed


@pytest.mark.parametrize(("option", "kind"), [("--disable-new-dtags", "rpath"), ("--enable-new-dtags", "runpath")])
def test_tells_rpath_from_runpath(tmp_path: Path, option: str, kind: str) -> None:
    """They differ in what inherits them, so each lands in its own field."""
    library = make_library(tmp_path, "libanswer.so.1", linker=(option, "-rpath", "$ORIGIN/a:$ORIGIN/b"))
    section = read_dynamic_section(str(library))
    assert section is not None
    assert getattr(section, kind) == ("$ORIGIN/a", "$ORIGIN/b")
    assert {section.rpath, section.runpath} == {("$ORIGIN/a", "$ORIGIN/b"), ()}


def test_reads_a_file_without_a_table_of_sections(tmp_path: Path) -> None:
    """ld.so goes by segments; a file whose section headers were cut off is loaded all the same."""
    library = make_library(tmp_path, "libanswer.so.1")
    data = bytearray(library.read_bytes())
    data[0x28:0x30] = struct.pack("<Q", 0)  # e_shoff
    data[0x3C:0x40] = struct.pack("<HH", 0, 0)  # e_shnum, e_shstrndx
    library.write_bytes(data)
    section = read_dynamic_section(str(library))
    assert section is not None


def test_passes_over_what_this_machine_does_not_load(tmp_path: Path) -> None:
    """Another architecture's library, an object file, a script, a damaged and a missing file have no section here."""
    library = make_library(tmp_path, "libanswer.so.1")
    foreign = bytearray(library.read_bytes())
    foreign[18:20] = struct.pack("<H", 190)  # EM_CUDA
    (tmp_path / "foreign").write_bytes(foreign)
    (tmp_path / "cut").write_bytes(library.read_bytes()[:100])
    (tmp_path / "script").write_text("#!/bin/sh\n")
    subprocess.run(["cc", "-c", "-x", "c", "-", "-o", tmp_path / "object.o"], input=b"int x;", check=True)
    for name in ("foreign", "cut", "script", "object.o", "missing"):
        assert read_dynamic_section(str(tmp_path / name)) is None, name
    assert needed_python(tmp_path / "script") is None


def test_names_the_python_of_a_stub(tmp_path: Path) -> None:
    """A stub's Python is that of the libpython it needs; a library with another name is none."""
    for soname, version in (("libpython3.11.so.1.0", "3.11"), ("libpython3-419a3a08.13.so.1.0", None)):
        program = make_program(tmp_path / "stub", (make_library(tmp_path, soname),))
        assert needed_python(program) == version


def test_walks_into_folders_but_through_no_link(tmp_path: Path) -> None:
    """A link to a folder is not followed, one to a file is told as one, and sources are not even opened."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.so").touch()
    (tmp_path / "lib" / "module.py").touch()
    (tmp_path / "lib64").symlink_to("lib")
    (tmp_path / "lib" / "b.so").symlink_to("a.so")
    found = {(os.path.relpath(path, tmp_path), is_link) for path, is_link in walk(str(tmp_path))}
    assert found == {("lib/a.so", False), ("lib/b.so", True)}
