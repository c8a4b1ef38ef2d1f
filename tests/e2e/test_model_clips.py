"""Audio and video that would take gigabytes to decode: the built environment's own decoders on real files."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.once import once
from support.pictures import png
from support.reference import run_reference
from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
Outcome = list[object]
GROWTH_MB = 60
"""Less than what decoding would take: 700 MB the large frames, 115 MB the long FLAC."""


def _audio_library(folder: Path) -> Path:
    """vLLM's wheel for CPU does not ask for one; without a network the tests go without it, too."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.11", "--target", str(folder)]
    wanted = ["soundfile", "cffi", "pycparser"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *wanted], check=False, timeout=300)
    return folder


@pytest.fixture(scope="module")
def outcomes(unpacked_environment: Path) -> dict[str, Outcome]:
    """What the client is told of each file, and by how many megabytes decoding grew."""
    libraries = once("audio_library", _audio_library)
    picture = png(20, 10).decode("latin-1")
    request = {
        "model": str(CHECKOUT / "model_repository" / "vllm" / "1"),
        "libraries": str(libraries) if (libraries / "soundfile.py").is_file() else "",
        "picture": picture,
    }
    answer: dict[str, Outcome] = run_reference(unpacked_environment, "clips_probe.py", request)
    return answer


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("good video", ""),
        ("many frames", "INVALID_ARG: video[0] has 36001 frames; this model takes at most 36000"),
        ("many seconds", "INVALID_ARG: video[0] has 601 seconds; this model takes at most 600"),
        (
            "many pixels",
            "INVALID_ARG: video[0] of 6144 x 3200 has 19660800 pixels in a frame; this model takes at most 18874368",
        ),
        ("no video", "INVALID_ARG: video[0] cannot be decoded: it is damaged or not a video"),
        ("a picture", "INVALID_ARG: video[0]: its header does not say how many frames it has, of what size"),
    ],
)
def test_a_video_is_measured_before_it_is_decoded(outcomes: dict[str, Outcome], name: str, said: str) -> None:
    """The client is told the number and the limit, and the process does not grow for it."""
    text, grown = outcomes[name]
    assert isinstance(grown, int)
    assert isinstance(text, str)
    assert text.startswith(said) if said else not text
    assert grown < GROWTH_MB


@pytest.mark.parametrize("kind", ["FLAC", "WAV"])
def test_an_audio_is_measured_before_it_is_decoded(outcomes: dict[str, Outcome], kind: str) -> None:
    """By vLLM, whose numbers the client is told without its advice to the operator."""
    if f"long {kind}" not in outcomes:
        pytest.skip("no soundfile to be had: vLLM has no decoder of audio here")
    assert outcomes[f"good {kind}"][0] == ""
    text, grown = outcomes[f"long {kind}"]
    assert isinstance(text, str)
    assert text.startswith("INVALID_ARG: audio[0] cannot be decoded: Audio exceeds maximum allowed duration of 600s")
    assert "601.0s" in text
    assert "VLLM" not in text
    assert isinstance(grown, int)
    assert grown < GROWTH_MB
