"""What is said of an environment that is not self-contained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.elf_files import make_library
from vllm_env.base.errors import VllmEnvError
from vllm_env.prefix.missing_libraries import check_missing_libraries
from vllm_env.prefix.needed_libraries import Need, NeededLibraries, find_needed_libraries

if TYPE_CHECKING:
    from pathlib import Path


def _found(*missing: Need) -> NeededLibraries:
    return NeededLibraries(9, 0, (), (), (), missing, (2, 34), ())


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
    found = _found(*(Need("demo.so", f"libpart{n}.so.1") for n in range(9)))
    with pytest.raises(VllmEnvError, match="and 5 more") as caught:
        check_missing_libraries(found)
    assert "libpart8" not in str(caught.value)


def test_a_complete_environment_passes() -> None:
    """Nothing is missing, nothing is said."""
    check_missing_libraries(_found())
