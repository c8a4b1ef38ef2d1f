"""A streamed HTTP answer that a test can meet in the middle."""

from __future__ import annotations

import http.client
import json
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from support.patience import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping


class EventStream:
    """Sends a request and takes the events of its answer in a thread of its own; a context manager that hangs up at its end."""

    def __init__(self, url: str, path: str, body: Mapping[str, Any]) -> None:
        self.status = 0
        self.events: list[Any] = []
        self.ended = False
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        self._connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> EventStream:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection.sock is not None:
            self._connection.sock.close()
        self._connection.close()

    def wait(self, count: int) -> None:
        """Return once there are so many events."""
        wait_for(lambda: len(self.events) >= count or self.ended, f"{count} events")
        assert len(self.events) >= count, self.events

    def wait_end(self) -> list[Any]:
        """Return all events, once the answer has ended: JSON, or a text that is none."""
        wait_for(lambda: self.ended, "the end of a stream")
        return self.events

    def error(self) -> str:
        """Return the message of the error event with which the answer ends."""
        events = [event for event in self.wait_end() if event != "[DONE]"]
        return str(events[-1]["error"]["message"])

    def _read(self) -> None:
        try:
            answer = self._connection.getresponse()
            self.status = answer.status
            for line in answer:
                name, _, data = line.decode().strip().partition(": ")
                if name == "data":
                    self.events.append(json.loads(data) if data.startswith("{") else data)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self.events.append(f"{type(error).__name__}: {error}")
        finally:
            self.ended = True
