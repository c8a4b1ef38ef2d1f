"""Unpack an archive as Triton's Python backend does: ``python -m vllm_env.layout.libarchive_worker ARCHIVE FOLDER``.

It makes the same libarchive calls in the same order as python_backend's src/pb_env.cc. They accept tar
archives, with gzip or no compression. They change the working folder to the destination, restore times, and stop at any
status other than ARCHIVE_OK. The SECURE flags are those of 26.06. They are used for every release, because an archive that
writes outside its folder must never be unpacked.

This is a process of its own, because it changes the working folder and the locale. The locale is C, as in tritonserver:
libarchive cannot convert some names in it.
"""

import ctypes
import json
import locale
import os
import sys
from typing import Any

from libarchive import ffi

# Constants of archive.h.
_EXTRACT_TIME = 0x0004
_EXTRACT_SECURE_SYMLINKS = 0x0100
_EXTRACT_SECURE_NODOTDOT = 0x0200
_EXTRACT_SECURE_NOABSOLUTEPATHS = 0x10000
_FLAGS = (
    _EXTRACT_TIME
    | _EXTRACT_SECURE_SYMLINKS
    | _EXTRACT_SECURE_NODOTDOT
    | _EXTRACT_SECURE_NOABSOLUTEPATHS
)
_OK, _EOF = 0, 1
_BLOCK = 10240  # bytes that Triton reads at once


class Refused(Exception):  # noqa: N818 - says what libarchive did
    """libarchive did not return ARCHIVE_OK; ``answer`` has the call, its status, its message and the current member."""

    def __init__(self, call: str, status: int, message: str, member: str) -> None:
        super().__init__(message)
        self.answer = {"call": call, "status": status, "message": message, "member": member}


# Let the functions return the status, as Triton sees it. The binding would log warnings and raise exceptions for errors.
for _function in (
    "read_next_header",
    "read_data_block",
    "write_header",
    "write_data_block",
    "write_finish_entry",
):
    getattr(ffi, _function).errcheck = lambda status, *_: status


def _check(call: str, status: int, handle: int, member: str) -> bool:
    """Return whether more data follows after a call with this status.

    Raises:
        Refused: the status is neither ARCHIVE_OK nor ARCHIVE_EOF.
    """
    if status not in (_OK, _EOF):
        message = ffi.error_string(handle) or b""
        raise Refused(f"archive_{call}", status, message.decode("utf-8", "replace"), member)
    return status == _OK


def unpack(archive: str, folder: str) -> int:
    """Unpack an archive into an existing folder and return its number of members.

    Raises:
        Refused: Triton would stop here.
    """
    source, sink = ffi.read_new(), ffi.write_disk_new()
    ffi.write_disk_set_options(sink, _FLAGS)
    ffi.get_read_filter_function("gzip")(source)
    ffi.get_read_format_function("tar")(source)
    handle = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)
    os.chdir(folder)
    ffi.read_open_fd(source, handle, _BLOCK)
    entry, members, name = ctypes.c_void_p(), 0, ""
    while _check(
        "read_next_header", ffi.read_next_header(source, ctypes.byref(entry)), source, name
    ):
        name = (ffi.entry_pathname(entry) or b"").decode("utf-8", "replace")
        _check("write_header", ffi.write_header(sink, entry), sink, name)
        _copy_data(source, sink, name)
        _check("write_finish_entry", ffi.write_finish_entry(sink), sink, name)
        members += 1
    ffi.read_free(source)
    ffi.write_free(sink)  # restores the times of folders
    return members


def _copy_data(source: int, sink: int, name: str) -> None:
    data, size, offset = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_longlong()
    block = (ctypes.byref(data), ctypes.byref(size), ctypes.byref(offset))
    while _check("read_data_block", ffi.read_data_block(source, *block), source, name):
        _check("write_data_block", ffi.write_data_block(sink, data, size, offset), sink, name)


def main() -> None:
    """Unpack, and print the result as one line of JSON."""
    locale.setlocale(locale.LC_ALL, "C")
    answer: dict[str, Any]
    try:
        answer = {"members": unpack(*sys.argv[1:])}
    except Refused as refused:
        answer = {"refused": refused.answer}
    except ffi.ArchiveError as error:
        answer = {
            "refused": Refused("archive_read_open_filename", error.retcode, str(error), "").answer
        }
    print(json.dumps(answer))  # noqa: T201 - the result


if __name__ == "__main__":
    main()
