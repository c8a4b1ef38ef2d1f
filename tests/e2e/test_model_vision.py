"""Pictures: base64 in `image`, on a tiny BLIP-2 made for the test."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from support.model_requests import Answer, ask
from support.videos import avi

if TYPE_CHECKING:
    from vllm_env.serve.server import TritonServer

pytestmark = pytest.mark.e2e
TEXT = "The capital of France is"
QUERIES = 8  # tokens that a picture becomes in this model
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
RED, BLUE = (220, 20, 20), (20, 20, 220)


def png(color: tuple[int, int, int], side: int = 60) -> str:
    """Returns a picture of one colour: a PNG file in base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes(color) * side) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def look(server: TritonServer, image: Any, **tensors: Any) -> Answer:
    """Asks about a picture."""
    flags = {"return_num_input_tokens": True, "return_token_ids": True, "return_logprobs": True}
    return ask(server, TEXT, {**GREEDY, "logprobs": 1}, image=image, **flags, **tensors)


def test_a_picture_is_part_of_the_prompt(vision_server: TritonServer) -> None:
    """It adds its tokens and changes the answer; the text still comes back before a whole answer."""
    bare = ask(vision_server, TEXT, GREEDY, return_num_input_tokens=True, return_token_ids=True)
    red = look(vision_server, png(RED))
    assert not red.error
    assert red.values("num_input_tokens")[0][0] == bare.values("num_input_tokens")[0][0] + QUERIES
    assert red.text.startswith(TEXT)
    assert red.token_ids() != bare.token_ids()


def test_two_pictures_two_answers(vision_server: TritonServer) -> None:
    """Each picture has an answer of its own, the same every time, streamed or not, with or without a data URL's head."""
    red, blue = (look(vision_server, png(color)) for color in (RED, BLUE))
    assert _first(red) != _first(blue)
    again = look(vision_server, "data:image/png;base64," + png(RED), stream=True)
    assert again.token_ids() == red.token_ids()


def _first(answer: Answer) -> dict[str, float]:
    """The log probabilities of the first token: the picture changes them even where it does not change the choice."""
    (entry,) = json.loads(answer.values("logprobs")[0][0])[:1]
    return {token: round(value["logprob"], 3) for token, value in entry.items()}


@pytest.mark.parametrize(
    ("image", "text"),
    [
        ("not base64!", "image[0] is not valid base64"),
        (base64.b64encode(b"GIF89a and then nothing").decode(), "image[0] cannot be decoded"),
        (png(RED)[:60], "image[0]"),
        ([png(RED), png(BLUE)], "image"),
    ],
    ids=["no base64", "no picture", "half a picture", "one too many"],
)
def test_bad_pictures(vision_server: TritonServer, image: Any, text: str) -> None:
    """The error names the picture by its place, and the next request is served."""
    failed = look(vision_server, image)
    assert text in failed.error
    assert ".py" not in failed.error
    assert look(vision_server, png(BLUE)).token_ids()


LONG, LARGE = avi(64, 48, 120, 36_001), avi(6000, 4000, 30, 3)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (LONG, "has 36001 frames; this model takes at most 36000"),
        (LARGE, "of 6000 x 4000 has 24000000 pixels in a frame; this model takes at most 18874368"),
    ],
    ids=["long", "large"],
)
def test_videos_are_measured_by_their_headers(vision_server: TritonServer, file: bytes, says: str) -> None:
    """Given as a tensor or within messages, before vLLM decodes them; the next request is served."""
    text = base64.b64encode(file).decode()
    assert f"video[0] {says}" in ask(vision_server, TEXT, GREEDY, video=text).error
    content = [{"type": "video_url", "video_url": {"url": "data:video/avi;base64," + text}}]
    said = ask(vision_server, None, GREEDY, messages=json.dumps([{"role": "user", "content": content}])).error
    assert f"messages[0].content[0].video_url {says}" in said
    assert look(vision_server, png(BLUE)).token_ids()


def test_vllm_is_told_to_follow_no_redirect(vision_server: TritonServer) -> None:
    """A host that the operator has named could send it on to any other; the model's processes have the variable from it."""
    ask(vision_server, TEXT, {**GREEDY, "structured_outputs": {"regex": "a"}})  # starts the process that tries constraints
    (worker,) = [one for one in vision_server.members() if any(part.endswith("trial_process.py") for part in one.cmdline())]
    assert worker.environ()["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


def test_audio_without_a_decoder_is_unsupported(vision_server: TritonServer) -> None:
    """vLLM's wheel for CPU does not ask for the libraries: the sound is not damaged."""
    assert "the model's environment has no decoder for it" in ask(vision_server, TEXT, GREEDY, audio="AAAA").error
