"""A tar archive planned before it is written, so that several processes can write it at once.

A plan is the archive's bytes as a list of pieces: headers and small files' bytes as they are, and ranges of files. It is
cut into chunks at fixed places; each worker reads and compresses whole chunks to gzip members, which one after the other
are the archive (RFC 1952, 2.2). The result depends on the plan alone, not on the number of workers.
"""

from __future__ import annotations

import os
import stat
import tarfile
from dataclasses import dataclass, field

import deflate

from .relocate import EPOCH

_CHUNK = 4 * 2**20  # bytes; compression gains no more from larger ones
# libdeflate's level 2 writes the size of zlib's level 4, which conda-pack uses, in 0.4 of the processor time
_LEVEL = 2

Piece = bytes | tuple[str, int, int]
"""Bytes, or a file's path with the offset and the length of a range of it."""


@dataclass
class TarPlan:
    """Collects the members of an archive; has the methods that conda-pack's ``Packer`` calls on its archives."""

    left_out: frozenset[str] = frozenset()
    pieces: list[Piece] = field(default_factory=list)
    members: int = 0
    size: int = 0

    def add(self, source: str, target: str) -> None:
        """Add the file, link or empty folder ``source`` as ``target``."""
        if target in self.left_out:
            return
        status = os.lstat(source)
        if stat.S_ISLNK(status.st_mode):
            self._header(target, tarfile.SYMTYPE, 0o777, 0, os.readlink(source))
        elif stat.S_ISDIR(status.st_mode):
            self._header(target, tarfile.DIRTYPE, 0o755, 0)
        else:
            self._header(target, tarfile.REGTYPE, _mode(status.st_mode), status.st_size)
            if status.st_size:
                self._append((source, 0, status.st_size), status.st_size)
            self._append(b"\0" * (-status.st_size % tarfile.BLOCKSIZE))

    def add_bytes(self, source: str, data: bytes, target: str) -> None:
        """Add ``data`` as ``target``, executable if ``source`` is."""
        if target in self.left_out:
            return
        self._header(target, tarfile.REGTYPE, _mode(os.lstat(source).st_mode), len(data))
        self._append(data + b"\0" * (-len(data) % tarfile.BLOCKSIZE))

    def _header(self, name: str, kind: bytes, mode: int, size: int, link: str = "") -> None:
        member = tarfile.TarInfo(name)
        member.type, member.mode, member.size, member.linkname, member.mtime = kind, mode, size, link, EPOCH
        self._append(member.tobuf(tarfile.GNU_FORMAT))
        self.members += 1

    def _append(self, piece: Piece, length: int | None = None) -> None:
        if piece:
            self.pieces.append(piece)
            self.size += len(piece) if length is None else length

    def chunks(self) -> list[list[Piece]]:
        """Return the archive's bytes cut into chunks of 4 MiB; the last one closes the archive."""
        chunks: list[list[Piece]] = [[]]
        room = _CHUNK
        for piece in [*self.pieces, b"\0" * (2 * tarfile.BLOCKSIZE)]:
            rest = piece
            while rest:
                taken, rest, length = _cut(rest, room)
                chunks[-1].append(taken)
                room -= length
                if room == 0:
                    chunks.append([])
                    room = _CHUNK
        return [chunk for chunk in chunks if chunk]


def _mode(mode: int) -> int:
    return 0o755 if mode & stat.S_IXUSR else 0o644


def _cut(piece: Piece, room: int) -> tuple[Piece, Piece, int]:
    """Split a piece after at most ``room`` bytes; return both parts and the length of the first."""
    if isinstance(piece, bytes):
        return piece[:room], piece[room:], min(room, len(piece))
    path, offset, length = piece
    taken = min(room, length)
    return (path, offset, taken), (path, offset + taken, length - taken) if length > taken else b"", taken


def compress_chunk(chunk: list[Piece]) -> bytes:
    """Return a chunk as one gzip member.

    Raises:
        OSError: a file has changed or gone since the plan was made.
    """
    parts = []
    for piece in chunk:
        if isinstance(piece, bytes):
            parts.append(piece)
            continue
        path, offset, length = piece
        with open(path, "rb", buffering=0) as stream:
            stream.seek(offset)
            data = stream.read(length)
        if len(data) != length:
            raise OSError(f"{path} changed while it was packed")
        parts.append(data)
    return bytes(deflate.gzip_compress(b"".join(parts), _LEVEL))
