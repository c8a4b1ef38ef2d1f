"""Hands real audios and videos to the model's decoding: ``python clips_probe.py REQUEST.json ANSWER.json``.

The request names the folder with `triton_vllm`, and one with soundfile or none; the answer has, for each file, what the
client would be told (empty: it was decoded) and by how many megabytes this process grew meanwhile.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SMALL, LARGE = (16, 16), (6144, 3200)
MIB = 1 << 20


def video(size: tuple[int, int], frames: int, rate: float) -> bytes:
    """Return a video of black frames, an MP4."""
    import cv2
    import numpy

    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "video.mp4")
        writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"mp4v"), rate, size)
        frame = numpy.zeros((size[1], size[0], 3), numpy.uint8)
        for _ in range(frames):
            writer.write(frame)
        writer.release()
        return Path(path).read_bytes()


def silence(seconds: int, kind: str, rate: int) -> bytes:
    """Return seconds of silence, as FLAC or WAV."""
    import numpy
    import soundfile

    with TemporaryDirectory() as folder:
        path = Path(folder) / "silence"
        with soundfile.SoundFile(path, "w", rate, 1, "PCM_16", format=kind) as file:
            for _ in range(seconds):
                file.write(numpy.zeros(rate, numpy.int16))
        return path.read_bytes()


def peak() -> int:
    """Return the most bytes that this process has held since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Make the most what it is now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def main(request_file: str, answer_file: str) -> None:
    """Try each file."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    sys.path[:0] = [request["model"]]
    sys.path += [request["libraries"]] if request["libraries"] else []
    from triton_vllm import vllm_api
    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.limits import Limits
    from triton_vllm.media import audio
    from triton_vllm.media.clips import check_videos
    from triton_vllm.media.decode import decode

    vllm = vllm_api.load()
    audio.limit(Limits(), vllm_api.variables(), os.environ)
    loaders, check = vllm_api.media_loaders(vllm, {}), partial(check_videos, Limits())

    def attempt(kind: str, data: bytes) -> list[Any]:
        text = base64.b64encode(data).decode()
        forget_peak()
        before, said = peak(), ""
        try:
            decode({kind: (text,)}, loaders, check)
        except AdapterError as error:
            said = f"{error.code}: {error}"
        return [said, (peak() - before) // MIB]

    files = {
        "good video": ("video", video((64, 48), 40, 30.0)),
        "many frames": ("video", video(SMALL, 36_001, 120.0)),
        "many seconds": ("video", video(SMALL, 601, 1.0)),
        "many pixels": ("video", video(LARGE, 12, 30.0)),
        "no video": ("video", bytes(1000)),
        "a picture": ("video", request["picture"].encode("latin-1")),
    }
    if request["libraries"]:
        for kind, rate in (("FLAC", 48_000), ("WAV", 8000)):
            files[f"good {kind}"] = ("audio", silence(2, kind, rate))
            files[f"long {kind}"] = ("audio", silence(601, kind, rate))
    answer = {name: attempt(kind, data) for name, (kind, data) in files.items()}
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
