"""Writes a stand-in for the CUDA driver's library, so that a machine without a GPU can import what links against it.

Without libcuda.so.1 an import fails before it tells anything: vLLM catches some of these errors and raises others ("requires
the CUDA flash attention extensions"), so a missing driver and a broken package look the same. The stand-in has every
function that the environment's files ask of the driver, and each answers CUDA_ERROR_NO_DEVICE. What then fails is broken,
or says that there is no device. It is written byte by byte: the machine may have no compiler.
"""

import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

from elftools.elf.elffile import ELFFile

from vllm_env.base.elf import read_dynamic_section, walk

LIBRARY = "libcuda.so.1"
_DRIVER_FUNCTION = re.compile(r"cu[A-Z]\w*")
_PAGE = 4096
_X86_64 = 62  # other machines are refused before anything is built
_CODE = bytes.fromhex("b864000000c3")  # "return 100", which is CUDA_ERROR_NO_DEVICE
# System V gABI 4.1: program headers and entries of the dynamic section
_LOAD, _DYNAMIC, _GNU_STACK = 1, 2, 0x6474E551
_READ_EXECUTE, _READ_WRITE = 5, 6
_HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _SONAME = 4, 5, 6, 10, 11, 14
_GLOBAL_FUNCTION = 0x12


def driver_functions(environment: Path) -> tuple[str, ...]:
    """Return the functions of the driver that the files of an environment ask for, sorted."""
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
        return {s.name for s in rows if s.entry.st_shndx == "SHN_UNDEF" and _DRIVER_FUNCTION.fullmatch(s.name)}


def write_driver_standin(environment: Path, folder: Path) -> Path:
    """Write ``folder/libcuda.so.1`` for an environment and return it; the folder goes into LD_LIBRARY_PATH.

    Beside it is an NVML without functions: where there is a driver, it must not find the GPU either.
    """
    target = folder / LIBRARY
    (folder / "libnvidia-ml.so.1").write_bytes(shared_library("libnvidia-ml.so.1", ()))
    target.write_bytes(shared_library(LIBRARY, driver_functions(environment)))
    return target


def shared_library(soname: str, functions: Sequence[str]) -> bytes:
    """Return a shared library for this machine in which every function returns 100.

    The headers, tables and the code are one segment; the dynamic section, into which older ld.so write, is another.
    """
    names = [soname, *functions]
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    starts = [1 + sum(len(n) + 1 for n in names[:i]) for i in range(len(names))]
    count = len(functions) + 1  # the first symbol is empty
    hash_at = 64 + 4 * 56  # behind the file's header and four of segments
    symbols_at = _aligned(hash_at + 4 * (3 + count))
    strings_at = symbols_at + 24 * count
    code_at = _aligned(strings_at + len(strings))
    dynamic_at = _aligned(code_at + len(_CODE), _PAGE)
    # one bucket, whose chain runs through all symbols
    table = struct.pack(f"<{3 + count}I", 1, count, 1 if functions else 0, 0, *range(2, count), *([0] if functions else []))
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", start, _GLOBAL_FUNCTION, 0, 1, code_at, len(_CODE)) for start in starts[1:]
    )
    entries = ((_SONAME, 1), (_HASH, hash_at), (_STRTAB, strings_at), (_SYMTAB, symbols_at), (_STRSZ, len(strings)))
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in (*entries, (_SYMENT, 24), (0, 0)))
    segments = (
        _segment(_LOAD, _READ_EXECUTE, 0, code_at + len(_CODE), _PAGE)
        + _segment(_LOAD, _READ_WRITE, dynamic_at, len(dynamic), _PAGE)
        + _segment(_DYNAMIC, _READ_WRITE, dynamic_at, len(dynamic), 8)
        + _segment(_GNU_STACK, _READ_WRITE, 0, 0, 16)  # without it ld.so makes the stack executable, or refuses
    )
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, _X86_64, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    parts = ((0, header + segments), (hash_at, table), (symbols_at, symbols), (strings_at, strings), (code_at, _CODE))
    data = bytearray(dynamic_at)
    for place, part in parts:
        data[place : place + len(part)] = part
    return bytes(data + dynamic)


def _aligned(position: int, to: int = 8) -> int:
    return position + -position % to


def _segment(kind: int, flags: int, offset: int, size: int, alignment: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, flags, offset, offset, offset, size, size, alignment)
