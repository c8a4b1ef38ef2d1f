"""Refuse videos that would take too much to decode, by the headers of their files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import refuse_above
from triton_vllm.media.video import read_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.base.limits import Limits

GUESSED_RATE = 1000.0
"""Frames a second that OpenCV takes for a WebM with irregular times in milliseconds; its frames are then length times that."""


def check_videos(limits: Limits, videos: Sequence[tuple[str, bytes]]) -> None:
    """Refuse videos of a request; called in the thread that would decode them.

    A header that says too little is no way round where vLLM decodes with OpenCV, as it does unless the operator chooses another
    decoder: no frame is read after the last one that the header counts, and each is brought to the size that the header gives.

    Args:
        limits: the model's.
        videos: files, each with what an error calls it, such as ``video[0]``.

    Raises:
        InvalidRequestError: one has too many frames, seconds or pixels, does not say how many, or is no video.
    """
    if not (limits.max_clip_seconds or limits.max_video_frames or limits.max_frame_pixels):
        return
    pixels = 0
    for name, data in videos:
        pixels += _check(limits, name, data)
    refuse_above(limits.max_frame_pixels, pixels, "the videos have", "pixels in a frame of each")


def _check(limits: Limits, name: str, data: bytes) -> int:
    """Check one video; return the pixels of a frame."""
    try:
        header = read_header(data)
    except ValueError:
        raise InvalidRequestError(f"{name} cannot be decoded: it is damaged or not a video") from None
    if header is None:  # an environment without OpenCV: vLLM decodes with something else, or refuses the video
        return 0
    if not (header.frames and header.width and header.height) or header.rate >= GUESSED_RATE:
        # Such as a browser's recording, which is written before its length is known. Nothing would bound a decoder that
        # counts by decoding, and vLLM's usual one would show the model the first frame only.
        raise InvalidRequestError(
            f"{name}: its header does not say how many frames it has, of what size, or how many a second; "
            "convert it to MP4 with a constant frame rate"
        )
    refuse_above(limits.max_video_frames, header.frames, f"{name} has", "frames")
    # Without a rate the frames alone bound it.
    refuse_above(limits.max_clip_seconds, math.ceil(header.frames / header.rate) if header.rate else 0, f"{name} has", "seconds")
    found = header.width * header.height
    refuse_above(limits.max_frame_pixels, found, f"{name} of {header.width} x {header.height} has", "pixels in a frame")
    return found
