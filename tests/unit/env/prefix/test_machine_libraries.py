"""Libraries of this machine in an environment: found, copied with what they need, and loadable where they lie."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from support.elf_files import make_library, make_program, soname_of
from vllm_env.base.elf import read_dynamic_section
from vllm_env.prefix.machine_libraries import (
    AddedLibrary,
    add_libraries,
    find_library,
    newer_glibc,
    with_dependencies,
)
from vllm_env.prefix.needed_libraries import NeededLibraries, find_needed_libraries


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries that stands for this machine's: libtop needs libbase, and libbase the C library alone."""
    folder = tmp_path / "machine"
    base = make_library(folder, "libbase.so.1", symbol="base")
    make_library(folder, "libtop.so.2", needs=(base,), linker=("--enable-new-dtags", "-rpath", "/build/there"))
    monkeypatch.setattr("vllm_env.prefix.machine_libraries._cache_listing", lambda: "")
    return folder


def test_finds_what_ld_so_would_load() -> None:
    """This machine's own libz or libc, by ldconfig's cache: the file that a program without a run path gets."""
    found = find_library("libc.so.6", folders=())
    assert found is not None
    listed = subprocess.run(["ldd", shutil.which("ls") or "/bin/ls"], capture_output=True, text=True, check=True).stdout
    line = next(line for line in listed.splitlines() if "libc.so.6 => " in line)
    assert found.samefile(line.split(" => ")[1].split()[0])
    assert find_library("libnothing-of-this-name.so.1") is None


def test_passes_over_variants_for_newer_processors(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant in glibc-hwcaps stops with an illegal instruction on an older processor; the plain file is taken."""
    listing = "\n".join(
        f"\tlibtop.so.2 (libc6,x86-64{extra}) => {machine / name}"
        for extra, name in ((', hwcap: "x86-64-v3"', "libbase.so.1"), ("", "libtop.so.2"))
    )
    monkeypatch.setattr("vllm_env.prefix.machine_libraries._cache_listing", lambda: listing)
    assert find_library("libtop.so.2", folders=()) == machine / "libtop.so.2"


def test_passes_over_what_is_no_library_of_this_machine(machine: Path, tmp_path: Path) -> None:
    """``libc.so`` and its like are texts for the linker, and a folder may hold another architecture's file."""
    early = tmp_path / "early"
    early.mkdir()
    (early / "libtop.so.2").write_text("GROUP ( libtop.so.2.0 )")
    assert find_library("libtop.so.2", folders=(early, machine)) == machine / "libtop.so.2"


def test_the_drivers_libraries_are_not_this_machines_to_give(tmp_path: Path) -> None:
    """They must be of the driver's version where the environment will run."""
    make_library(tmp_path, "libcuda.so.1")
    assert find_library("libcuda.so.1", folders=(tmp_path,)) is None


def test_a_library_brings_what_it_needs_and_no_more(machine: Path, tmp_path: Path) -> None:
    """The C library stays the machine's, and what the environment has already is not replaced."""
    environment = tmp_path / "env"
    make_library(machine, "libc.so.6")
    assert list(with_dependencies(["libtop.so.2"], environment, folders=(machine,))) == ["libbase.so.1", "libtop.so.2"]
    make_library(environment / "lib", "libbase.so.1")
    assert list(with_dependencies(["libtop.so.2", "libc.so.6"], environment, folders=(machine,))) == ["libtop.so.2"]
    assert with_dependencies(["libabsent.so.1"], environment, folders=(machine,)) == {}


def test_an_environment_is_complete_with_what_was_added(machine: Path, tmp_path: Path) -> None:
    """The missing library is found by the check, and a program starts with it after the machine's own are gone."""
    environment = tmp_path / "env"
    make_program(environment / "bin" / "program", (machine / "libtop.so.2",))
    before = find_needed_libraries(environment, "cpu")
    assert before.missing_libraries == ("libtop.so.2",)
    add_libraries(with_dependencies(before.missing_libraries, environment, folders=(machine,)), environment)
    shutil.rmtree(machine)
    assert find_needed_libraries(environment, "cpu").missing == ()
    variables = {"LD_LIBRARY_PATH": str(environment / "lib")}
    assert subprocess.run([environment / "bin" / "program"], env=variables, check=False).returncode == 0


def test_copies_are_equal_and_find_each_other(machine: Path, tmp_path: Path) -> None:
    """Two builds give equal bytes with mode 755, a run path of $ORIGIN alone, and the machine's file as it was."""
    original = (machine / "libtop.so.2").read_bytes()
    (machine / "libtop.so.2").chmod(0o600)
    copies = []
    for name in ("one", "two"):
        added = add_libraries(with_dependencies(["libtop.so.2"], tmp_path / name, folders=(machine,)), tmp_path / name)
        assert [library.soname for library in added] == ["libbase.so.1", "libtop.so.2"]
        copies.append((tmp_path / name / "lib" / "libtop.so.2").read_bytes())
        assert sorted(p.name for p in (tmp_path / name / "lib").iterdir()) == ["libbase.so.1", "libtop.so.2"]
    target = tmp_path / "one" / "lib" / "libtop.so.2"
    section = read_dynamic_section(str(target))
    assert copies[0] == copies[1]
    assert section is not None
    assert section.runpath == ("$ORIGIN",)
    assert target.stat().st_mode & 0o777 == 0o755
    assert (machine / "libtop.so.2").read_bytes() == original


def test_a_link_is_copied_as_the_file_under_the_name_that_is_asked_for(machine: Path, tmp_path: Path) -> None:
    """On a machine the soname is a link to a file with the full version."""
    (machine / "libtop.so.2").rename(machine / "libtop.so.2.0.1")
    (machine / "libtop.so.2").symlink_to("libtop.so.2.0.1")
    add_libraries(with_dependencies(["libtop.so.2"], tmp_path / "env", folders=(machine,)), tmp_path / "env")
    target = tmp_path / "env" / "lib" / "libtop.so.2"
    assert target.is_file()
    assert not target.is_symlink()


def test_tells_which_library_asks_for_a_newer_c_library() -> None:
    """2.9 is older than 2.34; what asks for no more than the environment did is not named."""
    found = NeededLibraries((), (2, 34))
    old, equal, newer = (AddedLibrary(f"lib{v}.so", Path("x"), (2, v)) for v in (9, 34, 36))
    assert newer_glibc((old, equal, newer), found) == (newer,)


def test_a_library_of_the_triton_that_serves_comes_first(machine: Path, tmp_path: Path) -> None:
    """The wheel nvidia-pytriton has ``libnuma-3582bce9.so.1.0.0``, by that name; packed, it answers to the one asked for."""
    vendored = tmp_path / "triton" / "lib"
    own = make_library(vendored, "libbase-0123abcd.so.1.0.2", symbol="base")
    for other in ("libbase-0123abcd.so.2.0.0", "libbase2-0123abcd.so.1.0.0", "libbase-plus.so.1"):
        make_library(vendored, other)
    assert find_library("libbase.so.1", vendored, (machine,)) == own
    assert find_library("libtop.so.2", vendored, (machine,)) == machine / "libtop.so.2"
    add_libraries(with_dependencies(["libtop.so.2"], tmp_path / "env", vendored, (machine,)), tmp_path / "env")
    assert soname_of(tmp_path / "env" / "lib" / "libbase.so.1") == "libbase.so.1"
    assert ctypes.CDLL(str(tmp_path / "env" / "lib" / "libtop.so.2")).answer() == 42
