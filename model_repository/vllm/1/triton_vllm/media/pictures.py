"""Read the size of a picture from the first bytes of its base64 string, without decoding it."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

MOST_SEGMENTS = 2000
"""The most segments of a file before its pixels; cameras write a dozen."""
Read = Callable[[int, int], bytes]
"""Returns so many bytes (second argument) from a position of the file (first argument) on."""


def size(text: str) -> tuple[int, int]:
    """Return the width and height of a PNG, JPEG or WEBP, in pixels.

    Args:
        text: base64 without white space.

    Raises:
        binascii.Error: not base64.
        ValueError: none of these kinds, or damaged. The text completes the sentence "it is …".
    """

    # Only the segments' heads are decoded: a file may have megabytes before its pixels.
    def read(start: int, count: int) -> bytes:
        # Four characters of base64 are three bytes. So the groups are decoded that have a byte of
        # the part, from `first` until before `end`.
        first = start // 3
        end = (start + count + 2) // 3
        data = base64.b64decode(text[4 * first : 4 * end], validate=True)
        return data[start - 3 * first :][:count]

    head = read(0, 30)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return _largest(_png(read))
    if head.startswith(b"\xff\xd8\xff"):
        return _largest(_jpeg(read))
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _webp(head)
    raise ValueError("not a PNG, JPEG or WEBP")


def _largest(sizes: Iterator[tuple[int, int]]) -> tuple[int, int]:
    # A decoder takes the last size before the pixels, so a file with several sizes counts as its
    # largest.
    return max(sizes, key=math.prod, default=(0, 0))


def _unpack(read: Read, layout: str, start: int) -> tuple[Any, ...]:
    """Return the values at a position of the file; ``layout`` is a format of ``struct``."""
    data = read(start, struct.calcsize(layout))
    # A file that ends there would otherwise be a `struct.error`.
    if len(data) < struct.calcsize(layout):
        raise ValueError("damaged")
    return struct.unpack(layout, data)


def _png(read: Read) -> Iterator[tuple[int, int]]:
    """Yield each width and height that a PNG gives before its pixels.

    Raises:
        ValueError: no pixels were found.
    """
    # After the signature come chunks: length, kind, body, and a checksum of 4 bytes.
    position = 8
    for _ in range(MOST_SEGMENTS):
        length, kind = _unpack(read, ">I4s", position)
        if kind == b"IDAT":
            return
        if kind == b"IHDR":
            width, height = _unpack(read, ">II", position + 8)
            yield width, height
        position += 12 + length
    raise ValueError("damaged")


def _jpeg(read: Read) -> Iterator[tuple[int, int]]:
    """Yield each width and height that a JPEG gives before its pixels.

    Raises:
        ValueError: no pixels were found.
    """
    # After the marker FF D8 come segments: FF, kind, and a length that includes itself.
    position = 2
    for _ in range(MOST_SEGMENTS):
        mark, kind, length = _unpack(read, ">BBH", position)
        if mark != 0xFF:
            raise ValueError("damaged")
        # a fill byte
        if kind == 0xFF:
            position += 1
            continue
        # The pixels begin.
        if kind == 0xDA:
            return
        # These kinds begin a frame and have its size. C4, C8 and CC mean something else.
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            height, width = _unpack(read, ">HH", position + 5)
            yield width, height
        position += 2 + length
    raise ValueError("damaged")


def _webp(head: bytes) -> tuple[int, int]:
    """Return the width and height of a WEBP, from its first 30 bytes.

    Raises:
        ValueError: there are fewer bytes.
    """
    if len(head) < 30:
        raise ValueError("damaged")
    # 1) extended: 24 bits each, less 1
    if head[12:16] == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    # 2) lossless: 14 bits each, less 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    # 3) lossy: 14 bits each; the two bits above are a scale
    width, height = struct.unpack("<HH", head[26:30])
    return width & 0x3FFF, height & 0x3FFF
