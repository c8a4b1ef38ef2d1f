"""Pictures and recordings for the rows of ``gpu_matrix.py``, and what must be true of answers."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import urllib.request
import wave
import zlib
from typing import TYPE_CHECKING, Any

from harness.matrix_ask import GREEDY, REQUEST_LIMIT_S, WrongAnswerError, generate, post

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.matrix_ask import Served

# The text of each request. Only the picture or the recording differs.
_TEXTS = {
    "image": "w5 w6 <|vision_start|><|image_pad|><|vision_end|> w7 w8",
    "audio": "<|startoftranscript|><|en|><|transcribe|><|notimestamps|> w5 w6 w7 w8",
}
# 112 pixels are 8 x 8 patches: 16 tokens.
_SIDE = 112
# No decoder must resample it.
_RATE = 16000
_RECORDING_S = 10


def _chunk(name: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG: its length, name, content and checksum."""
    ends = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + ends


def picture(seed: int) -> bytes:
    """Return a PNG of coloured noise."""
    source = random.Random(seed)
    # Each line of pixels begins with the number of its filter: 0, none.
    lines = b"".join(b"\0" + source.randbytes(3 * _SIDE) for _ in range(_SIDE))
    # Width, height, 8 bits for each of three colours (2), and the defaults.
    head = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def recording(seed: int) -> bytes:
    """Return a WAV with ``_RECORDING_S`` seconds of a tone, another one for each seed.

    The model hears 30 s. Recordings of noise of one second had the same answer.
    """
    # In samples. The wave is square: high for half of a period, then low.
    period = 16 * 3**seed
    tone = [12000 if index < period // 2 else -12000 for index in range(period)]
    samples = struct.pack(f"<{period}h", *tone) * (_RECORDING_S * _RATE // period)
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(_RATE)
        sound.writeframes(samples)
    return file.getvalue()


_MAKERS: dict[str, Callable[[int], bytes]] = {"image": picture, "audio": recording}


def questions(kind: str) -> list[dict[str, str]]:
    """Return the requests of a row, which the engine in process gets, too.

    Each has a ``text``, and a picture or a recording in base64 under the key ``kind``.

    Args:
        kind: ``image`` or ``audio``, which are also names of tensors.
    """
    made = (base64.b64encode(_MAKERS[kind](seed)).decode() for seed in range(1, 4))
    return [{"text": _TEXTS[kind], kind: item} for item in made]


def _body(question: Mapping[str, str], kind: str) -> dict[str, Any]:
    """Return a request of ``questions`` with the names of Triton's tensors."""
    return {"text_input": question["text"], kind: [question[kind]]}


def streamed(url: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send a request, and return the events of the answer (server-sent events with JSON).

    Raises:
        WrongAnswerError: it refuses, or does not answer.
    """
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as answer:
            lines = answer.read().decode().splitlines()
    except OSError as error:
        raise WrongAnswerError(f"{url} does not answer: {error}") from error
    events = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    return [json.loads(event) for event in events if event != "[DONE]"]


def _over_triton(served: Served, question: Mapping[str, str], kind: str) -> tuple[str, str]:
    """Return Triton's whole answer to a request of ``questions``, and its streamed one."""
    body = {
        **_body(question, kind),
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps(GREEDY),
    }
    whole = generate(served, body)["text_output"]
    url = f"http://127.0.0.1:{served.http}/v2/models/{served.model}/generate_stream"
    return whole, "".join(event["text_output"] for event in streamed(url, {**body, "stream": True}))


def _over_port(served: Served, question: Mapping[str, str]) -> tuple[str, str]:
    """Return the OpenAI port's whole answer about a picture, and its streamed one."""
    url = f"http://127.0.0.1:{served.openai}/v1/chat/completions"
    content = [
        {"type": "text", "text": "w5 w6 "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{question['image']}"}},
        {"type": "text", "text": " w7 w8"},
    ]
    body = {"model": served.model, "messages": [{"role": "user", "content": content}], **GREEDY}
    whole = post(url, body)["choices"][0]["message"]["content"]
    pieces = [event["choices"][0]["delta"] for event in streamed(url, {**body, "stream": True})]
    return whole, "".join(piece.get("content") or "" for piece in pieces)


def check_media(served: Served, kind: str) -> None:
    """Ask about each item whole and streamed, over Triton and, for pictures, the OpenAI port.

    The port has no path for recordings.

    Raises:
        WrongAnswerError: a stream differs from the whole answer, or two pictures have one answer.
    """
    asked = questions(kind)
    answers = {"triton": [_over_triton(served, one, kind) for one in asked]}
    if kind == "image":
        answers["openai"] = [_over_port(served, one) for one in asked]
    for front_end, pairs in answers.items():
        for index, (whole, pieces) in enumerate(pairs):
            if not whole or whole.strip() != pieces.strip():
                raise WrongAnswerError(
                    f"{front_end}: {kind} {index} gets {whole!r} whole, and {pieces!r} streamed"
                )
        # Recordings may have one answer. ``media_logprobs`` checks that their numbers differ.
        if kind == "image" and len(set(pairs)) < len(pairs):
            raise WrongAnswerError(f"{front_end}: different items get one answer: {pairs}")


def media_logprobs(served: Served, kind: str) -> list[list[float]]:
    """Return the log probabilities of each prompt's own tokens, if it is asked with its item.

    An item is a picture or a recording. As only the items differ, so must the log probabilities.

    Raises:
        WrongAnswerError: two items have the same ones.
    """
    parameters = json.dumps({"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0})
    found = []
    for one in questions(kind):
        body = {
            **_body(one, kind),
            "sampling_parameters": parameters,
            "return_prompt_logprobs": True,
        }
        answer: Sequence[Any] = json.loads(generate(served, body)["prompt_logprobs"])
        # The first token has no log probability. The entry of each other one has only its own.
        found.append([next(iter(entry.values()))["logprob"] for entry in answer if entry])
    if len(set(map(tuple, found))) < len(found):
        raise WrongAnswerError(f"different items get the same log probabilities: {found}")
    return found
