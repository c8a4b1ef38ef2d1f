"""Pictures that ruin, on a model that takes pictures: each is refused by its first bytes, and nothing is fetched."""

from __future__ import annotations

import base64
import json
import socketserver
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from hostile.corpus import PICTURES, REACHES, Case
from support.model_requests import ask
from support.triton_client import stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_env.serve.server import TritonServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TEXT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
FOR_TEXTS = "takes texts only"


@pytest.fixture(scope="module")
def website() -> Iterator[tuple[int, list[Any]]]:
    """A port of this machine, and who has called there."""
    callers: list[Any] = []

    def note(_: Any, address: Any, __: Any) -> Any:
        callers.append(address)

    with socketserver.TCPServer(("127.0.0.1", 0), note) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], callers
        server.shutdown()


def whole_png(side: int) -> str:
    """Return a picture that can be decoded, of one colour."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(side + 1) * side)),
        (b"IEND", b""),
    ]
    chunks = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


@pytest.mark.parametrize("case", [c for c in (*PICTURES, *REACHES) if FOR_TEXTS not in c.expected], ids=lambda case: case.name)
def test_a_picture_that_ruins_is_refused(vision_server: TritonServer, case: Case) -> None:
    """In the same words as by a model of texts; the neighbour's picture is looked at."""
    small = {"text_input": TEXT, "sampling_parameters": json.dumps(GREEDY), "image": whole_png(60)}
    responses = stream(vision_server.grpc_url, [small, case.make(), small], timeout=120)
    (error,) = [response.error for response in responses if response.error]
    assert case.expected in error
    texts = [response.text() for response in responses if response.text()]
    assert len(texts) == 2
    assert len(set(texts)) == 1


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
def test_nobody_is_called(vision_server: TritonServer, website: tuple[int, list[Any]], kind: str) -> None:
    """A place in a request is refused, and not looked at."""
    port, callers = website
    messages = [{"role": "user", "content": [{"type": kind, kind: {"url": f"http://127.0.0.1:{port}/a.png"}}]}]
    assert "nothing is fetched from there" in ask(vision_server, None, GREEDY, messages=json.dumps(messages)).error
    assert callers == []


@pytest.mark.parametrize(("side", "says"), [(13_300, "has 176890000 pixels"), (5_000, "")])
def test_a_small_file_of_many_pixels(vision_server: TritonServer, side: int, says: str) -> None:
    """What a decoder would make half a gigabyte of; one within the limit is looked at."""
    answer = ask(vision_server, TEXT, GREEDY, image=whole_png(side))
    assert says in answer.error
    assert bool(answer.error) is bool(says)
