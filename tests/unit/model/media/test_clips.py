"""Videos are refused by their headers; the header itself is replaced here."""

from __future__ import annotations

import pytest

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import Limits
from triton_vllm.media import clips
from triton_vllm.media.clips import check_videos
from triton_vllm.media.video import Header

SMALL = Limits(max_clip_seconds=10, max_video_frames=100, max_frame_pixels=1000)
NONE = Limits(max_clip_seconds=0, max_video_frames=0, max_frame_pixels=0)
FINE = Header(frames=100, rate=10.0, width=20, height=25)


@pytest.fixture
def check(monkeypatch):
    """Return a function that checks videos with these headers; an exception is raised in place of one."""

    def run(limits, *headers):
        found = iter(headers)

        def read(data):
            header = next(found)
            if isinstance(header, Exception):
                raise header
            return header

        monkeypatch.setattr(clips, "read_header", read)
        check_videos(limits, [(f"video[{i}]", b"") for i in range(len(headers))])
        assert list(found) == []

    return run


def test_videos_within_the_limits_pass(check):
    """Each as long as is allowed, and all frames together as large."""
    check(SMALL)
    check(SMALL, FINE, FINE)
    check(SMALL, Header(100, 0.0, 20, 25))  # of an unknown rate: its frames bound it


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ([Header(101, 30.0, 20, 25)], "video[0] has 101 frames; this model takes at most 100"),
        ([Header(100, 9.99, 20, 25)], "video[0] has 11 seconds; this model takes at most 10"),
        ([FINE, Header(1, 1.0, 1001, 1)], "video[1] of 1001 x 1 has 1001 pixels in a frame; this model takes at most 1000"),
        ([FINE, FINE, Header(1, 1.0, 1, 1)], "the videos have 1001 pixels in a frame of each; this model takes at most 1000"),
        ([Header(0, 30.0, 20, 25)], "video[0]: its header does not say how many frames"),
        ([Header(5, 30.0, 0, 25)], "video[0]: its header does not say"),
        ([Header(5, 30.0, 20, 0)], "video[0]: its header does not say"),
        (
            [Header(100, 1000.0, 20, 25)],
            "frames it has, of what size, or how many a second",
        ),
        ([FINE, ValueError("/internal")], "video[1] cannot be decoded: it is damaged or not a video"),
    ],
)
def test_others_are_refused_by_name(check, headers, says):
    """With what they have and the limit."""
    with pytest.raises(InvalidRequestError) as caught:
        check(SMALL, *headers)
    assert says in str(caught.value)


def test_without_limits_no_header_is_read():
    """What nobody limits need not be readable."""
    check_videos(NONE, [("video[0]", b"no video")])
