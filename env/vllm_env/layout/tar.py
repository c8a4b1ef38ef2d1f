"""Pack a prefix as a tar archive, on all cores.

conda-pack chooses the files, and checks that the prefix can be packed (no editable installs, no
missing files). ``TarContents`` has the archive's bytes as a list of pieces: headers as bytes, and
ranges of files. They are cut into chunks at fixed positions. Each worker reads whole chunks and
compresses each one to a gzip member. The members in their order are the archive (RFC 1952, 2.2). So
the result depends only on the contents, not on the number of workers.
"""

import contextlib
import hashlib
import os
import stat
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import deflate
from conda_pack import CondaEnv
from conda_pack.core import CondaPackException, Packer

from vllm_env.base.all_cores import on_all_cores
from vllm_env.base.errors import VllmEnvError
from vllm_env.base.machine import EPOCH

CHUNK_BYTES = 4 * 2**20
"""Larger chunks do not compress better."""
# libdeflate's level 2 reaches the size of zlib's level 4, which conda-pack uses, in 0.4 of the
# processor time. Level 1 needs 0.75 of that. Level 2 saves 4.5 % on libraries (chunks inside one
# file), but only 2-3 % on Python's sources and bytecode. All of them unpack in the same time.
_GZIP_LEVEL = 1
_GZIP_LEVEL_INSIDE_A_FILE = 2
# A third of the bytes of torch, cuBLAS and cuDNN are kernels that are already compressed. If
# deflated, they take a third of the unpacking time, on one core of the server. If stored, they
# unpack four times as fast; the archive grows by 0.5 %.
_STORED_LEVEL = 0
_MAX_DEFLATED_SHARE = 0.9

# No program runs conda-unpack under Triton, and it would have nothing to do: no file contains the
# prefix's path.
LEFT_OUT = frozenset({"bin/conda-unpack", "bin/conda_unpack_progress.py"})

_local = threading.local()


class FileRange(NamedTuple):
    """A range of a file, in bytes."""

    path: str
    offset: int
    length: int


Piece = bytes | FileRange


@dataclass
class TarContents:
    """Collect the members of an archive.

    conda-pack's ``Packer`` calls ``add`` and ``add_bytes``, as those of its own archives.
    """

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
            self._header(target, tarfile.SYMTYPE, 0o777, link=os.readlink(source))
        elif stat.S_ISDIR(status.st_mode):
            self._header(target, tarfile.DIRTYPE, 0o755)
        else:
            self._header(target, tarfile.REGTYPE, _mode(status.st_mode), size=status.st_size)
            self._append(FileRange(source, 0, status.st_size))
            self._append(b"\0" * (-status.st_size % tarfile.BLOCKSIZE))

    def add_bytes(self, source: str, data: bytes, target: str) -> None:
        """Add ``data`` as ``target``, executable if ``source`` is."""
        if target in self.left_out:
            return
        mode = _mode(os.lstat(source).st_mode)
        self._header(target, tarfile.REGTYPE, mode, size=len(data))
        self._append(data + b"\0" * (-len(data) % tarfile.BLOCKSIZE))

    def _header(self, name: str, kind: bytes, mode: int, *, size: int = 0, link: str = "") -> None:
        """Begin a member: add its header, which tells nothing of the user and the time of packing.

        Args:
            name: the member's path.
            kind: tarfile's type of it.
            mode: its mode.
            size: the bytes that follow the header.
            link: where a symbolic link leads.
        """
        member = tarfile.TarInfo(name)
        member.type = kind
        member.mode = mode
        member.size = size
        member.linkname = link
        member.mtime = EPOCH
        self._append(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        self.members += 1

    def _append(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.size += _length(piece)

    def chunks(self) -> list[list[Piece]]:
        """Return the archive's bytes in chunks of 4 MiB; only the last one may be smaller."""
        chunks: list[list[Piece]] = [[]]
        # The bytes that the last chunk still lacks.
        room = CHUNK_BYTES
        # Two empty blocks end a tar archive.
        for piece in [*self.pieces, b"\0" * (2 * tarfile.BLOCKSIZE)]:
            rest = piece
            while _length(rest):
                taken, rest = _cut(rest, room)
                chunks[-1].append(taken)
                room -= _length(taken)
                if room == 0:
                    chunks.append([])
                    room = CHUNK_BYTES
        # The last one is empty if the archive ends with a full chunk.
        return [chunk for chunk in chunks if chunk]


def _mode(mode: int) -> int:
    # Readable by everyone: the server may run as another user.
    return 0o755 if mode & stat.S_IXUSR else 0o644


def _length(piece: Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.length


def _cut(piece: Piece, room: int) -> tuple[Piece, Piece]:
    """Split a piece after at most ``room`` bytes; the second part may be empty."""
    if isinstance(piece, bytes):
        return piece[:room], piece[room:]
    path, offset, length = piece
    first = min(room, length)
    return FileRange(path, offset, first), FileRange(path, offset + first, length - first)


def compress_chunk(chunk: list[Piece]) -> bytearray:
    """Return a chunk as one gzip member.

    Raises:
        OSError: a file has changed or been removed since it was added.
    """
    # One buffer for each thread: allocating memory costs as much as reading into it.
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(CHUNK_BYTES))
    data = read_chunk(chunk, _local.buffer)
    is_inside_a_file = len(chunk) == 1
    level = _GZIP_LEVEL_INSIDE_A_FILE if is_inside_a_file else _GZIP_LEVEL
    compressed = deflate.gzip_compress(data, level)
    if len(compressed) > _MAX_DEFLATED_SHARE * len(data):
        return deflate.gzip_compress(data, _STORED_LEVEL)
    return compressed


def read_chunk(chunk: list[Piece], buffer: memoryview) -> memoryview:
    """Read a chunk into a buffer of ``CHUNK_BYTES`` bytes, and return the filled part.

    Raises:
        OSError: a file has changed or been removed since it was added.
    """
    size = 0
    for piece in chunk:
        place = buffer[size : size + _length(piece)]
        if isinstance(piece, bytes):
            place[:] = piece
        else:
            _read(piece.path, piece.offset, place)
        size += len(place)
    return buffer[:size]


def _read(path: str, offset: int, place: memoryview) -> None:
    with open(path, "rb") as file:
        file.seek(offset)
        if file.readinto(place) != len(place):
            raise OSError(f"{path} changed while it was packed")


def contents_of(prefix: Path, into: TarContents | None = None) -> TarContents:
    """Let conda-pack choose the members of a prefix's archive, and return the contents.

    With ``into`` the members are added to these contents, which may distribute them over several
    archives.

    Raises:
        VllmEnvError: conda-pack refuses the prefix, for example because of an editable package.
    """
    contents = into or TarContents(left_out=LEFT_OUT)
    try:
        environment = CondaEnv.from_prefix(str(prefix), on_missing_cache="ignore")
        packer = Packer(str(prefix), contents)
        for file in environment:
            # The prefix's file, not the copy in the package cache.
            file.source = os.path.join(prefix, file.target)  # noqa: PTH118
            # Without a mode, conda-pack does not read the file to search for the prefix's path:
            # relocate.py has already removed it. The few files of conda-meta keep conda-pack's own
            # treatment.
            if not file.target.startswith("conda-meta/"):
                file.file_mode = None
            packer.add(file)
        for bytecode in _unlisted_bytecode(prefix, {file.target for file in environment}):
            contents.add(str(prefix / bytecode), bytecode)
        # Adds the files that conda-pack writes itself.
        packer.finish()
    except CondaPackException as error:
        raise VllmEnvError(
            "conda-pack refuses the environment.",
            cause=str(error).strip(),
            remedy="Install packages as wheels, not as editable.",
        ) from error
    return contents


def _unlisted_bytecode(prefix: Path, listed: set[str]) -> list[str]:
    """Return the bytecode that conda-pack omits, relative to the prefix."""
    # conda makes bytecode next to a conda package's sources when it installs the package, so
    # conda-pack omits it (core.py, find_py_source). Without it, each start would compile the
    # standard library again.
    bytecode: set[str] = set()
    for folder, _, files in os.walk(prefix / "lib"):
        if folder.endswith("/__pycache__"):
            inner = folder.removeprefix(f"{prefix}/")
            bytecode.update(f"{inner}/{name}" for name in files if name.endswith(".pyc"))
    return sorted(bytecode - listed)


def write_archive(
    contents: TarContents, target: Path, step: Callable[[str, float], None] | None = None
) -> str:
    """Write an archive with all cores and return its SHA-256.

    ``step`` takes the progress: the size as a text, and the finished share from 0 to 1.
    """
    chunks = contents.chunks()
    digest = hashlib.sha256()
    members = on_all_cores(compress_chunk, chunks)
    with contextlib.closing(members), target.open("wb") as sink:
        for number, member in enumerate(members, 1):
            sink.write(member)
            digest.update(member)
            if step:
                step(f"{sink.tell() / 1e6:.0f} MB", number / len(chunks))
        sink.flush()
        os.fsync(sink.fileno())
    return digest.hexdigest()
