"""Unpack an archive as Triton's Python backend does.

    python -m vllm_env.layout.libarchive_worker ARCHIVE FOLDER

It makes the same libarchive calls in the same order as python_backend's src/pb_env.cc. They accept
tar archives, with gzip or no compression, and stop at any status other than ARCHIVE_OK.

This is a process of its own, because it changes the working folder and the locale.
"""

import ctypes
import json
import locale
import os
import sys
from typing import Any

from libarchive import extract, ffi

# The SECURE flags are those of 26.06. They are used for every release: an archive that writes
# outside its folder must never be unpacked.
_FLAGS = (
    extract.EXTRACT_TIME
    | extract.EXTRACT_SECURE_SYMLINKS
    | extract.EXTRACT_SECURE_NODOTDOT
    | extract.EXTRACT_SECURE_NOABSOLUTEPATHS
)
_BLOCK_BYTES = 10240  # bytes that Triton reads at once


class Refused(Exception):  # noqa: N818 - says what libarchive did
    """libarchive did not return ARCHIVE_OK.

    ``answer`` has the call, its status and message, and the member's name.
    """

    def __init__(self, call: str, status: int, message: str, member: str) -> None:
        self.answer = {"call": call, "status": status, "message": message, "member": member}


# Let the functions return the status, as Triton sees it. The binding would log warnings, and raise
# an exception for an error.
for _function in (
    "read_open_fd",
    "read_next_header",
    "read_data_block",
    "write_header",
    "write_data_block",
    "write_finish_entry",
):
    getattr(ffi, _function).errcheck = lambda status, *_: status


def _check(call: str, status: int, handle: int, member: str) -> bool:
    """Return whether more data follows after a call with this status.

    Args:
        call: the name of the call, for the error.
        status: its result.
        handle: the archive, which has libarchive's message.
        member: the name of the member, for the error.

    Raises:
        Refused: the status is neither ARCHIVE_OK nor ARCHIVE_EOF.
    """
    if status not in (ffi.ARCHIVE_OK, ffi.ARCHIVE_EOF):
        message = ffi.error_string(handle) or b""
        raise Refused(f"archive_{call}", status, message.decode("utf-8", "replace"), member)
    return bool(status == ffi.ARCHIVE_OK)


def unpack(archive: str, folder: str) -> int:
    """Unpack an archive into an existing folder and return its number of members.

    Raises:
        Refused: Triton would stop here.
    """
    source = ffi.read_new()
    sink = ffi.write_disk_new()
    ffi.write_disk_set_options(sink, _FLAGS)
    ffi.get_read_filter_function("gzip")(source)
    ffi.get_read_format_function("tar")(source)
    handle = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)
    os.chdir(folder)
    opened = ffi.read_open_fd(source, handle, _BLOCK_BYTES)
    # The name of Triton's call, which opens the archive by its path.
    _check("read_open_filename", opened, source, member="")
    entry = ctypes.c_void_p()
    target = ctypes.byref(entry)
    members = 0
    name = ""
    while _check("read_next_header", ffi.read_next_header(source, target), source, name):
        name = (ffi.entry_pathname(entry) or b"").decode("utf-8", "replace")
        _check("write_header", ffi.write_header(sink, entry), sink, name)
        _copy_data(source, sink, name)
        _check("write_finish_entry", ffi.write_finish_entry(sink), sink, name)
        members += 1
    ffi.read_free(source)
    # This restores the times of folders.
    ffi.write_free(sink)
    return members


def _copy_data(source: int, sink: int, name: str) -> None:
    """Copy the content of the member ``name`` from the archive to the file on the disk."""
    # libarchive sets these for each block: its bytes, their number, and their place in the file.
    data = ctypes.c_void_p()
    size = ctypes.c_size_t()
    offset = ctypes.c_longlong()
    block = (ctypes.byref(data), ctypes.byref(size), ctypes.byref(offset))
    while _check("read_data_block", ffi.read_data_block(source, *block), source, name):
        _check("write_data_block", ffi.write_data_block(sink, data, size, offset), sink, name)


def main() -> None:
    """Unpack, and print the result as one line of JSON."""
    # As in tritonserver. libarchive cannot convert some names in this locale.
    locale.setlocale(locale.LC_ALL, "C")
    answer: dict[str, Any]
    try:
        answer = {"members": unpack(*sys.argv[1:])}
    except Refused as refused:
        answer = {"refused": refused.answer}
    print(json.dumps(answer))  # noqa: T201 - the result


if __name__ == "__main__":
    main()
