"""Refuse videos that would cost too much to decode, by the headers of their files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import refuse_above
from triton_vllm.media.video import read_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.base.limits import Limits

GUESSED_FRAMES_PER_S = 1000.0
"""OpenCV's rate, in frames a second, for a WebM with irregular times in milliseconds.
OpenCV then reports the length times this rate as the number of frames."""


def check_videos(limits: Limits, videos: Sequence[tuple[str, bytes]]) -> None:
    """Refuse a request's videos if they are too large; called in the thread that would decode them.

    Args:
        limits: the model's limits.
        videos: files, each with its name in errors, such as ``video[0]``.

    Raises:
        InvalidRequestError: a video has too many frames, seconds or pixels, does not give their
            number, or is not a video.
    """
    # Without a limit, even a file without a readable header is left to vLLM.
    if not (limits.max_clip_seconds or limits.max_video_frames or limits.max_frame_pixels):
        return
    # A header that claims too little does not get around the limits if vLLM decodes with OpenCV,
    # its default decoder. OpenCV reads no frame beyond the header's count, and scales each frame to
    # the header's size.
    pixels = sum(_check(limits, name, data) for name, data in videos)
    refuse_above(limits.max_frame_pixels, pixels, "the videos have", "pixels in a frame of each")


def _check(limits: Limits, name: str, data: bytes) -> int:
    """Refuse a video above the limits; return the pixels of one frame, or 0 without OpenCV."""
    try:
        header = read_header(data)
    except ValueError:
        raise InvalidRequestError(
            f"{name} cannot be decoded: it is damaged or not a video"
        ) from None
    # Without OpenCV, vLLM uses another decoder or refuses the video.
    if header is None:
        return 0
    is_complete = header.frames and header.width and header.height
    rate_is_guessed = header.rate >= GUESSED_FRAMES_PER_S
    if not is_complete or rate_is_guessed:
        # E.g. a browser's recording, which is written before its length is known. A decoder that
        # counts frames by decoding would have no limit. vLLM's usual decoder would show the model
        # only the first frame.
        raise InvalidRequestError(
            f"{name}: its header does not say how many frames it has, of what size, "
            "or how many a second; convert it to MP4 with a constant frame rate"
        )
    refuse_above(limits.max_video_frames, header.frames, f"{name} has", "frames")
    # Without a rate, only the number of frames is limited.
    seconds = math.ceil(header.frames / header.rate) if header.rate else 0
    refuse_above(limits.max_clip_seconds, seconds, f"{name} has", "seconds")
    # The sum of all videos would catch it, too. But this message names the video.
    pixels = header.width * header.height
    size = f"{header.width} x {header.height}"
    refuse_above(limits.max_frame_pixels, pixels, f"{name} of {size} has", "pixels in a frame")
    return pixels
