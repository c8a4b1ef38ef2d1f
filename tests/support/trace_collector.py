"""Takes traces in OTLP over HTTP and keeps them as they come."""

from __future__ import annotations

import gzip
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Collector:
    """What came, by the path that it was sent to."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.bodies: list[tuple[str, bytes]] = []

    def has(self, path: str, trace_id: str) -> bool:
        """Return whether a span of a trace was sent to a path, as JSON or as protobuf, which has 16 bytes for its id."""
        forms = (trace_id.encode(), bytes.fromhex(trace_id))
        return any(where == path and any(form in body for form in forms) for where, body in list(self.bodies))


@contextmanager
def trace_collector() -> Iterator[Collector]:
    """Listen until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.bodies.append((self.path, body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
