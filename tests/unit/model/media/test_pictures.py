"""A picture's size is read from its first bytes in base64, as the decoder would find it."""

from __future__ import annotations

import base64
import io

import pytest

from support.pictures import jpeg, picture, png, webp
from triton_vllm.media.pictures import size


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png(640, 480), (640, 480)),
        (png(5, 6, 70_000, 2), (70_000, 2)),
        (jpeg(640, 480), (640, 480)),
        (jpeg(640, 480, before=1), (640, 480)),
        (jpeg(640, 480, before=2), (640, 480)),
        (jpeg(640, 480, before=65_000), (640, 480)),
        (jpeg(640, 480, 9, 9), (640, 480)),
        (webp("VP8X", 640, 480), (640, 480)),
        (webp("VP8L", 640, 480), (640, 480)),
        (webp("VP8 ", 640, 480), (640, 480)),
    ],
)
def test_sizes(data, expected):
    """Of each kind, wherever in the file they stand; of several the largest."""
    assert size(picture(data)) == expected
    assert size(picture(data + b"pixels")) == expected


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_sizes_of_real_files(kind):
    """As another program writes them."""
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (123, 45)).save(file, kind)
    assert size(base64.b64encode(file.getvalue()).decode()) == (123, 45)
