"""Remove symbol tables and debug information from ELF files without moving anything that is loaded.

GNU strip changes the layout of a file. That breaks libraries that patchelf or auditwheel has changed ("ELF load command
address/offset not properly aligned"). Also, not every container has binutils.

Here, all bytes up to the end of what a loader maps keep their place. Of the sections behind them some are removed, and the
section table is written again. A file with another layout stays as it is.
"""

import itertools
import shutil
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

_LEAST = 64 * 2**10  # bytes; saving less is not worth rewriting a file

# Headers of an ELF-64 file, of a segment and of a section, all little-endian (System V gABI 4.1, elf(5)).
_FILE = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_PROGRAM, _LIBRARY = 2, 3
_MACHINES = (
    62,
    183,
)  # x86-64 and AArch64. Code for GPUs is in ELF files, too, and their driver reads the symbols
# Section types (SHT_SYMTAB, SHT_STRTAB, ...) and flags (SHF_ALLOC, SHF_INFO_LINK).
_SYMBOLS, _STRINGS, _RELA, _NO_BITS, _REL, _GROUP, _SYMBOL_SECTIONS = 2, 3, 4, 8, 9, 17, 18
_IS_LOADED, _INFO_IS_SECTION = 0x2, 0x40
_PAGE = 4096  # bytes; a section that is not loaded has no larger alignment
_RESERVED = 0xFF00  # from this value on, a section count or index has a special meaning
_DEBUG = (".debug_", ".zdebug_", ".rela.debug_", ".gnu_debug", ".gdb_index")


class _Section(NamedTuple):
    """A section header; the fields have the same order as in the file."""

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
        return self.offset + (0 if self.kind == _NO_BITS else self.size)

    @property
    def is_loaded(self) -> bool:
        return bool(self.flags & _IS_LOADED)


@dataclass(frozen=True)
class _Elf:
    """An ELF file: its header, its sections with names, and the offset below which nothing may move (``fixed``)."""

    header: tuple[bytes | int, ...]
    sections: list[_Section]
    names: list[bytes]
    fixed: int
    table: int
    names_at: int
    size: int


class _UnusualError(Exception):
    """The file has another layout than compilers and linkers produce."""


def strip_symbols(file: Path) -> int:
    """Remove the symbol table and debug information of an ELF file; return the bytes saved, 0 if the file is unchanged.

    The file is replaced by a rename, with its mode and times, because it may be a hard link into a cache.
    """
    if file.is_symlink() or file.stat().st_size < _LEAST:
        return 0
    with file.open("rb") as stream:
        try:
            elf = _read(stream)
            dropped = _droppable(elf)
            if sum(elf.sections[i].size for i in dropped) < _LEAST:
                return 0
            _require_known(elf, stream)
            rest = _remaining(elf, dropped)
        # An IndexError or ValueError means that an index or a name points to nothing.
        except (_UnusualError, IndexError, ValueError):
            return 0
        temporary = file.with_name(f".{file.name}.new")
        with temporary.open("wb") as sink:
            _write(rest, stream, sink)
    shutil.copystat(file, temporary)
    saved = elf.size - temporary.stat().st_size
    temporary.replace(file)
    return saved


def _require(condition: bool) -> None:  # noqa: FBT001 - reads like a sentence
    if not condition:
        raise _UnusualError


def _read(stream: BinaryIO) -> _Elf:
    size = stream.seek(0, 2)
    header = _FILE.unpack(_at(stream, 0, _FILE.size))
    (
        ident,
        kind,
        machine,
        _,
        _,
        segments_at,
        table,
        _,
        _,
        segment_size,
        segments,
        section_size,
        count,
        names_at,
    ) = header
    _require(ident.startswith(_MAGIC) and kind in (_PROGRAM, _LIBRARY) and machine in _MACHINES)
    _require((segment_size, section_size) == (_SEGMENT.size, _SECTION.size))
    _require(segments > 0 and 0 < names_at < count < _RESERVED)
    sections = [
        _Section(*row) for row in _SECTION.iter_unpack(_at(stream, table, count * _SECTION.size))
    ]
    strings = _at(stream, sections[names_at].offset, sections[names_at].size)
    names = [strings[s.name : strings.index(b"\0", s.name)] for s in sections]
    mapped = [
        s[2] + s[5]
        for s in _SEGMENT.iter_unpack(_at(stream, segments_at, segments * _SEGMENT.size))
    ]
    loaded = [s.end for s in sections if s.is_loaded and s.kind != _NO_BITS]
    fixed = max(_FILE.size, segments_at + segments * _SEGMENT.size, *mapped, *loaded)
    return _Elf(header, sections, names, fixed, table, names_at, size)


def _at(stream: BinaryIO, offset: int, length: int) -> bytes:
    _require(offset + length <= stream.seek(0, 2))
    stream.seek(offset)
    return stream.read(length)


def _droppable(elf: _Elf) -> set[int]:
    """Return the indices of symbol tables, their string tables and debug sections."""
    sections = elf.sections
    free = {i for i, s in enumerate(sections) if i and not s.is_loaded}
    symbols = {i for i in free if sections[i].kind == _SYMBOLS}
    strings = {sections[i].link for i in symbols if sections[sections[i].link].kind == _STRINGS} - {
        elf.names_at
    }
    extended = {i for i in free if sections[i].kind == _SYMBOL_SECTIONS}
    debug = {i for i in free if elf.names[i].decode("latin-1").startswith(_DEBUG)}
    return (symbols | strings | extended | debug) & free


def _require_known(elf: _Elf, stream: BinaryIO) -> None:
    """Check that only sections and the section table follow the loaded part.

    Other bytes may be data that a program looks for at the end of its own file.
    """
    behind = [
        (s.offset, s.end, s.alignment)
        for s in elf.sections[1:]
        if s.kind != _NO_BITS and s.size and s.end > elf.fixed
    ]
    behind.append((elf.table, elf.table + len(elf.sections) * _SECTION.size, 8))
    position = elf.fixed
    for start, end, alignment in sorted(behind):
        gap = start - position
        _require(0 <= gap < max(alignment, 1) and _at(stream, position, gap) == bytes(gap))
        position = end
    _require(position == elf.size)


def _remaining(elf: _Elf, dropped: set[int]) -> _Elf:
    """Return the remaining sections with new numbers; fail if a remaining section refers to a removed one."""
    _require(all(elf.sections[i].offset >= elf.fixed for i in dropped))
    # Symbols of the dynamic table name their section by number, so the loaded sections must keep theirs.
    _require(min(dropped) > max(i for i, s in enumerate(elf.sections) if s.is_loaded))
    kept = [i for i in range(len(elf.sections)) if i not in dropped]
    number = {old: new for new, old in enumerate(kept)}
    sections = []
    for section in (elf.sections[i] for i in kept):
        _require(section.is_loaded or section.alignment <= _PAGE)
        refers = section.kind in (_REL, _RELA) or section.flags & _INFO_IS_SECTION
        _require(
            section.kind != _GROUP
            and section.link in number
            and (not refers or section.info in number)
        )
        info = number[section.info] if refers else section.info
        sections.append(section._replace(link=number[section.link], info=info))
    return replace(
        elf, sections=sections, names=[elf.names[i] for i in kept], names_at=number[elf.names_at]
    )


def _write(elf: _Elf, source: BinaryIO, sink: BinaryIO) -> None:
    """Write the loaded part unchanged, the sections behind it in their order, and a new section table."""
    source.seek(0)
    _copy(source, sink, elf.fixed)
    strings = b"".join(name + b"\0" for name in elf.names)
    starts = [0, *itertools.accumulate(len(name) + 1 for name in elf.names)]
    sections = [s._replace(name=start) for s, start in zip(elf.sections, starts, strict=False)]
    for i in sorted(range(1, len(sections)), key=lambda i: sections[i].offset):
        section = sections[i]
        if i == elf.names_at:
            sections[i] = section._replace(offset=sink.tell(), size=len(strings))
            sink.write(strings)
        elif section.offset >= elf.fixed and not section.is_loaded:
            source.seek(section.offset)
            sections[i] = section._replace(offset=_pad(sink, section.alignment))
            _copy(source, sink, section.end - section.offset)
    table = _pad(sink, 8)
    sink.writelines(_SECTION.pack(*section) for section in sections)
    sink.seek(0)
    sink.write(_FILE.pack(*elf.header[:6], table, *elf.header[7:12], len(sections), elf.names_at))


def _pad(sink: BinaryIO, alignment: int) -> int:
    """Write zeros up to the next multiple of ``alignment`` and return the position."""
    sink.write(bytes(-sink.tell() % max(alignment, 1)))
    return sink.tell()


def _copy(source: BinaryIO, sink: BinaryIO, length: int) -> None:
    while length:
        data = source.read(min(length, 2**20))
        if not data:
            raise OSError(f"{source.name} changed while it was stripped")
        sink.write(data)
        length -= len(data)
