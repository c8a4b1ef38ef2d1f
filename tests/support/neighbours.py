"""Clients that stream all the time, one on each API, and how long they wait for the next event."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from support.clock import now
from support.model_requests import prompt
from support.open_stream import OpenStream
from support.patience import wait_for
from support.settings import openai_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_env.serve.server import TritonServer

STREAMED = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
REPLY_SECONDS = 300.0


class Neighbour:
    """Sends one request after the other in a thread of its own, and notes when something came.

    Args:
        send: sends a request, and calls its argument for each event. Returns what was wrong, or nothing.
    """

    def __init__(self, send: Callable[[Callable[[], None]], str]) -> None:
        self.errors: list[str] = []
        self.answers = 0
        self._send = send
        self._times = [now()]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Return once the last request has been answered."""
        self._ends.set()
        self._thread.join(REPLY_SECONDS)
        assert not self._thread.is_alive(), "a neighbour waits for ever"

    def longest(self, since: float, until: float) -> float:
        """Return the longest wait that was not over at ``since``, and had begun at ``until``; the last one must be over."""
        wait_for(lambda: self._times[-1] > until or not self._thread.is_alive(), "a neighbour's next event")
        times = [*self._times]
        return max(b - a for a, b in itertools.pairwise(times) if b > since and a < until)

    def _note(self) -> None:
        self._times.append(now())

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                error = self._send(self._note)
            except (OSError, http.client.HTTPException) as raised:
                error = repr(raised)
            self._note()
            if error:
                self.errors.append(error)
                return
            self.answers += 1


def neighbours(server: TritonServer, text: str) -> tuple[Neighbour, Neighbour]:
    """Return one that asks the OpenAI port, and one that asks Triton."""
    url = openai_url(server)

    def over_http(note: Callable[[], None]) -> str:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=REPLY_SECONDS)
        try:
            body = json.dumps({"model": "vllm", "prompt": text, "stream": True, **STREAMED})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            last = ""
            for line in answer:
                if line.startswith(b"data: "):
                    note()
                    last = line.decode().strip()
        finally:
            connection.close()
        return "" if (answer.status, last) == (200, "data: [DONE]") else f"{answer.status} {last}"

    def over_grpc(note: Callable[[], None]) -> str:
        with Noted(server.grpc_url, prompt(text, STREAMED, stream=True), note) as stream:
            return stream.wait_end(REPLY_SECONDS).error

    return Neighbour(over_http), Neighbour(over_grpc)


class Noted(OpenStream):
    """Calls a function for each event."""

    def __init__(self, url: str, tensors: dict[str, Any], note: Callable[[], None]) -> None:
        super().__init__(url, tensors)
        self._note = note

    def _take(self, result: Any, error: Any) -> None:
        self._note()
        super()._take(result, error)
