"""The header of a video is read with OpenCV, which is replaced here; test_model_clips.py has the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from triton_vllm.media.video import Header, read_header


@pytest.fixture
def opencv(monkeypatch):
    """Return OpenCV's stand-in: `said` is what it finds in a file by property, None if it cannot open it."""
    cv2: Any = ModuleType("cv2")
    cv2.said, cv2.files = None, []
    cv2.videoio_registry = SimpleNamespace(getStreamBufferedBackends=lambda: [7, 8], hasBackend=lambda backend: backend == 8)
    names = ("CAP_PROP_FRAME_COUNT", "CAP_PROP_FPS", "CAP_PROP_FRAME_WIDTH", "CAP_PROP_FRAME_HEIGHT")
    for number, name in enumerate(names):
        setattr(cv2, name, number)

    class VideoCapture:
        def __init__(self, file, api, parameters):
            cv2.files.append((file.read(), api, parameters))

        def isOpened(self):  # noqa: N802 - OpenCV's name
            return cv2.said is not None

        def get(self, which):
            return cv2.said[which]

    cv2.VideoCapture = VideoCapture
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    return cv2


def test_a_header_is_read_and_no_frame(opencv):
    """The stand-in has neither `read` nor `grab`, and no `release`, which ends the process."""
    opencv.said = (40.0, 29.97, 64.0, 48.0)
    assert read_header(b"film") == Header(40, 29.97, 64, 48)
    assert opencv.files == [(b"film", 8, [])]


@pytest.mark.parametrize("nothing", [-9.223372036854776e18, 9.3e18, -1.0, 0.0, float("nan"), float("inf")])
def test_numbers_that_mean_nothing_are_not_known(opencv, nothing):
    """FFmpeg counts -2**63 frames of a picture or a stream."""
    opencv.said = (nothing, nothing, 64.0, nothing)
    assert read_header(b"film") == Header(0, 0, 64, 0)


def test_what_cannot_be_opened_is_no_video(opencv):
    """Said by an exception, for None means that nobody could look."""
    with pytest.raises(ValueError, match="no video"):
        read_header(b"text")


def test_without_opencv_nothing_is_read(opencv, monkeypatch):
    """An environment may lack it, or have one without FFmpeg."""
    opencv.videoio_registry.hasBackend = lambda backend: False
    assert read_header(b"film") is None
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert read_header(b"film") is None
