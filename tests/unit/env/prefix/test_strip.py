"""Symbol tables and debug information go out of ELF files; what is loaded stays, byte for byte."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from elftools.elf.elffile import ELFFile

from support.elf_files import make_library, make_program
from vllm_env.prefix.strip import strip_symbols

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.long

_TIME = 1_500_000_000


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared library with debug information, as the compiler made it."""
    return make_library(tmp_path_factory.mktemp("compiled"), "libanswer.so.1", "ANSWER_2.10", debug=True)


@pytest.fixture
def library(compiled: Path, tmp_path: Path) -> Path:
    """A copy of it to be changed."""
    return Path(shutil.copy(compiled, tmp_path / "libanswer.so.1"))


def _sections(file: Path) -> dict[str, dict[str, int | str]]:
    with file.open("rb") as stream:
        return {s.name: dict(s.header) for s in ELFFile(stream).iter_sections()}


def _loaded_end(file: Path) -> int:
    with file.open("rb") as stream:
        return max(s["p_offset"] + s["p_filesz"] for s in ELFFile(stream).iter_segments())


def test_the_loaded_bytes_stay_and_the_library_works(library: Path, compiled: Path, tmp_path: Path) -> None:
    """A program linked with it before and one linked now both run; it is smaller by what is returned."""
    before = make_program(tmp_path / "before", (library,), run_path="$ORIGIN")
    saved = strip_symbols(library)
    assert saved == compiled.stat().st_size - library.stat().st_size > 200_000
    after = make_program(tmp_path / "after", (library,), run_path="$ORIGIN")
    for program in (before, after):
        subprocess.run([program], check=True)
    assert ctypes.CDLL(str(library)).answer() == 42
    end = _loaded_end(compiled)
    assert library.read_bytes()[64:end] == compiled.read_bytes()[64:end]


def test_only_symbols_and_debug_information_go(library: Path, compiled: Path) -> None:
    """The sections that stay keep names, places and links; the notes behind the loaded part keep their contents."""
    strip_symbols(library)
    before, after = _sections(compiled), _sections(library)
    gone = before.keys() - after.keys()
    assert {".symtab", ".strtab", ".debug_info"} <= gone
    assert all(name in (".symtab", ".strtab") or name.startswith(".debug_") for name in gone)
    assert after.keys() <= before.keys()
    for name, header in after.items():
        if name != ".shstrtab":
            assert header | {"sh_name": 0} == before[name] | {"sh_name": 0, "sh_offset": header["sh_offset"]}, name
    with library.open("rb") as new, compiled.open("rb") as old:
        for name in after.keys() - {".shstrtab"}:
            assert ELFFile(new).get_section_by_name(name).data() == ELFFile(old).get_section_by_name(name).data()


@pytest.mark.parametrize("shared", [".shstrtab", ".dynstr"])
def test_a_table_of_names_that_something_else_needs_stays(library: Path, shared: str) -> None:
    """The symbols may share it with the sections, or with the loaded symbols."""
    names = list(_sections(library))
    data = bytearray(library.read_bytes())
    link = int.from_bytes(data[40:48], "little") + 64 * names.index(".symtab") + 40
    data[link : link + 4] = names.index(shared).to_bytes(4, "little")
    library.write_bytes(data)
    assert strip_symbols(library) > 200_000
    assert ".symtab" not in _sections(library)
    assert shared in _sections(library)


def test_mode_and_times_stay_and_a_hard_link_is_not_written_through(library: Path, tmp_path: Path) -> None:
    """Uv links files from its cache; nothing else is left in the folder."""
    library.chmod(0o750)
    os.utime(library, (_TIME, _TIME))
    os.link(library, tmp_path / "cached")
    before = (tmp_path / "cached").read_bytes()
    assert strip_symbols(library)
    assert (library.stat().st_mode & 0o777, library.stat().st_mtime) == (0o750, _TIME)
    assert (tmp_path / "cached").read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {library.name, "cached"}


def _append(data: bytes) -> bytes:
    """A payload that a program looks for at its own end."""
    return data + b"a payload at the end"


def _gap(data: bytes) -> bytes:
    """A table of sections that lies behind something that no section names."""
    table = int.from_bytes(data[40:48], "little")
    moved = bytearray(data[:table] + b"x" * 64 + data[table:])
    moved[40:48] = (table + 64).to_bytes(8, "little")
    return bytes(moved)


def _loaded_behind(data: bytes) -> bytes:
    """A loaded segment at the end of the file, as patchelf appends one."""
    changed = bytearray(data)
    first = int.from_bytes(data[32:40], "little")
    changed[first + 8 : first + 16] = (0).to_bytes(8, "little")
    changed[first + 32 : first + 40] = len(data).to_bytes(8, "little")
    return bytes(changed)


def _cut_off(data: bytes) -> bytes:
    return data[:-100]


def _link_to_symbols(data: bytes) -> bytes:
    """A section that stays and refers to the symbol table."""
    changed = bytearray(data)
    table, count = int.from_bytes(data[40:48], "little"), int.from_bytes(data[60:62], "little")
    kinds = [int.from_bytes(data[table + 64 * i + 4 : table + 64 * i + 8], "little") for i in range(count)]
    changed[table + 64 + 40 : table + 64 + 44] = kinds.index(2).to_bytes(4, "little")
    return bytes(changed)


def _of_32_bits(data: bytes) -> bytes:
    return data[:4] + b"\x01" + data[5:]


def _wild_name(data: bytes) -> bytes:
    """A section's name beyond the table of names."""
    changed = bytearray(data)
    table = int.from_bytes(data[40:48], "little")
    changed[table + 64 : table + 68] = b"\xff\xff\xff\x7f"
    return bytes(changed)


def _wild_place(data: bytes) -> bytes:
    """A table of sections at a place that no file has."""
    return data[:40] + b"\xff" * 8 + data[48:]


@pytest.mark.parametrize(
    "change",
    [
        _append,
        _gap,
        _loaded_behind,
        _cut_off,
        _link_to_symbols,
        _of_32_bits,
        _wild_name,
        _wild_place,
        lambda d: d[:70_000],
    ],
)
def test_what_is_laid_out_otherwise_stays_as_it_is(library: Path, change: Callable[[bytes], bytes]) -> None:
    """A file that is not understood to its last byte is not written."""
    library.write_bytes(change(library.read_bytes()))
    before = (library.read_bytes(), library.stat().st_ino)
    assert strip_symbols(library) == 0
    assert (library.read_bytes(), library.stat().st_ino) == before


def test_small_files_links_and_other_files_are_left_alone(library: Path, tmp_path: Path) -> None:
    """Nothing is gained below 64 KiB; a link may lead out of the prefix."""
    small = make_library(tmp_path / "small", "libsmall.so")
    text = tmp_path / "text"
    text.write_bytes(b"#!/bin/sh\n" * 10_000)
    link = tmp_path / "link.so"
    link.symlink_to(library)
    assert [strip_symbols(f) for f in (small, text, link)] == [0, 0, 0]
    assert link.is_symlink()


def test_an_object_file_keeps_the_symbols_that_a_linker_needs(tmp_path: Path) -> None:
    """Only programs and libraries are touched."""
    source = tmp_path / "a.c"
    source.write_text("".join(f"int function_number_{i}(void) {{ return {i}; }}\n" for i in range(3000)))
    subprocess.run(["cc", "-g", "-c", source, "-o", tmp_path / "a.o"], check=True)
    assert strip_symbols(tmp_path / "a.o") == 0
