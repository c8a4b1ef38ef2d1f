"""Small files that claim to be long or large videos."""

from __future__ import annotations

import struct


def avi(width: int, height: int, rate: int, frames: int) -> bytes:
    """Return an AVI of one frame that no decoder can read, whose header says that it has others."""
    junk = b"\xff\xd8junk\xff\xd9"
    main = struct.pack("<14I", 1_000_000 // rate, 0, 0, 16, frames, 0, 1, 0, width, height, 0, 0, 0, 0)
    stream = b"vidsMJPG" + struct.pack("<IHHIIIIIIIIHHHH", 0, 0, 0, 0, 1, rate, 0, frames, 0, 0xFFFFFFFF, 0, 0, 0, 8, 8)
    form = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, b"MJPG", 0, 0, 0, 0, 0)
    index = b"00dc" + struct.pack("<III", 16, 4, len(junk))
    heads = _list(b"hdrl", _chunk(b"avih", main) + _list(b"strl", _chunk(b"strh", stream) + _chunk(b"strf", form)))
    body = heads + _list(b"movi", _chunk(b"00dc", junk)) + _chunk(b"idx1", index)
    return _chunk(b"RIFF", b"AVI " + body)


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)


def _list(name: bytes, data: bytes) -> bytes:
    return _chunk(b"LIST", name + data)
