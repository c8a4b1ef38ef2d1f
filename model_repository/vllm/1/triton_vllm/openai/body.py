"""Read the body of a request within limits."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from triton_vllm.base.document import check_integers, json_object
from triton_vllm.base.errors import InvalidRequestError, UnavailableError
from triton_vllm.base.limits import MIB, refuse_above
from triton_vllm.engine.turns import Turns
from triton_vllm.openai.refusal import HttpRefusalError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from triton_vllm.base.limits import Limits
    from triton_vllm.vllm_api import Facts

    Receive = Callable[[], Awaitable[Mapping[str, Any]]]

ARRIVAL_S = 60.0
"""How long the body of a request may take to arrive, s."""
# Many clients could otherwise fill the memory together, each within its own limit.
AT_ONCE = 256 * MIB
"""The most bytes of bodies that have not been passed on."""
# Parsing and checking this takes about 5 ms, here and in vLLM's application.
SMALL = 65_536
"""Bytes of a body that need not wait for a turn."""
VALUES = 1 << 18
"""The most values of a body, if the model does not take more tokens: parsing them takes 0.2 s."""
NAME = "the body"
_MEDIA = re.compile(rb'"(?i:data):[^"]*|"data" *: *"[^"]*')
"""Matches a picture, audio or video in JSON."""


class Gone(Exception):  # noqa: N818 - nobody gets it as an error
    """The client has gone before its request was complete."""


class Bodies:
    """Reads bodies, and counts the bytes of all that are being read and checked.

    Args:
        limits: the model's limits.
        arrival_s: how long a body may take to arrive, s.
        at_once: the most bytes of all bodies together.
    """

    def __init__(
        self, limits: Limits, arrival_s: float = ARRIVAL_S, at_once: int = AT_ONCE
    ) -> None:
        self._limits = limits
        self._arrival_s = arrival_s
        self._at_once = at_once
        self._held = 0
        # A body of the largest size takes half a second. Many that arrive together would stop the
        # event loop, so other work is done between two of them.
        self._turns = Turns()

    @asynccontextmanager
    async def read(self, receive: Receive, declared: int | None) -> AsyncIterator[bytes]:
        """Yield the body of a request when the caller may parse it; it counts until the block ends.

        Args:
            receive: returns the next message of ASGI.
            declared: the length that the client has declared. None if it has not.

        Raises:
            AdapterError: the body is too large, too slow, or there is no room for it.
            Gone: the client has gone.
        """
        self._refuse_above(declared or 0)
        pieces: list[bytes] = []
        size = 0
        try:
            try:
                await self._arrive(receive, pieces)
            finally:
                size = sum(map(len, pieces))
            if size > SMALL:
                await self._turns.take()
            # This frame lives as long as the block, so it keeps no reference to the body.
            yield _joined(pieces)
        finally:
            self._held -= size

    async def _arrive(self, receive: Receive, pieces: list[bytes]) -> None:
        try:
            await asyncio.wait_for(self._collect(receive, pieces), self._arrival_s)
        # Python 3.10 has another class than its own TimeoutError.
        except asyncio.TimeoutError:
            raise HttpRefusalError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"{NAME} has not arrived within {self._arrival_s:.0f} s",
            ) from None

    async def _collect(self, receive: Receive, pieces: list[bytes]) -> None:
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise Gone
            piece = message.get("body", b"")
            pieces.append(piece)
            self._held += len(piece)
            size += len(piece)
            self._refuse_above(size)
            if self._held > self._at_once:
                raise UnavailableError("the server is reading too much: try again later")
            more = message.get("more_body", False)

    def _refuse_above(self, size: int) -> None:
        most = self._limits.max_request_bytes
        if 0 < most < size:
            raise HttpRefusalError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"{NAME} has more than {most} bytes, the most that this model takes",
            )


def _joined(pieces: list[bytes]) -> bytes:
    """Return the pieces as one, and remove them from the list."""
    body = b"".join(pieces)
    pieces.clear()
    return body


def parse(limits: Limits, body: bytes, facts: Facts) -> dict[str, Any]:
    """Return the JSON object of a body.

    Args:
        limits: the model's limits.
        body: the body.
        facts: what the model can take. Without media, all of the body is text.

    Raises:
        AdapterError: the body is not such an object, or exceeds a limit.
    """
    # 1) Bound the size before parsing. Media are only copied.
    most = limits.max_text_bytes + 4 * limits.max_parameter_bytes
    if limits.max_text_bytes and len(body) > most:
        media = sum(map(len, _MEDIA.findall(body))) if facts.multimodal else 0
        text = len(body) - media
        if text > most:
            raise HttpRefusalError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"{NAME} has {text} bytes without pictures, audios and videos; "
                f"this model takes at most {most}",
            )
    # A value in JSON may have two bytes, and takes 60 in memory. Commas in texts are counted, too.
    most = max(VALUES, 2 * facts.max_tokens)
    refuse_above(most, sum(map(body.count, (b",", b"[", b"{"))), f"{NAME} has", "values or more")
    # 2) Parse. A byte order mark is not JSON.
    try:
        text_of_body = body.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{NAME} is not UTF-8") from None
    value = json_object(text_of_body, NAME, limits.max_json_depth)
    check_integers(value, NAME)
    return value


def written(value: Mapping[str, Any]) -> bytes:
    """Return a checked body as JSON.

    Raises:
        InvalidRequestError: a number is too large.
    """
    # vLLM's parser may read the client's text in another way, such as a name that is there twice.
    # So it gets the checked values, written again.
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        raise InvalidRequestError(f"{NAME} has a number that is too large") from None
