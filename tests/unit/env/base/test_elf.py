"""What is read out of ELF files, from files that a compiler has just made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.elf_files import make_library, make_program
from vllm_env.base.elf import ElfNeeds, needed_python, newest_version, read_needs

if TYPE_CHECKING:
    from pathlib import Path


def test_reads_libraries_run_paths_and_versions(tmp_path: Path) -> None:
    """The dynamic section's NEEDED and RUNPATH and the version that is asked of each library come out as they went in."""
    library = make_library(tmp_path / "lib", "libanswer.so.3", "ANSWER_2.10")
    program = make_program(tmp_path / "program", (library,), run_path="$ORIGIN/lib:/opt/lib")
    needs = read_needs(program)
    assert needs is not None
    assert needs.libraries[0] == "libanswer.so.3"
    assert needs.run_paths == ("$ORIGIN/lib", "/opt/lib")
    assert needs.versions["libanswer.so.3"] == ("ANSWER_2.10",)
    assert newest_version(needs, "GLIBC_")[0] == 2


def test_versions_are_compared_as_numbers() -> None:
    """3.4.9 is older than 3.4.30, and names that are no numbers (GLIBC_PRIVATE) do not count."""
    needs = ElfNeeds((), (), {"a": ("GLIBCXX_3.4.9", "GLIBC_PRIVATE"), "b": ("GLIBCXX_3.4.30",)})
    assert newest_version(needs, "GLIBCXX_") == (3, 4, 30)
    assert newest_version(needs, "GLIBC_") == ()


def test_names_the_python_of_a_stub(tmp_path: Path) -> None:
    """A stub's Python is that of the libpython it needs; a library with another name is none."""
    for soname, version in (("libpython3.11.so.1.0", "3.11"), ("libpython3-419a3a08.13.so.1.0", None)):
        program = make_program(tmp_path / "stub", (make_library(tmp_path, soname),))
        assert needed_python(program) == version


def test_what_is_no_elf_file_needs_nothing(tmp_path: Path) -> None:
    """Scripts, empty files and missing files are answered with None, not with an exception."""
    for name, data in (("script", b"#!/bin/sh\n"), ("empty", b""), ("cut", b"\x7fELF\x02\x01\x01")):
        (tmp_path / name).write_bytes(data)
        assert read_needs(tmp_path / name) is None
    assert read_needs(tmp_path / "missing") is None
    assert needed_python(tmp_path / "script") is None
