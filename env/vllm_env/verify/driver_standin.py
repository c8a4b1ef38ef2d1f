"""Compile a stand-in for the CUDA driver's library.

With it, a machine without a GPU can import modules that link to the driver. The stand-in has every
driver function that the environment's files need. Each one returns CUDA_ERROR_NO_DEVICE. An import
that still fails is broken, or it reports that there is no device.
"""
# Without libcuda.so.1, imports fail early and say little. vLLM catches some of these errors and
# raises others ("requires the CUDA flash attention extensions"). A missing driver and a broken
# package then look the same.

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
_CUDA_ERROR_NO_DEVICE = 100


def driver_functions(environment: Path) -> tuple[str, ...]:
    """Return the driver functions that the files of an environment need, sorted."""
    functions = set()
    for path, is_link in walk(os.path.realpath(environment)):
        section = None if is_link else read_dynamic_section(path)
        if section and LIBRARY in section.needed:
            functions |= _undefined(path)
    return tuple(sorted(functions))


def _undefined(path: str) -> set[str]:
    """Return the driver functions that an ELF file needs from a library."""
    with open(path, "rb") as stream:
        table = ELFFile(stream).get_section_by_name(".dynsym")
        symbols = table.iter_symbols() if table else ()
        # An undefined symbol comes from a library. Its name shows that this library is the driver.
        names = {symbol.name for symbol in symbols if symbol.entry.st_shndx == "SHN_UNDEF"}
    return {name for name in names if _DRIVER_FUNCTION.fullmatch(name)}


def write_driver_standin(environment: Path, folder: Path) -> bool:
    """Compile ``libcuda.so.1`` for an environment into a folder; return False without a compiler.

    The caller puts the folder into LD_LIBRARY_PATH. The compiler is the environment's own, else
    this machine's.
    """
    own = environment / "bin" / COMPILER
    compiler = own if own.is_file() else shutil.which("cc")
    if compiler is None:
        return False
    functions = driver_functions(environment)
    # If this machine has a driver, an NVML without functions keeps the driver from finding the GPU.
    for library, names in ((LIBRARY, functions), ("libnvidia-ml.so.1", ())):
        # "int cuInit(void) { return 100; }", and so on.
        body = f"(void) {{ return {_CUDA_ERROR_NO_DEVICE}; }}\n"
        source = "".join(f"int {name}{body}" for name in names)
        soname = f"-Wl,-soname,{library}"
        compile_library(Path(compiler), source, folder / library, "-nostdlib", soname)
    return True
