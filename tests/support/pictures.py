"""The first bytes of pictures, as much as tells their size: small files that claim to be large."""

from __future__ import annotations

import base64
import struct


def picture(data: bytes) -> str:
    """Return a file as a request has it."""
    return base64.b64encode(data).decode()


def png(*sizes: int) -> bytes:
    """Return a PNG's beginning with a header for each pair of width and height."""
    pairs = list(zip(sizes[::2], sizes[1::2], strict=True))
    heads = b"".join(struct.pack(">I4sII9x", 13, b"IHDR", *pair) for pair in pairs)
    return b"\x89PNG\r\n\x1a\n" + heads + struct.pack(">I4s", 0, b"IDAT")


def jpeg(*sizes: int, before: int = 0) -> bytes:
    """Return a JPEG's beginning with a header for each pair of width and height, behind `before` bytes of other data."""
    other = struct.pack(">HH", 0xFFE1, before + 2) + bytes(before)
    heads = b"".join(struct.pack(">HHBHH6x", 0xFFC2, 13, 8, h, w) for w, h in zip(sizes[::2], sizes[1::2], strict=True))
    return b"\xff\xd8" + other + heads + struct.pack(">HH", 0xFFDA, 2)


def webp(kind: str, width: int, height: int) -> bytes:
    """Return a WEBP's beginning: ``VP8X``, ``VP8L`` or ``VP8 ``."""
    if kind == "VP8X":
        body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    elif kind == "VP8L":
        body = b"\x2f" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little") + bytes(5)
    else:
        body = bytes(6) + struct.pack("<HH", width, height)
    return b"RIFF" + bytes(4) + b"WEBP" + kind.encode() + struct.pack("<I", len(body)) + body
