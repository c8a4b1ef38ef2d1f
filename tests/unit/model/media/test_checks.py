"""Pictures, audio and video are checked by kind, size and place before anything is decoded or fetched."""

from __future__ import annotations

import pytest

from support.pictures import picture, png
from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import Limits
from triton_vllm.media.checks import check_item, check_parts

SMALL = Limits(max_image_bytes=90, max_image_pixels=100, max_clip_bytes=30, max_images=2, max_clips=1, max_parts=5)
OPEN = Limits(allowed_media_domains=("images.example.com", "10.0.0.1"))
FINE = picture(png(10, 10))


def message(*parts):
    return [{"role": "user", "content": list(parts)}]


def refers(url, kind="image_url"):
    return {"type": kind, kind: {"url": url}}


@pytest.mark.parametrize("text", [FINE, "data:image/png;base64," + FINE, "DATA:;base64," + FINE, FINE[:40] + "\r\n" + FINE[40:]])
def test_a_small_picture_passes(text):
    """With or without a data URL's head, with or without the line breaks of MIME."""
    check_item(SMALL, "image", "image[0]", text)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("image", picture(png(1, 1) + bytes(90)), "bytes; this model takes at most 90"),
        ("audio", "A" * 44, "x has 33 bytes; this model takes at most 30"),
    ],
)
def test_others_are_refused_by_name(kind, text, says):
    """With their size and the limit."""
    with pytest.raises(InvalidRequestError) as caught:
        check_item(SMALL, kind, "x", text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com/a.png",
        "https://images.example.com:8443/a/b.png?c=d",
        "HTTPS://IMAGES.example.com/a.png",
        "http://10.0.0.1/a.png",
    ],
)
def test_hosts_that_the_operator_has_named_may_be_asked(url):
    """In any spelling of the same host; without their names nothing is fetched."""
    assert check_parts(OPEN, message(refers(url))) == [len(url)]
    with pytest.raises(InvalidRequestError, match="nothing is fetched from there"):
        check_parts(Limits(), message(refers(url)))


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/a.png",
        "http://images.example.com.evil.org/",
        "http://evilimages.example.com/",
        "http://evil.org/images.example.com",
        "http://evil.org#images.example.com",
        "http://images.example.com@evil.org/",
        "http://images.example.com\\@evil.org/",
        "http://evil.org\\.images.example.com/",
        "http://images.example.com\t.evil.org/",
        "http://images.example.com\N{FULLWIDTH FULL STOP}evil.org/",
        "http://images.example.com/\\a",
        "file://images.example.com/etc/passwd",
        "ftp://images.example.com/a",
        "//images.example.com/a",
        "images.example.com",
    ],
)
def test_no_other_host_is_asked(url):
    """Nor one that another program might read out of the same text."""
    with pytest.raises(InvalidRequestError, match="nothing is fetched from there"):
        check_parts(OPEN, message(refers(url)))


def test_parts_are_counted_over_all_messages():
    """Parts, pictures, audios and videos."""
    one, sound = refers("data:;base64," + FINE), {"type": "input_audio", "input_audio": {"data": "AAAA"}}
    half = refers("data:;base64," + picture(png(5, 10)))
    assert check_parts(SMALL, [*message("a", half), *message(half, sound, "b")]) == [len(FINE) + 13, len(FINE) + 13, 4]
    for messages, says in (
        ([*message(one, one), *message(one)], "3 pictures"),
        ([*message(sound), *message(refers("data:,AAAA", "video_url"))], "2 audios and videos"),
        ([*message("a", "b", "c"), *message("d", "e", "f")], "6 parts"),
        ([*message(one), *message(refers("data:;base64," + picture(png(1, 1))))], "the pictures have 101 pixels"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            check_parts(SMALL, messages)
