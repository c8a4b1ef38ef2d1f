"""Read the size of a picture from the first bytes of its base64 text, without decoding the picture."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator

MOST_SEGMENTS = 2000
"""The most segments of a file before its pixels; cameras write a dozen."""
Read = Callable[[int, int], bytes]


def size(text: str) -> tuple[int, int]:
    """Return the width and height of a PNG, JPEG or WEBP.

    Args:
        text: base64 without white space.

    Raises:
        binascii.Error: not base64.
        ValueError: none of these kinds, or damaged. The text completes the sentence "it is …".
    """

    def read(start: int, count: int) -> bytes:
        first = start // 3
        found = base64.b64decode(text[4 * first : 4 * ((start + count + 2) // 3)], validate=True)
        return found[start - 3 * first :][:count]

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
    return max(sizes, key=lambda one: one[0] * one[1], default=(0, 0))


def _part(read: Read, start: int, count: int) -> bytes:
    found = read(start, count)
    if len(found) < count:
        raise ValueError("damaged")
    return found


def _png(read: Read) -> Iterator[tuple[int, int]]:
    position = 8
    for _ in range(MOST_SEGMENTS):
        head = _part(read, position, 8)
        if head[4:] == b"IDAT":
            return
        if head[4:] == b"IHDR":
            body = _part(read, position + 8, 8)
            yield int.from_bytes(body[:4], "big"), int.from_bytes(body[4:], "big")
        position += 12 + int.from_bytes(head[:4], "big")
    raise ValueError("damaged")


def _jpeg(read: Read) -> Iterator[tuple[int, int]]:
    position = 2
    for _ in range(MOST_SEGMENTS):
        head = _part(read, position, 4)
        if head[0] != 0xFF:
            raise ValueError("damaged")
        if head[1] == 0xFF:  # a fill byte
            position += 1
            continue
        if head[1] == 0xDA:  # the pixels begin
            return
        if 0xC0 <= head[1] <= 0xCF and head[1] not in (0xC4, 0xC8, 0xCC):
            body = _part(read, position + 5, 4)
            yield int.from_bytes(body[2:], "big"), int.from_bytes(body[:2], "big")
        position += 2 + int.from_bytes(head[2:], "big")
    raise ValueError("damaged")


def _webp(head: bytes) -> tuple[int, int]:
    if len(head) < 30:
        raise ValueError("damaged")
    if head[12:16] == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(
        head[28:30], "little"
    ) & 0x3FFF
