"""Check the number, size, kind and origin of a request's media before any is decoded or fetched."""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.base.limits import refuse_above
from triton_vllm.media import pictures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triton_vllm.base.limits import Limits

KINDS = {
    "image_url": "image",
    "input_image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
"""The fields of a part of a message's content that hold media, and the kind of each."""
REFUSED = ("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil", "uuid")
"""These hold a program's tensors, or name an item that another request has left in a cache."""


class _Item(NamedTuple):
    """A picture, audio or video in a message.

    Attributes:
        kind: image, audio or video.
        length: characters of its base64 or address.
        pixels: of a picture whose data is in the message, otherwise 0.
    """

    kind: str
    length: int
    pixels: int


def is_inline(url: str) -> bool:
    """Return whether an address contains the data itself."""
    return url[:5].lower() == "data:"


def without_head(text: str) -> str:
    """Return the base64 of an item, which may have a ``data:…;base64,`` head."""
    return text.partition(",")[2] if is_inline(text) else text


def check_item(limits: Limits, kind: str, name: str, text: str) -> int:
    """Check one picture, audio or video in base64; return the pixels of a picture, else 0.

    Args:
        limits: the model's limits.
        kind: image, audio or video.
        name: its name in errors, such as ``image[0]``.
        text: base64, with or without a ``data:…;base64,`` head.

    Raises:
        InvalidRequestError: the item is too large, or a picture is not PNG, JPEG or WEBP.
    """
    body = without_head(text)
    most = limits.max_image_bytes if kind == "image" else limits.max_clip_bytes
    # Four characters of base64 are three bytes.
    refuse_above(most, len(body) // 4 * 3, f"{name} has", "bytes")
    if kind != "image":
        # vLLM would take commas for the frames of a video, without a limit on their number.
        if "," in body:
            raise _invalid(name)
        return 0
    if not body.isascii():
        raise _invalid(name)
    # MIME allows line breaks. A text without white space needs no copy.
    if any(space in body for space in "\n\r\t "):
        body = "".join(body.split())
    try:
        width, height = pictures.size(body)
    except binascii.Error:
        raise _invalid(name) from None
    except ValueError as error:
        raise InvalidRequestError(f"{name} cannot be decoded: it is {error}") from None
    pixels = width * height
    refuse_above(limits.max_image_pixels, pixels, f"{name} of {width} x {height} has", "pixels")
    return pixels


# Each error is made where it is raised. An error refers to the frame that raised it. If that frame
# also keeps the error in a variable, both stay in memory with the whole request, until the garbage
# collector runs.
def _invalid(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is not valid base64")


def check_parts(limits: Limits, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Check the contents of messages.

    Args:
        limits: the model's limits.
        messages: the messages of a conversation.

    Returns:
        The length of each picture, audio and video.

    Raises:
        InvalidRequestError: a content is neither text nor a list of parts, or has a part that is
            not allowed.
    """
    items: list[_Item] = []
    part_count = 0
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
        part_count += len(content)
        refuse_above(limits.max_parts, part_count, "messages have", "parts or more")
        for place, part in enumerate(content):
            items += _check_part(limits, part, f"messages[{number}].content[{place}]")
    picture_count = sum(item.kind == "image" for item in items)
    clip_count = len(items) - picture_count
    refuse_above(limits.max_images, picture_count, "messages have", "pictures")
    refuse_above(limits.max_clips, clip_count, "messages have", "audios and videos")
    # This limit is for all pictures of a request together.
    pixels = sum(item.pixels for item in items)
    refuse_above(limits.max_image_pixels, pixels, "the pictures have", "pixels")
    return [item.length for item in items]


def _check_part(limits: Limits, part: Any, name: str) -> list[_Item]:
    """Check one part of a message's content; return the pictures, audios and videos in it.

    Args:
        limits: the model's limits.
        part: a string, or an object.
        name: its name in errors, such as ``messages[0].content[1]``.

    Raises:
        InvalidRequestError: the part is not allowed, or a medium in it is too large.
    """
    if isinstance(part, str):
        return []
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{name} must be a string or an object")
    for key in REFUSED:
        if key in part or part.get("type") == key:
            raise InvalidRequestError(f"{name}: '{key}' is not taken from a request")
    items = []
    # The part's `type` is not trusted: every field that can hold media is checked.
    for key in KINDS.keys() & part.keys():
        text = _data_or_address(part[key], key, f"{name}.{key}")
        pixels = 0
        # OpenAI's `input_audio` has the data itself.
        if key == "input_audio" or is_inline(text):
            pixels = check_item(limits, KINDS[key], f"{name}.{key}", text)
        else:
            _check_remote(limits, text, f"{name}.{key}")
        items.append(_Item(KINDS[key], len(text), pixels))
    return items


def _data_or_address(value: Any, key: str, name: str) -> str:
    """Return the base64 or the address in a part's field ``key``; ``name`` is for errors."""
    inner = "data" if key == "input_audio" else "url"
    text = value.get(inner) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name} must be a string, or an object with '{inner}'")
    return text


def _check_remote(limits: Limits, url: str, name: str) -> None:
    """Refuse an address unless the operator has named its host."""
    if not _is_allowed(limits, url):
        raise InvalidRequestError(
            f"{name}: nothing is fetched from there; give the content as data:…;base64,… "
            "or have the operator name the host in ALLOWED_MEDIA_DOMAINS"
        )


def _is_allowed(limits: Limits, url: str) -> bool:
    """Return whether an address is on a host of ALLOWED_MEDIA_DOMAINS."""
    # Programs disagree about the host of an address with such characters, so the one that is
    # checked may not be the one that is asked.
    if not url.isascii() or not url.isprintable() or set(url) & set("\\@ \"'<>"):
        return False
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and host in limits.allowed_media_domains
