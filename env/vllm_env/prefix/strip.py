"""Remove symbol tables and debug information from ELF files without moving any loaded byte.

GNU strip changes the layout of a file. That breaks libraries that patchelf or auditwheel has
changed ("ELF load command address/offset not properly aligned"). Also, not every container has
binutils.

Here, all bytes up to the end of what a loader maps keep their place. Of the sections behind them
some are removed, and the section table is written again. A file with another layout stays as it is.
"""

import itertools
import shutil
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

# Bytes. Saving less is not worth rewriting a file.
_MIN_FILE_BYTES = 64 * 2**10

# Headers of an ELF-64 file and of a section, little-endian (System V gABI 4.1, elf(5)). Of a
# segment's header only the offset and the size in the file are read.
_FILE = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<8xQ16xQ16x")
_SECTION = struct.Struct("<IIQQQQIIQQ")
# 64 bits, little-endian.
_MAGIC = b"\x7fELF\x02\x01"
# Programs and shared libraries. A linker needs the symbols of an object file (kind 1).
_LOADABLE = (2, 3)
# x86-64 and AArch64. Code for GPUs is in ELF files, too, and their driver reads the symbols.
_MACHINES = (62, 183)
# Kinds of sections.
_SYMBOLS = 2  # SHT_SYMTAB
_STRINGS = 3  # SHT_STRTAB
_RELA = 4  # SHT_RELA
_NO_BITS = 8  # SHT_NOBITS
_REL = 9  # SHT_REL
_GROUP = 17  # SHT_GROUP
_SYMBOL_SECTIONS = 18  # SHT_SYMTAB_SHNDX
# Flags of sections.
_IS_LOADED = 0x2  # SHF_ALLOC
_INFO_IS_SECTION = 0x40  # SHF_INFO_LINK
# Bytes. A section that is not loaded has no larger alignment.
_PAGE_BYTES = 4096
# From this value on, a section count or index has a special meaning (SHN_LORESERVE).
_RESERVED = 0xFF00
_DEBUG = (b".debug_", b".zdebug_", b".rela.debug_", b".gnu_debug", b".gdb_index")


class _Header(NamedTuple):
    """The header of a file; the fields have the same order as in the file."""

    ident: bytes
    kind: int
    machine: int
    version: int
    entry: int
    segments_at: int
    sections_at: int
    flags: int
    size: int
    segment_size: int
    segments: int
    section_size: int
    sections: int
    names_at: int


class _Section(NamedTuple):
    """The header of a section; the fields have the same order as in the file."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int

    @property
    def end(self) -> int:
        # SHT_NOBITS is memory that starts as zeros. Its size is not a size in the file.
        return self.offset + (0 if self.kind == _NO_BITS else self.size)

    @property
    def is_loaded(self) -> bool:
        return bool(self.flags & _IS_LOADED)


@dataclass(frozen=True)
class _Elf:
    """An ELF file.

    Attributes:
        header: its header.
        sections: the headers of its sections.
        names: their names.
        fixed: the offset below which nothing may move.
        size: its size in bytes.
    """

    header: _Header
    sections: list[_Section]
    names: list[bytes]
    fixed: int
    size: int


class _UnusualError(Exception):
    """The file has another layout than compilers and linkers produce."""


def strip_symbols(file: Path) -> int:
    """Remove the symbol table and debug information of an ELF file; return the bytes saved.

    A file that is not changed saves 0 bytes. A changed file keeps its mode and times.
    """
    if file.is_symlink() or file.stat().st_size < _MIN_FILE_BYTES:
        return 0
    with file.open("rb") as stream:
        try:
            elf = _read_elf(stream)
            dropped = _droppable(elf)
            if sum(elf.sections[i].size for i in dropped) < _MIN_FILE_BYTES:
                return 0
            _require_known(elf, stream)
            rest = _remaining(elf, dropped)
        # An IndexError or ValueError means that an index or a name points to nothing.
        except (_UnusualError, IndexError, ValueError):
            return 0
        # Replaced by a rename, because the file may be a hard link into uv's cache.
        temporary = file.with_name(f".{file.name}.new")
        with temporary.open("wb") as sink:
            _write(rest, stream, sink)
    shutil.copystat(file, temporary)
    saved = elf.size - temporary.stat().st_size
    temporary.replace(file)
    return saved


def _require(condition: bool) -> None:  # noqa: FBT001 - reads like a sentence
    """Raise _UnusualError unless the condition holds."""
    if not condition:
        raise _UnusualError


def _read_elf(stream: BinaryIO) -> _Elf:
    """Return the headers of a file.

    Raises:
        _UnusualError: it is no program or library for one of _MACHINES, or an unusual one.
        IndexError, ValueError: an index or a name points to nothing.
    """
    # 1) The file's header.
    size = stream.seek(0, 2)
    header = _Header(*_FILE.unpack(_at(stream, 0, _FILE.size)))
    _require(header.ident.startswith(_MAGIC))
    _require(header.kind in _LOADABLE and header.machine in _MACHINES)
    _require(header.segment_size == _SEGMENT.size and header.section_size == _SECTION.size)
    _require(header.segments > 0 and 0 < header.names_at < header.sections < _RESERVED)
    # 2) The sections. One of them has the names of all, each ended by a zero byte.
    section_table = _at(stream, header.sections_at, header.sections * _SECTION.size)
    sections = [_Section(*row) for row in _SECTION.iter_unpack(section_table)]
    names_section = sections[header.names_at]
    strings = _at(stream, names_section.offset, names_section.size)
    names = [strings[s.name : strings.index(b"\0", s.name)] for s in sections]
    # 3) The end of all that a loader reads: headers, segments and loaded sections.
    segments_size = header.segments * _SEGMENT.size
    segment_table = _at(stream, header.segments_at, segments_size)
    segment_ends = [offset + length for offset, length in _SEGMENT.iter_unpack(segment_table)]
    section_ends = [s.end for s in sections if s.is_loaded and s.kind != _NO_BITS]
    fixed = max(_FILE.size, header.segments_at + segments_size, *segment_ends, *section_ends)
    return _Elf(header, sections, names, fixed, size)


def _at(stream: BinaryIO, offset: int, length: int) -> bytes:
    """Return ``length`` bytes of a file; _UnusualError if it is shorter."""
    _require(offset + length <= stream.seek(0, 2))
    stream.seek(offset)
    return stream.read(length)


def _droppable(elf: _Elf) -> set[int]:
    """Return the indices of symbol tables, their string tables and debug sections.

    None of them is loaded: ld.so reads the loaded symbols (.dynsym) and their strings.
    """
    sections = elf.sections
    # Section 0 is a placeholder.
    not_loaded = {i for i, section in enumerate(sections) if i and not section.is_loaded}
    symbols = {i for i in not_loaded if sections[i].kind == _SYMBOLS}
    # A symbol table links to the section with the names of its symbols.
    linked = {sections[i].link for i in symbols}
    strings = {i for i in linked if sections[i].kind == _STRINGS}
    # The names of the sections may be in the same table, which then stays.
    strings.discard(elf.header.names_at)
    extended = {i for i in not_loaded if sections[i].kind == _SYMBOL_SECTIONS}
    debug = {i for i in not_loaded if elf.names[i].startswith(_DEBUG)}
    # A string table may be loaded although its symbol table is not.
    return symbols | extended | debug | (strings & not_loaded)


def _require_known(elf: _Elf, stream: BinaryIO) -> None:
    """Check that only sections and the section table follow the loaded part.

    Other bytes may be data that a program looks for at the end of its own file.

    Raises:
        _UnusualError: there are such bytes.
    """
    # Start, end and alignment of each.
    blocks = [
        (s.offset, s.end, s.alignment)
        for s in elf.sections[1:]
        if s.kind != _NO_BITS and s.size and s.end > elf.fixed
    ]
    table = elf.header.sections_at
    blocks.append((table, table + len(elf.sections) * _SECTION.size, 8))
    position = elf.fixed
    for start, end, alignment in sorted(blocks):
        gap = start - position
        # Between them there may only be the zeros that align the next one.
        _require(0 <= gap < max(alignment, 1))
        _require(_at(stream, position, gap) == bytes(gap))
        position = end
    _require(position == elf.size)


def _remaining(elf: _Elf, dropped: set[int]) -> _Elf:
    """Return the file without the sections ``dropped``; the others have new numbers.

    Raises:
        _UnusualError: they cannot be removed: a remaining section refers to one, or one is loaded.
    """
    _require(all(elf.sections[i].offset >= elf.fixed for i in dropped))
    # Symbols of the dynamic table name their section by number, so the loaded sections must keep
    # theirs.
    _require(min(dropped) > max(i for i, s in enumerate(elf.sections) if s.is_loaded))
    remaining = [i for i in range(len(elf.sections)) if i not in dropped]
    number = {old: new for new, old in enumerate(remaining)}
    sections = []
    for old in remaining:
        section = elf.sections[old]
        _require(section.is_loaded or section.alignment <= _PAGE_BYTES)
        # A group lists its sections by number in its content, which is copied unchanged.
        _require(section.kind != _GROUP and section.link in number)
        # ``info`` is a section's number in relocations and with this flag, else any other number.
        if section.kind in (_REL, _RELA) or section.flags & _INFO_IS_SECTION:
            _require(section.info in number)
            section = section._replace(info=number[section.info])
        sections.append(section._replace(link=number[section.link]))
    return replace(
        elf,
        header=elf.header._replace(names_at=number[elf.header.names_at]),
        sections=sections,
        names=[elf.names[i] for i in remaining],
    )


def _write(elf: _Elf, source: BinaryIO, sink: BinaryIO) -> None:
    """Write the loaded part unchanged, the sections behind it, and a new section table."""
    source.seek(0)
    _copy(source, sink, elf.fixed)
    # The names of the removed sections go, so every name has a new place.
    strings = b"".join(name + b"\0" for name in elf.names)
    # The last of these is the end of the last name.
    starts = itertools.accumulate((len(name) + 1 for name in elf.names), initial=0)
    sections = [s._replace(name=start) for s, start in zip(elf.sections, starts, strict=False)]
    # In the order of the file. Section 0 is a placeholder.
    for i in sorted(range(1, len(sections)), key=lambda i: sections[i].offset):
        section = sections[i]
        if i == elf.header.names_at:
            sections[i] = section._replace(offset=sink.tell(), size=len(strings))
            sink.write(strings)
        elif section.offset >= elf.fixed and not section.is_loaded:
            source.seek(section.offset)
            sections[i] = section._replace(offset=_pad(sink, section.alignment))
            _copy(source, sink, section.end - section.offset)
    table = _pad(sink, 8)
    sink.writelines(_SECTION.pack(*section) for section in sections)
    # The header is the first thing in the file. It now has the place and length of the new table.
    sink.seek(0)
    sink.write(_FILE.pack(*elf.header._replace(sections_at=table, sections=len(sections))))


def _pad(sink: BinaryIO, alignment: int) -> int:
    """Write zeros up to the next multiple of ``alignment`` and return the position."""
    sink.write(bytes(-sink.tell() % max(alignment, 1)))
    return sink.tell()


def _copy(source: BinaryIO, sink: BinaryIO, length: int) -> None:
    """Copy ``length`` bytes from the position of one file to that of another."""
    while length:
        # 1 MiB at a time: libraries of CUDA have hundreds of megabytes.
        data = source.read(min(length, 2**20))
        if not data:
            raise OSError(f"{source.name} changed while it was stripped")
        sink.write(data)
        length -= len(data)
