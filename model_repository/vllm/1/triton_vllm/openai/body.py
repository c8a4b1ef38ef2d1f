"""Read the body of a request within limits."""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from triton_vllm.base.document import check_integers, json_object
from triton_vllm.base.errors import InvalidRequestError, UnavailableError
from triton_vllm.base.limits import MIB, refuse_above
from triton_vllm.engine.turns import Turns
from triton_vllm.openai.interrupt import Gone
from triton_vllm.openai.refusal import HttpRefusalError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.limits import Limits
    from triton_vllm.openai.interrupt import Interrupt
    from triton_vllm.vllm_api import Facts

    Receive = Callable[[], Awaitable[Mapping[str, Any]]]

ARRIVAL_S = 60.0
"""How long the body of a request may take to arrive, s."""
# Many clients could otherwise fill the memory together, each within its own limit.
AT_ONCE = 256 * MIB
"""The most bytes of large bodies that have not been passed on."""
# uvicorn reads about as much before anybody asks for the body. 2048 connections, the most that are
# open, hold 128 MB of small bodies.
SMALL = 65_536
"""Bytes of a body that needs no room among the large ones."""
# Parsing and checking this takes about 0.2 ms at most, here and in vLLM's application.
SHORT = 4096
"""Bytes of a body that need not wait for a turn."""
VALUES = 1 << 18
"""The most values of a body, if the model does not take more tokens: parsing them takes 0.2 s."""
NAME = "the body"
_MEDIA = re.compile(rb'"(?i:data):[^"]*|"data" *: *"[^"]*')
"""Matches a picture, audio or video in JSON."""


class Room:
    """Lets large bodies in, in their order of arrival, as far as they fit.

    Args:
        most: the most bytes of all of them together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> int:
        """Wait until there is room for a body of ``size`` bytes.

        Returns:
            The bytes to give back later: ``size``, or ``most`` for a larger body, which gets all.
        """
        size = min(size, self._most)
        if not self._waiting and self._held + size <= self._most:
            self._held += size
            return size
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # It may have got its room in the same moment.
            has_room = turn.done() and not turn.cancelled()
            if has_room:
                self.give_back(size)
            else:
                turn.cancel()
                # Smaller bodies may have waited behind this one, and fit now.
                self.give_back(0)
            raise
        return size

    def give_back(self, size: int) -> None:
        """Give room back, and let those in that fit now."""
        self._held -= size
        while self._waiting:
            needed, turn = self._waiting[0]
            # Bodies that were given up are done. They need no room.
            if not turn.done():
                if self._held + needed > self._most:
                    return
                self._held += needed
                turn.set_result(None)
            self._waiting.popleft()


class Bodies:
    """Reads bodies, and counts the bytes of the large ones that are being read and checked.

    Args:
        limits: the model's limits.
        arrival_s: how long a body may take to arrive, and how long it may wait for room, s.
        at_once: the most bytes of all large bodies together. A larger body is read alone.
    """

    def __init__(
        self, limits: Limits, arrival_s: float = ARRIVAL_S, at_once: int = AT_ONCE
    ) -> None:
        self._limits = limits
        self._arrival_s = arrival_s
        # A client that does not say how much it sends may send this.
        self._largest = limits.max_request_bytes or at_once
        self._room = Room(at_once)
        # A body of the largest size takes half a second. Many that arrive together would stop the
        # event loop, so other work is done between two of them.
        self._turns = Turns()

    async def read(
        self,
        receive: Receive,
        declared: int | None,
        interrupt: Interrupt,
        until_passed_on: ExitStack,
    ) -> bytes:
        """Return the body of a request when the caller may parse it.

        Args:
            receive: returns the next message of ASGI.
            declared: the length that the client has declared. None if it has not.
            interrupt: ends a body that is too slow. The caller is in its block.
            until_passed_on: ends when the body no longer takes room.

        Raises:
            AdapterError: the body is too large, too slow, or waited too long for room.
            Gone: the client has left.
        """
        self._refuse_above(declared or 0)
        # 1) The beginning. A small body is complete then.
        pieces: list[bytes] = []
        with self._time_limit(interrupt, self._too_slow):
            more = await self._collect(receive, pieces, SMALL)
        size = sum(map(len, pieces))
        # 2) A large body waits for room before the rest of it is read.
        if size > SMALL:
            needed = max(size, declared or self._largest) if more else size
            # Meanwhile uvicorn reads no more of it.
            with self._time_limit(interrupt, self._no_room):
                taken = await self._room.take(needed)
            # If the rest does not arrive, the room is given back at once.
            with ExitStack() as unless_complete:
                unless_complete.callback(self._room.give_back, taken)
                if more:
                    with self._time_limit(interrupt, self._too_slow):
                        await self._collect(receive, pieces, math.inf)
                unless_complete.pop_all()
            # Without a declared length, it may be far smaller than the room that it got.
            kept = min(taken, sum(map(len, pieces)))
            self._room.give_back(taken - kept)
            until_passed_on.callback(self._room.give_back, kept)
        # 3) The whole
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        # Two copies of a large one are not needed.
        pieces.clear()
        if len(body) > SHORT:
            await self._turns.take()
        return body

    async def _collect(self, receive: Receive, pieces: list[bytes], enough: float) -> bool:
        """Read more pieces of a body until it has more than ``enough`` bytes or is complete.

        Args:
            receive: returns the next message of ASGI.
            pieces: what has been read. The new pieces are appended.
            enough: bytes.

        Returns:
            Whether more pieces follow.

        Raises:
            HttpRefusalError: the body is larger than a request may be.
            Gone: the client has left.
        """
        size = sum(map(len, pieces))
        while size <= enough:
            message = await receive()
            # The other type is `http.disconnect`.
            if message["type"] != "http.request":
                raise Gone
            piece = message.get("body", b"")
            pieces.append(piece)
            size += len(piece)
            self._refuse_above(size)
            if not message.get("more_body", False):
                return False
        return True

    @contextmanager
    def _time_limit(
        self, interrupt: Interrupt, make_error: Callable[[], AdapterError]
    ) -> Iterator[None]:
        """End the interrupt's block with an error if the code in this block takes too long."""
        timer = asyncio.get_running_loop().call_later(
            self._arrival_s, lambda: interrupt.end(make_error())
        )
        try:
            yield
        finally:
            timer.cancel()

    def _too_slow(self) -> AdapterError:
        return HttpRefusalError(
            HTTPStatus.REQUEST_TIMEOUT, f"{NAME} has not arrived within {self._arrival_s:.0f} s"
        )

    def _no_room(self) -> AdapterError:
        return UnavailableError(
            f"{NAME} has waited {self._arrival_s:.0f} s for other large ones: try again later"
        )

    def _refuse_above(self, size: int) -> None:
        most = self._limits.max_request_bytes
        if 0 < most < size:
            raise HttpRefusalError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"{NAME} has more than {most} bytes, the most that this model takes",
            )


def parse(limits: Limits, body: bytes, facts: Facts) -> dict[str, Any]:
    """Return the JSON object of a body.

    Args:
        limits: the model's limits.
        body: the body.
        facts: what the model can take. Without media, all of the body is text.

    Raises:
        AdapterError: the body is not such an object, or exceeds a limit.
    """
    # 1) Bound the size before parsing. Media are only copied, so they do not count. Next to texts
    # there may be `tools`, template arguments, a constraint and all other fields.
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
    # A value in JSON may have two bytes, and takes 60 in memory. A prompt may be a list of token
    # ids, each a value. Each value but the first of a list or object follows a comma. Commas in
    # texts are counted, too.
    most = max(VALUES, 2 * facts.max_tokens)
    values = sum(map(body.count, (b",", b"[", b"{")))
    refuse_above(most, values, f"{NAME} has", "values or more")
    # 2) Parse. vLLM parses the same bytes again, so nothing may have two meanings. A byte order
    # mark is not JSON.
    try:
        text_of_body = body.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{NAME} is not UTF-8") from None
    value = json_object(text_of_body, NAME, limits.max_json_depth, strict=True)
    check_integers(value, NAME)
    return value
