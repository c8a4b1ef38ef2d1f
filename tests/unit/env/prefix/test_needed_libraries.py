"""Where ld.so finds the libraries of an environment: small real libraries, and the answers of ld.so itself."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest
from elftools.elf.elffile import ELFFile

from support.elf_files import make_library, make_program
from vllm_env.base.elf import read_dynamic_section
from vllm_env.base.errors import VllmEnvError
from vllm_env.prefix.needed_libraries import (
    SYSTEM,
    Need,
    NeededLibraries,
    Tolerated,
    check_missing_libraries,
    find_needed_libraries,
)

if TYPE_CHECKING:
    from pathlib import Path

_DT_RPATH, _DT_DEBUG, _DT_RUNPATH = 15, 21, 29  # System V gABI 4.1
NEW, OLD = ("--enable-new-dtags", "-rpath"), ("--disable-new-dtags", "-rpath")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """The ``site-packages`` of an empty environment; libraries for the linker alone are made beside it."""
    folder = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    folder.mkdir(parents=True)
    return folder


def _find(packages: Path, profile: str = "cpu", rules: tuple[Tolerated, ...] = ()) -> NeededLibraries:
    return find_needed_libraries(packages.parents[2], profile, rules)


def _missing(packages: Path) -> tuple[str, ...]:
    return _find(packages).missing_libraries


def _elsewhere(packages: Path) -> set[str]:
    return {need.library for need in _find(packages).elsewhere}


def _lacking(*missing: Need) -> NeededLibraries:
    return NeededLibraries(0, (), (), (), missing, (2, 34))


def _absent(tmp_path: Path, soname: str, **options: tuple[str, ...]) -> Path:
    """A library to link against that is not in the environment."""
    return make_library(tmp_path / "linker", soname, **options)


def test_a_library_that_is_nowhere_is_missing(packages: Path, tmp_path: Path) -> None:
    """File and library are named; the C library is not, and every need is counted once."""
    numa = _absent(tmp_path, "libnuma.so.9")
    make_library(packages / "vllm", "_C.abi3.so", needs=(numa,))
    found = _find(packages)
    assert found.missing == (Need("lib/python3.12/site-packages/vllm/_C.abi3.so", "libnuma.so.9"),)
    assert found.by_run_path == 0
    assert set(found.outside) <= set(SYSTEM)


def test_the_machines_own_copy_does_not_count(packages: Path) -> None:
    """libz.so.1 is on this machine and on most, but the container that serves may have none."""
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin")  # Debian's users have neither in PATH
    assert ldconfig
    system = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True).stdout
    line = next(line for line in system.splitlines() if "libz.so.1 " in line and "x86-64" in line)
    library = packages / "triton" / "libtriton.so"
    library.parent.mkdir()
    make_library(library.parent, library.name, needs=(line.split(" => ")[1],))  # type: ignore[arg-type]
    assert subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout.count("libz.so.1 => /")
    assert _missing(packages) == ("libz.so.1",)


def test_ld_library_path_does_not_count(packages: Path) -> None:
    """The stub gets ``lib`` in it and vLLM's processes do not: a library there needs a run path, or something that loads it.

    It is not missing: vLLM's extensions name libtorch.so without a folder, and ``import torch`` has loaded it.
    """
    answer = make_library(packages.parents[1], "libanswer.so.1")
    make_library(packages / "demo", "demo.so", needs=(answer,))
    found = _find(packages)
    assert (found.by_run_path, found.missing) == (0, ())
    assert [need.library for need in found.elsewhere] == ["libanswer.so.1"]
    make_library(packages / "demo", "demo.so", needs=(answer,), linker=("-rpath", "$ORIGIN/../../.."))
    assert _find(packages).by_run_path == 1


@pytest.mark.parametrize("origin", ["$ORIGIN", "${ORIGIN}"])
@pytest.mark.parametrize("tags", [NEW, OLD])
def test_run_paths_begin_where_the_file_lies(packages: Path, tags: tuple[str, ...], origin: str) -> None:
    """Both forms of $ORIGIN in both kinds of run path lead to a library of another package, as torch's do to nvidia's."""
    cudart = make_library(packages / "nvidia" / "cu13" / "lib", "libcudart.so.13")
    make_library(packages / "torch" / "lib", "libtorch.so", needs=(cudart,), linker=(*tags, f"{origin}/../../nvidia/cu13/lib"))
    found = _find(packages)
    assert (found.by_run_path, found.elsewhere, found.missing) == (1, (), ())


def test_a_run_path_may_lead_through_a_link_to_a_folder(packages: Path) -> None:
    """``lib64`` is a link to ``lib`` in many environments; what lies behind it is found."""
    library = make_library(packages.parents[1] / "deep", "libanswer.so.1")
    (packages.parents[2] / "lib64").symlink_to("lib")
    make_library(packages, "demo.so", needs=(library,), linker=(*NEW, "$ORIGIN/../../../lib64/deep"))
    assert _find(packages).by_run_path == 1


def test_origin_is_also_the_folder_of_a_link(packages: Path) -> None:
    """ld.so takes $ORIGIN from the name that a file was opened by: a link beside the library that is needed."""
    answer = make_library(packages / "here", "libanswer.so.1")
    make_library(packages / "there", "demo.so", needs=(answer,), linker=(*NEW, "$ORIGIN"))
    assert _find(packages).by_run_path == 0
    (packages / "here" / "demo.so").symlink_to("../there/demo.so")
    assert _find(packages).by_run_path == 1


def _chain(packages: Path, tags: tuple[str, ...], *, middle: tuple[str, ...] = ()) -> Path:
    """A program that needs first/libone, which needs second/libtwo, which only the program's run path leads to."""
    two = make_library(packages / "second", "libtwo.so.1", symbol="two")
    one = make_library(packages / "first", "libone.so.1", needs=(two,), linker=middle)
    run_path = "$ORIGIN/first:$ORIGIN/second"
    return make_program(packages / "start", (one,), linker=(*tags, run_path))


def _starts(program: Path) -> bool:
    return subprocess.run([program], capture_output=True, check=False, env={}).returncode == 0


def test_rpath_is_inherited_by_what_is_loaded(packages: Path) -> None:
    """The program's DT_RPATH finds its library's library; ld.so, asked by starting it, says the same."""
    assert _starts(_chain(packages, OLD))
    found = _find(packages)
    assert (found.by_run_path, found.elsewhere) == (2, ())


def test_runpath_is_not_inherited(packages: Path) -> None:
    """With DT_RUNPATH the second library is found only if it is loaded before; ld.so says that it is not."""
    assert not _starts(_chain(packages, NEW))
    assert _elsewhere(packages) == {"libtwo.so.1"}


def test_a_runpath_of_its_own_cuts_off_what_is_inherited(packages: Path) -> None:
    """A library that has a DT_RUNPATH does not look into the DT_RPATH of what loaded it; ld.so says the same."""
    assert not _starts(_chain(packages, OLD, middle=(*NEW, "$ORIGIN/nowhere")))
    assert _elsewhere(packages) == {"libtwo.so.1"}


def test_rpath_counts_for_nothing_beside_a_runpath(packages: Path) -> None:
    """A program with both hands nothing on to what it loads; ld.so says the same. No linker writes both, so it is patched."""
    program = _chain(packages, NEW)
    data = program.read_bytes()
    entry = next(e for e in struct.iter_unpack("<QQ", _dynamic(data)) if e[0] == _DT_RUNPATH)
    program.write_bytes(data.replace(struct.pack("<QQ", _DT_DEBUG, 0), struct.pack("<QQ", _DT_RPATH, entry[1])))
    section = read_dynamic_section(str(program))
    assert section is not None
    assert section.rpath == section.runpath != ()
    assert not _starts(program)
    assert _elsewhere(packages) == {"libtwo.so.1"}


def _dynamic(data: bytes) -> bytes:
    """The bytes of a program's dynamic section."""
    elf = ELFFile(io.BytesIO(data))
    return bytes(elf.get_section_by_name(".dynamic").data())


def test_a_file_that_cannot_be_loaded_is_passed_over(packages: Path) -> None:
    """A script for the linker in the first folder hides nothing: ld.so goes on to the next, and so does this."""
    answer = make_library(packages / "second", "libanswer.so.1")
    make_library(packages, "demo.so", needs=(answer,), linker=(*NEW, "$ORIGIN/first:$ORIGIN/second"))
    (packages / "first").mkdir()
    (packages / "first" / "libanswer.so.1").write_text("GROUP ( libanswer.so.1.0 )")
    assert _find(packages).by_run_path == 1
    answer.unlink()
    assert _missing(packages) == ("libanswer.so.1",)


def test_inheritance_passes_through_a_file_that_was_looked_at_before(packages: Path) -> None:
    """A chain of three is found to its end in whatever order the files are read, and a circle ends."""
    last = make_library(packages / "deep", "liblast.so.1", symbol="last")
    names = [f"lib{letter}.so.1" for letter in "zyxcba"]
    library = last
    for name in names:
        library = make_library(packages / "first", name, symbol=f"f_{name[3]}", needs=(library,))
    make_library(packages / "deep", "liblast.so.1", symbol="last", needs=(library,))
    make_program(packages / "start", (library,), linker=(*OLD, "$ORIGIN/first:$ORIGIN/deep"), body="return 0;")
    found = _find(packages)
    assert (found.by_run_path, found.elsewhere, found.missing) == (8, (), ())


def test_a_library_renamed_for_one_wheel_is_nobody_elses(packages: Path, tmp_path: Path) -> None:
    """auditwheel's copy keeps its soname at times, as torchvision's libz does; triton cannot rely on it."""
    z = _absent(tmp_path, "libz.so.1")
    make_library(packages / "triton", "libtriton.so", needs=(z,))
    renamed = packages / "torchvision.libs" / "libz.b9a71669.so.1"
    renamed.parent.mkdir()
    shutil.copy(z, renamed)
    assert _missing(packages) == ("libz.so.1",)
    (renamed.parent / "libz.so.1").symlink_to(renamed.name)
    assert _missing(packages) == ()


def test_a_stub_for_the_linker_is_not_the_library(packages: Path, tmp_path: Path) -> None:
    """The CUDA toolkit's ``stubs/libcuda.so.1`` has the driver's name and none of its code; nor is it looked at itself."""
    cuda = make_library(packages / "nvidia" / "cu13" / "lib" / "stubs", "libcuda.so.1", needs=(_absent(tmp_path, "libx.so.1"),))
    make_library(packages / "demo", "demo.so", needs=(cuda,))
    assert _missing(packages) == ("libcuda.so.1",)


def test_the_driver_is_the_machines_on_cuda_only(packages: Path, tmp_path: Path) -> None:
    """A GPU's container gets libcuda.so.1 from its runtime; a CPU's gets none."""
    make_library(packages / "demo", "demo.so", needs=(_absent(tmp_path, "libcuda.so.1"),))
    assert "libcuda.so.1" in _find(packages, "cuda").outside
    assert _find(packages, "cpu").missing_libraries == ("libcuda.so.1",)


def test_a_tolerated_file_is_told_and_others_are_not_excused(packages: Path, tmp_path: Path) -> None:
    """A rule covers its file and its library; the same library in another file, or another in this one, is missing."""
    rules = (Tolerated("*/numba/*", ("libtbb.so.*",), "a test"),)
    tbb, other = _absent(tmp_path, "libtbb.so.12"), _absent(tmp_path, "libother.so.1", symbol="other")
    make_library(packages / "numba", "tbbpool.so", needs=(tbb, other))
    make_library(packages / "demo", "demo.so", needs=(tbb,))
    found = _find(packages, rules=rules)
    assert [need.file.rpartition("/")[2] for need in found.tolerated] == ["tbbpool.so"]
    assert {(need.file.rpartition("/")[2], need.library) for need in found.missing} == {
        ("tbbpool.so", "libother.so.1"),
        ("demo.so", "libtbb.so.12"),
    }


def test_the_newest_version_that_is_asked_of_the_machine(packages: Path, tmp_path: Path) -> None:
    """Of all files: a program that is linked against a C library of a newer version sets it for the environment."""
    make_program(packages / "demo", (_absent(tmp_path, "libanswer.so.1"),))
    assert (2, 2) <= _find(packages).glibc < (2, 99)
    newer = make_library(tmp_path / "linker", "libc.so.6", "GLIBC_2.99")
    make_library(packages / "newer", "demo.so", symbol="demo", needs=(newer,), uses="answer")
    assert _find(packages).glibc == (2, 99)


def test_the_message_names_file_library_packages_and_remedy(tmp_path: Path) -> None:
    """Seen: vLLM's CPU kernels without libnuma, which passed every check and ended in EngineCore."""
    numa = make_library(tmp_path / "linker", "libnuma.so.1")
    for name in ("_C.abi3.so", "_C_AVX2.abi3.so", "_C_AVX512.abi3.so"):
        make_library(tmp_path / "env" / "lib" / "vllm", name, needs=(numa,))
    with pytest.raises(VllmEnvError) as caught:
        check_missing_libraries(find_needed_libraries(tmp_path / "env", "cpu"))
    assert "libnuma.so.1, which lib/vllm/_C.abi3.so and 2 more needs" in caught.value.what
    assert "apt-get install libnuma1" in caught.value.remedy
    assert "conda-forge: libnuma" in caught.value.remedy


def test_many_libraries_are_counted_and_not_listed() -> None:
    """A message stays readable when an environment lacks all of FFmpeg."""
    found = _lacking(*(Need("demo.so", f"libpart{n}.so.1") for n in range(9)))
    with pytest.raises(VllmEnvError, match="and 5 more") as caught:
        check_missing_libraries(found)
    assert "libpart8" not in str(caught.value)


def test_a_complete_environment_passes() -> None:
    """Nothing is missing, nothing is said."""
    check_missing_libraries(_lacking())
