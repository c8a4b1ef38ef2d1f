"""Decode base64 media of a request into what vLLM takes as multi_modal_data."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from triton_vllm.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def decode(media: Mapping[str, tuple[str, ...]], loaders: Mapping[str, Callable[[bytes], Any]]) -> dict[str, list[Any]]:
    """Return the decoded items by modality.

    Args:
        media: base64 strings by modality, with or without a `data:…;base64,` head.
        loaders: what the installed vLLM can decode.

    Raises:
        InvalidRequestError: an item is not base64 or not of its modality.
        UnsupportedError: this vLLM has no such modality.
    """
    return {name: [_item(name, i, text, loaders) for i, text in enumerate(items)] for name, items in media.items()}


def _item(name: str, index: int, text: str, loaders: Mapping[str, Callable[[bytes], Any]]) -> Any:
    if name not in loaders:
        raise UnsupportedError(f"{name}: this vLLM cannot decode it")
    body = text.partition(",")[2] if text.startswith("data:") else text
    try:
        data = base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError(f"{name}[{index}] is not valid base64") from None
    try:
        return loaders[name](data)
    except Exception:  # noqa: BLE001 - decoders raise what they like on bytes that are not theirs
        raise InvalidRequestError(f"{name}[{index}] cannot be decoded: it is damaged or not of that kind") from None
