"""Does one job of ``parts_unpack.py``: unpacks a part, or copies the small archive, into a folder.

    python parts_worker.py part FILE SHA256 FOLDER PACKED
    python parts_worker.py base SOURCE FOLDER LEFT_OUT...

PACKED is the folder that the part was packed from, if it is here, else empty: equal files become
hard links. This file is copied into the small archive, next to ``parts_unpack.py``, and uses only
the standard library. If a job fails, the last line on standard error has the reason: an error
number with its text, or a message for the user.
"""
# This runs for 60,000 files, and os.path is faster than pathlib.
# ruff: noqa: PTH103, PTH116, PTH118, PTH120, PTH211

import hashlib
import mmap
import os
import shutil
import stat
import sys
import tarfile
import zlib

_GZIP = 31  # zlib's number for "a gzip header, and the largest window"
_BLOCK = 2**18  # compressed bytes inflated at once


def unpack_part(file: str, sha256: str, target: str, packed: str) -> None:
    """Unpack a part into the folder ``target`` if its digest is right; else exit with a message."""
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # The digest comes first: nothing of a changed part may reach the folder.
        if hashlib.sha256(data).hexdigest() != sha256:
            sys.exit(
                f"{file} has changed since the build. "
                "Copy the model's whole folder again, or build it again."
            )
        # tarfile copies the rest of its buffer for each member, so the buffer is small.
        with tarfile.open(  # type: ignore[call-overload]
            fileobj=_Inflated(data), mode="r|", bufsize=2**16, copybufsize=2**20
        ) as archive:
            _extract(archive, target, packed)


def _extract(archive: tarfile.TarFile, target: str, packed: str) -> None:
    """Write the members of a part into the folder ``target``; ``packed`` as in the file's head."""
    # tarfile's own extract() would also set owners and check each path. The digest has shown that
    # the part is the build's, whose members are plain files, links and folders.
    known_folders: set[str] = set()
    # Only setting the umask returns it.
    umask = os.umask(0)
    os.umask(umask)
    for member in archive:
        path = os.path.join(target, member.name)
        folder = path if member.isdir() else os.path.dirname(path)
        if folder not in known_folders:
            os.makedirs(folder, exist_ok=True)
            known_folders.add(folder)
        if member.issym():
            os.symlink(member.linkname, path)
        elif not member.isdir():
            # This saves writing 2 to 8 GB when a build checks what it has packed.
            linked = packed and _link(archive, member, path, os.path.join(packed, member.name))
            if not linked:
                _write(archive, member, path, umask)


def _link(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, packed: str) -> bool:
    """Make ``path`` a hard link to the file ``packed``, from which the member was packed.

    Return False if that file is missing, or has another size, mode or time. If only the contents
    differ, exit with a message.
    """
    try:
        status = os.stat(packed)
    except FileNotFoundError:
        return False
    attributes = (status.st_size, stat.S_IMODE(status.st_mode), int(status.st_mtime))
    if attributes != (member.size, member.mode, member.mtime):
        return False
    source = archive.extractfile(member)
    with open(packed, "rb") as stream:
        while source and (piece := source.read(2**20)):
            if stream.read(len(piece)) != piece:
                sys.exit(
                    f"{packed} is not the file that was packed. "
                    "Remove the cache (subcommand clean), then build again."
                )
    try:
        os.link(packed, path)
    # Another file system, or one without links.
    except OSError:
        shutil.copy2(packed, path)
    return True


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, umask: int) -> None:
    """Write a member to the file ``path`` with its mode and time; ``umask`` is this process's."""
    # os.open() and os.write() need half of the system calls of open() and shutil.copyfileobj().
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, member.mode)
    try:
        source = archive.extractfile(member)
        while source and (piece := source.read(2**20)):
            view = memoryview(piece)
            while view:
                view = view[os.write(handle, view) :]
        # os.open() has left out the bits of the umask.
        if member.mode & umask:
            os.fchmod(handle, member.mode)
    finally:
        os.close(handle)
    # Bytecode contains its source's time. With another one, each start would compile again. Some
    # FUSE file systems set the time when a file is closed, so this comes last.
    os.utime(path, (member.mtime, member.mtime))


class _Inflated:
    """A stream of the bytes in a part, which is a row of gzip members."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0
        self._inflater = zlib.decompressobj(_GZIP)
        # Inflated bytes that no call of read() has returned.
        self._ready = b""

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most ``size``; none at the end."""
        # tarfile reads again until it has enough.
        self._ready = self._ready or self._next()
        piece = self._ready[:size]
        self._ready = self._ready[size:]
        return piece

    def _next(self) -> bytes:
        """Return the inflated bytes of the next compressed ones; none at the end."""
        inflated = b""
        # A block may give no bytes, such as the end of a member.
        while not inflated and self._position < len(self._data):
            block = self._data[self._position : self._position + _BLOCK]
            inflated = self._inflater.decompress(block)
            # After a member's end, the rest of the block belongs to the next member.
            self._position += len(block) - len(self._inflater.unused_data)
            if self._inflater.eof:
                self._inflater = zlib.decompressobj(_GZIP)
        return inflated


def copy_base(source: str, target: str, *left_out: str) -> None:
    """Copy the extracted small archive, except files and folders with the names ``left_out``."""
    # Not shutil.copytree(), which collects the failures as texts. The first OSError ends this, and
    # main() prints its number.
    os.makedirs(target, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            path = os.path.join(target, entry.name)
            if entry.name in left_out:
                continue
            if entry.is_dir(follow_symlinks=False):
                copy_base(entry.path, path, *left_out)
            else:
                shutil.copy2(entry.path, path, follow_symlinks=False)
    shutil.copystat(source, target)


def main(job: str, *arguments: str) -> None:
    """Do the job; if it fails, print the reason (see the file's head) and exit with status 1."""
    try:
        if job == "part":
            unpack_part(*arguments)
        else:
            copy_base(*arguments)
    except OSError as error:
        # An error without a number counts as EIO (5).
        sys.exit(f"{error.errno or 5} {error.strerror or error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
