"""Decode the base64 media of a request to vLLM's ``multi_modal_data``."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base.errors import InvalidRequestError, UnsupportedError
from triton_vllm.media.checks import is_inline, without_head

if TYPE_CHECKING:
    from collections.abc import Mapping

CheckVideos = Callable[[Sequence[tuple[str, bytes]]], None]
"""Refuses videos that would cost too much to decode; each is a name for errors and a file."""
NO_DECODER = "it is damaged, or the model's environment has no decoder for it"


def decode(
    media: Mapping[str, tuple[str, ...]],
    loaders: Mapping[str, Callable[[bytes], Any]],
    check: CheckVideos,
) -> dict[str, list[Any]]:
    """Return the decoded items by kind.

    Args:
        media: base64 strings by kind, with or without a ``data:…;base64,`` head.
        loaders: the decoders of the installed vLLM.
        check: called with the videos before anything is decoded.

    Raises:
        InvalidRequestError: an item is not base64, not of its kind, or too large.
        UnsupportedError: this vLLM or its environment has no decoder for the kind.
    """
    for kind in media:
        if kind not in loaders:
            raise UnsupportedError(f"{kind}: this vLLM cannot decode it")
    files: dict[str, list[tuple[str, bytes]]] = {}
    for kind, texts in media.items():
        files[kind] = []
        for number, text in enumerate(texts):
            # The client knows an item by its kind and its position.
            name = f"{kind}[{number}]"
            files[kind].append((name, _file(name, text)))
    # All videos of a request count together, so none is decoded before all are checked.
    check(files.get("video", ()))
    return {
        kind: [_load(name, data, loaders[kind]) for name, data in items]
        for kind, items in files.items()
    }


def videos_within(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the videos inside messages, without those that vLLM must fetch.

    Args:
        messages: the messages of a conversation, as ``request`` has checked them.

    Returns:
        For each video, its name for errors and its base64 string.
    """
    videos = []
    for number, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            value = part.get("video_url") if isinstance(part, dict) else None
            url = value.get("url") if isinstance(value, dict) else value
            if isinstance(url, str) and is_inline(url):
                videos.append((f"messages[{number}].content[{place}].video_url", url))
    return videos


def check_within(videos: Sequence[tuple[str, str]], check: CheckVideos) -> None:
    """Call ``check`` with the videos that ``videos_within`` has found.

    Raises:
        InvalidRequestError: a video is not base64, or too large.
    """
    check([(name, _file(name, url)) for name, url in videos])


def _file(name: str, text: str) -> bytes:
    """Return the file in base64 text, which may have a head; ``name`` is for errors."""
    try:
        # MIME allows line breaks inside base64.
        return base64.b64decode("".join(without_head(text).split()), validate=True)
    # ValueError: the text is not ASCII. It includes binascii.Error.
    except ValueError:
        raise InvalidRequestError(f"{name} is not valid base64") from None


def _load(name: str, data: bytes, loader: Callable[[bytes], Any]) -> Any:
    """Return an item as vLLM's ``loader`` decodes its file; ``name`` is for errors.

    Raises:
        UnsupportedError: a library is missing.
        InvalidRequestError: the file is damaged, too large or not of that kind.
    """
    try:
        return loader(data)
    except ImportError:
        raise UnsupportedError(f"{name} cannot be decoded: {NO_DECODER}") from None
    # A decoder may raise anything on bytes of another kind. Its text is not for clients.
    except Exception as error:  # noqa: BLE001
        reason = vllm_api.too_large(error) or "it is damaged or not of that kind"
        raise InvalidRequestError(f"{name} cannot be decoded: {reason}") from None
