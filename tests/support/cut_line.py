"""A line to a server that a test can cut: the server's end sees a connection that is closed, as when a client dies."""

from __future__ import annotations

import contextlib
import select
import socket
import threading


class CutLine:
    """Listens on a free port of this machine and passes one connection's bytes on, both ways; a context manager.

    Args:
        port: the server's, on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = [self._listening]
        self._thread = threading.Thread(target=self._pass_on, name="cut-line", daemon=True)

    def __enter__(self) -> CutLine:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._thread.join()
        for end in self._ends:
            end.close()

    @property
    def url(self) -> str:
        """``127.0.0.1:PORT`` of the line's near end."""
        host, port = self._listening.getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        """Close both ends at once."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass_on(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._listening.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            self._ends += [near, far]
            other = {near: far, far: near}
            while True:
                for end in select.select([near, far], [], [])[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    other[end].sendall(data)
