"""Check a request's media before anything is decoded or fetched: their number, size, kind and origin."""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import refuse_above
from triton_vllm.media import pictures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triton_vllm.base.limits import Limits

KINDS = {
    "image_url": "image", "input_image": "image", "audio_url": "audio", "input_audio": "audio", "video_url": "video",
}  # fmt: skip
"""The fields of a part of a message's content that hold media, and the kind of each."""
REFUSED = ("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil", "uuid")
"""These hold a program's tensors, or name an item that another request has left in a cache."""


def check_item(limits: Limits, kind: str, name: str, text: str) -> int:
    """Check one picture, audio or video in base64; return the pixels of a picture, else 0.

    Args:
        limits: the model's limits.
        kind: image, audio or video.
        name: its name in errors, such as ``image[0]``.
        text: base64, with or without a `data:…;base64,` head.

    Raises:
        InvalidRequestError: the item is too large, or a picture is not PNG, JPEG or WEBP.
    """
    body = text.partition(",")[2] if text[:5].lower() == "data:" else text
    refuse_above(
        limits.max_image_bytes if kind == "image" else limits.max_clip_bytes,
        len(body) // 4 * 3,
        f"{name} has",
        "bytes",
    )
    if kind != "image":
        if (
            "," in body
        ):  # vLLM would take it for the frames of a video, without a limit on their number
            raise InvalidRequestError(f"{name} is not valid base64")
        return 0
    if not body.isascii():
        raise InvalidRequestError(f"{name} is not valid base64")
    if any(space in body for space in "\n\r\t "):
        body = "".join(body.split())
    try:
        width, height = pictures.size(body)
    except binascii.Error:
        raise InvalidRequestError(f"{name} is not valid base64") from None
    except ValueError as error:
        raise InvalidRequestError(f"{name} cannot be decoded: it is {error}") from None
    refuse_above(
        limits.max_image_pixels, width * height, f"{name} of {width} x {height} has", "pixels"
    )
    return width * height


def check_parts(limits: Limits, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Check the contents of messages.

    Args:
        limits: the model's limits.
        messages: the messages of a conversation.

    Returns:
        The length of each picture, audio and video.

    Raises:
        InvalidRequestError: a content is neither text nor a list of parts, or a part is not allowed.
    """
    found: list[tuple[str, int, int]] = []
    count = 0
    for number, message in enumerate(messages):
        if not isinstance(message["role"], str):
            raise InvalidRequestError(f"messages[{number}].role must be a string")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise InvalidRequestError(
                f"messages[{number}].content must be a string or a list of parts"
            )
        count += len(content)
        refuse_above(limits.max_parts, count, "messages have", "parts or more")
        for place, part in enumerate(content):
            found += _part(limits, part, f"messages[{number}].content[{place}]")
    kinds = [kind for kind, _, _ in found]
    refuse_above(limits.max_images, kinds.count("image"), "messages have", "pictures")
    refuse_above(
        limits.max_clips, len(kinds) - kinds.count("image"), "messages have", "audios and videos"
    )
    refuse_above(
        limits.max_image_pixels,
        sum(pixels for _, _, pixels in found),
        "the pictures have",
        "pixels",
    )
    return [length for _, length, _ in found]


def _part(limits: Limits, part: Any, name: str) -> list[tuple[str, int, int]]:
    """Check one part; return its pictures, audios and videos, each with its length and pixels."""
    if isinstance(part, str):
        return []
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{name} must be a string or an object")
    refused = next((key for key in REFUSED if key in part or part.get("type") == key), None)
    if refused:
        raise InvalidRequestError(f"{name}: '{refused}' is not taken from a request")
    found = []
    for key in KINDS.keys() & part.keys():
        text = _text(part[key], key, f"{name}.{key}")
        pixels = 0
        if key == "input_audio" or text[:5].lower() == "data:":
            pixels = check_item(limits, KINDS[key], f"{name}.{key}", text)
        else:
            _check_remote(limits, text, f"{name}.{key}")
        found.append((KINDS[key], len(text), pixels))
    return found


def _text(value: Any, key: str, name: str) -> str:
    inner = "data" if key == "input_audio" else "url"
    found = value.get(inner) if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise InvalidRequestError(f"{name} must be a string, or an object with '{inner}'")
    return found


def _check_remote(limits: Limits, url: str, name: str) -> None:
    """Refuse an address unless the operator has named its host."""
    refusal = InvalidRequestError(
        f"{name}: nothing is fetched from there; give the content as data:…;base64,… or have the operator name the host in "
        "ALLOWED_MEDIA_DOMAINS"
    )
    # Programs disagree about the host of such an address, so the one that is checked may not be the
    # one that is asked.
    if not url.isascii() or not url.isprintable() or set(url) & set("\\@ \"'<>"):
        raise refusal
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
    except ValueError:
        raise refusal from None
    if parts.scheme not in ("http", "https") or host not in limits.allowed_media_domains:
        raise refusal
