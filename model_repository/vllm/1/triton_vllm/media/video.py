"""Read what the header of a video's file says, with the decoder that vLLM uses: no frame is decoded for it."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO


@dataclass(frozen=True)
class Header:
    """What a file says of its video; 0 is not known.

    Attributes:
        frames: in the file.
        rate: frames a second.
        width: of a frame, pixels.
        height: of a frame, pixels.
    """

    frames: int
    rate: float
    width: int
    height: int


def read_header(data: bytes) -> Header | None:
    """Return the header of a video's file, or None where no OpenCV can read it. Reads for milliseconds: call it in a thread.

    Args:
        data: the file.

    Raises:
        ValueError: it is no video.
    """
    try:
        import cv2
    except ImportError:
        return None
    # OpenCV wants one named for what is in memory; vLLM takes the first, too.
    backend = next(filter(cv2.videoio_registry.hasBackend, cv2.videoio_registry.getStreamBufferedBackends()), None)
    if backend is None:
        return None
    file = BytesIO(data)
    capture = cv2.VideoCapture(file, backend, [])
    # Without `capture.release()`: that drops the file while other threads run, and the process dies (OpenCV 5.0.0).
    if not capture.isOpened():
        raise ValueError("no video")
    wanted = (cv2.CAP_PROP_FRAME_COUNT, cv2.CAP_PROP_FPS, cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)
    # A file that does not say how long it is counts -2**63 frames.
    frames, rate, width, height = (value if 0 < value < 1 << 62 else 0 for value in map(capture.get, wanted))
    return Header(int(frames), rate, int(width), int(height))
