"""Which libraries an environment lacks, shown on small real ones."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from support.elf_files import make_library
from vllm_env.base.errors import VllmEnvError
from vllm_env.prefix.needed_libraries import (
    Need,
    NeededLibraries,
    check_missing_libraries,
    find_needed_libraries,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """The ``site-packages`` of an empty environment; libraries for the linker alone are made beside it."""
    folder = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    folder.mkdir(parents=True)
    return folder


def _find(packages: Path, profile: str = "cpu", rules: Mapping[str, tuple[str, ...]] | None = None) -> NeededLibraries:
    return find_needed_libraries(packages.parents[2], profile, rules or {})


def _missing(packages: Path) -> tuple[str, ...]:
    return _find(packages).missing_libraries


def _absent(tmp_path: Path, soname: str, **options: Any) -> Path:
    """A library to link against that is not in the environment."""
    return make_library(tmp_path / "linker", soname, **options)


def test_a_library_that_is_nowhere_is_missing(packages: Path, tmp_path: Path) -> None:
    """File and library are named; the C library is not."""
    numa = _absent(tmp_path, "libnuma.so.9")
    make_library(packages / "vllm", "_C.abi3.so", needs=(numa,))
    found = _find(packages)
    assert found.missing == (Need("lib/python3.12/site-packages/vllm/_C.abi3.so", "libnuma.so.9"),)


def test_the_machines_own_copy_does_not_count(packages: Path) -> None:
    """libz.so.1 is on this machine and on most, but the container that serves may have none."""
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin")  # Debian's users have neither in PATH
    assert ldconfig
    system = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True).stdout
    line = next(line for line in system.splitlines() if "libz.so.1 " in line and "x86-64" in line)
    library = packages / "triton" / "libtriton.so"
    library.parent.mkdir()
    make_library(library.parent, library.name, needs=(line.split(" => ")[1],))
    assert subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout.count("libz.so.1 => /")
    assert _missing(packages) == ("libz.so.1",)


def test_a_library_of_another_package_is_there(packages: Path) -> None:
    """Whatever folder it is in, and under the name of a link: what is imported before has loaded it, as torch has libtorch.so."""
    answer = make_library(packages / "torch" / "lib", "libanswer.so.1")
    make_library(packages / "vllm", "_C.so", needs=(answer,))
    assert _missing(packages) == ()
    answer.rename(answer.with_name("libanswer.so.1.2.3"))
    assert _missing(packages) == ("libanswer.so.1",)
    answer.symlink_to("libanswer.so.1.2.3")
    assert _missing(packages) == ()


def test_a_file_that_cannot_be_loaded_is_no_library(packages: Path, tmp_path: Path) -> None:
    """A script for the linker has its name, and so has a link that leads nowhere."""
    make_library(packages, "demo.so", needs=(_absent(tmp_path, "libanswer.so.1"),))
    (packages / "first").mkdir()
    place = packages / "first" / "libanswer.so.1"
    place.write_text("GROUP ( libanswer.so.1.0 )")
    assert _missing(packages) == ("libanswer.so.1",)
    place.unlink()
    place.symlink_to("libanswer.so.1.0")
    assert _missing(packages) == ("libanswer.so.1",)


def test_a_path_of_the_machine_that_built_it_is_missing(packages: Path, tmp_path: Path) -> None:
    """A library without a soname is named by the path that the linker was given; nobody has it."""
    make_library(packages, "libanswer.so.1")
    library = _absent(tmp_path, "libanswer.so.1")
    subprocess.run(["patchelf", "--set-soname", str(library), library], check=True)
    make_library(packages, "demo.so", needs=(library,))
    assert _missing(packages) == (str(library),)


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
    assert _find(packages, "cuda").missing == ()
    assert _find(packages, "cpu").missing_libraries == ("libcuda.so.1",)


def test_a_tolerated_file_is_told_and_others_are_not_excused(packages: Path, tmp_path: Path) -> None:
    """A rule covers its file and its library; the same library in another file, or another in this one, is missing."""
    rules = {"*/numba/*": ("libtbb.so.*",)}
    tbb, other = _absent(tmp_path, "libtbb.so.12"), _absent(tmp_path, "libother.so.1", symbol="other")
    make_library(packages / "numba", "tbbpool.so", needs=(tbb, other))
    make_library(packages / "demo", "demo.so", needs=(tbb,))
    found = _find(packages, rules=rules)
    assert {(need.file.rpartition("/")[2], need.library) for need in found.missing} == {
        ("tbbpool.so", "libother.so.1"),
        ("demo.so", "libtbb.so.12"),
    }


def test_the_message_names_file_library_packages_and_remedy(tmp_path: Path) -> None:
    """Seen: vLLM's CPU kernels without libnuma, which passed every check and ended in EngineCore."""
    numa = make_library(tmp_path / "linker", "libnuma.so.1")
    for name in ("_C.abi3.so", "_C_AVX2.abi3.so", "_C_AVX512.abi3.so"):
        make_library(tmp_path / "env" / "lib" / "vllm", name, needs=(numa,))
    with pytest.raises(VllmEnvError) as caught:
        check_missing_libraries(find_needed_libraries(tmp_path / "env", "cpu"))
    assert "libnuma.so.1, needed by lib/vllm/_C.abi3.so and 2 more" in caught.value.what
    assert "apt-get install libnuma1" in caught.value.remedy


def test_many_libraries_are_counted_and_not_listed() -> None:
    """A message stays readable when an environment lacks all of FFmpeg."""
    found = NeededLibraries(tuple(Need("demo.so", f"libpart{n}.so.1") for n in range(9)), (2, 34))
    with pytest.raises(VllmEnvError, match="and 5 more") as caught:
        check_missing_libraries(found)
    assert "libpart8" not in str(caught.value)
