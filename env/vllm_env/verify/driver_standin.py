"""Compile a stand-in for the CUDA driver's library, so that a machine without a GPU can import modules that link to it.

Without libcuda.so.1, imports fail early and say little. vLLM catches some of these errors and raises others ("requires the
CUDA flash attention extensions"). A missing driver and a broken package then look the same.

The stand-in has every driver function that the environment's files need. Each one returns CUDA_ERROR_NO_DEVICE. An import
that still fails is broken, or it reports that there is no device.
"""

import os
import re
import shutil
from pathlib import Path

from elftools.elf.elffile import ELFFile

from vllm_env.base.elf import read_dynamic_section, walk
from vllm_env.prefix.relocate import COMPILER

from .compiler_check import compile_library

LIBRARY = "libcuda.so.1"
_DRIVER_FUNCTION = re.compile(r"cu[A-Z]\w*")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def driver_functions(environment: Path) -> tuple[str, ...]:
    """Return the driver functions that the files of an environment need, sorted."""
    found = set()
    for path, is_link in walk(os.path.realpath(environment)):
        section = None if is_link else read_dynamic_section(path)
        if section is not None and LIBRARY in section.needed:
            found |= _undefined(path)
    return tuple(sorted(found))


def _undefined(path: str) -> set[str]:
    with open(path, "rb") as stream:
        symbols = ELFFile(stream).get_section_by_name(".dynsym")
        rows = symbols.iter_symbols() if symbols is not None else ()
        return {
            s.name
            for s in rows
            if s.entry.st_shndx == "SHN_UNDEF" and _DRIVER_FUNCTION.fullmatch(s.name)
        }


def write_driver_standin(environment: Path, folder: Path) -> bool:
    """Compile ``libcuda.so.1`` for an environment into a folder, which the caller puts into LD_LIBRARY_PATH.

    The compiler is the environment's own, else this machine's. Return False if there is no compiler.
    """
    own = environment / "bin" / COMPILER
    compiler = own if own.is_file() else shutil.which("cc")
    if compiler is None:
        return False
    functions = driver_functions(environment)
    # If this machine has a driver, an NVML without functions keeps the driver from finding the GPU.
    for library, names in ((LIBRARY, functions), ("libnvidia-ml.so.1", ())):
        source = "".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names)
        compile_library(
            Path(compiler), source, folder / library, "-nostdlib", f"-Wl,-soname,{library}"
        )
    return True
