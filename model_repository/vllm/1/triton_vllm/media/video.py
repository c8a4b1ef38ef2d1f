"""Read the header of a video's file with the decoder that vLLM uses, without decoding a frame."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO


@dataclass(frozen=True)
class Header:
    """The header of a video's file; 0 means unknown.

    Attributes:
        frames: number of frames.
        rate: frames a second.
        width: of a frame, in pixels.
        height: of a frame, in pixels.
    """

    frames: int
    rate: float
    width: int
    height: int


def read_header(data: bytes) -> Header | None:
    """Return the header of a video's file; None without OpenCV.

    It reads for milliseconds, so call it in a thread.

    Args:
        data: the file.

    Raises:
        ValueError: not a video.
    """
    try:
        import cv2
    except ImportError:
        return None
    # OpenCV needs the name of a backend for a file in memory; vLLM takes the first one, too.
    registry = cv2.videoio_registry
    backends = filter(registry.hasBackend, registry.getStreamBufferedBackends())
    backend = next(backends, None)
    if backend is None:
        return None
    capture = cv2.VideoCapture(BytesIO(data), backend, [])
    # `capture.release()` is not called: it drops the file while other threads run, and the process
    # dies (OpenCV 5.0.0).
    if not capture.isOpened():
        raise ValueError("no video")

    def read(prop: int) -> float:
        value: float = capture.get(prop)
        # FFmpeg counts -2**63 frames if a file does not give its length.
        return value if 0 < value < 1 << 62 else 0

    return Header(
        frames=int(read(cv2.CAP_PROP_FRAME_COUNT)),
        rate=read(cv2.CAP_PROP_FPS),
        width=int(read(cv2.CAP_PROP_FRAME_WIDTH)),
        height=int(read(cv2.CAP_PROP_FRAME_HEIGHT)),
    )
