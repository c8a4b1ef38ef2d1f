"""The kinds of servers, each with the client that asks it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from loadtest.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadtest.endpoint import Backend, Endpoint


def client_for(backend: str) -> Callable[[Endpoint], Backend]:
    """Return the client class for a kind of server.

    Args:
        backend: ``triton`` or ``openai``.

    Raises:
        ImportError: tritonclient is missing.
        InputError: aiohttp is missing.
    """
    # Late, because a user of one kind needs nothing for the other.
    if backend == "triton":
        from loadtest.triton import TritonClient

        return TritonClient
    try:
        from loadtest.openai import OpenAIClient
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise InputError(
            f"{sys.executable} cannot import aiohttp, which asks OpenAI servers; "
            f"{sys.executable} -m pip install aiohttp"
        ) from error
    return OpenAIClient
