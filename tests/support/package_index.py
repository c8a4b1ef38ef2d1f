"""Package indexes on 127.0.0.1, good and bad ones."""

from __future__ import annotations

import contextlib
import html
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote

from vllm_env.base.filesystem import file_sha256

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass
class PackageIndex:
    """An index of the wheels in a folder.

    Attributes:
        folder: the wheels.
        status: the status of every answer.
        file_status: the status of every wheel.
        page: the content of every page, if it is not a list of files.
        announced: digests that the pages name in place of the files' own; "" for none.
        cut: bytes that are missing at the end of every wheel.
        is_interrupted: whether the wheel's own length is announced nevertheless.
        requests: the paths that were asked for.
    """

    folder: Path
    status: int = 200
    file_status: int = 200
    page: str = ""
    announced: dict[str, str] = field(default_factory=dict)
    cut: int = 0
    is_interrupted: bool = False
    requests: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, content type and content for a path."""
        kind, _, name = unquote(path).strip("/").partition("/")
        if self.status != 200:
            return self.status, "text/plain", b"refused"
        if kind == "files" and self.file_status != 200:
            return self.file_status, "text/plain", b"refused"
        if kind == "files":
            data = (self.folder / name).read_bytes()
            return 200, "application/octet-stream", data[: len(data) - self.cut]
        if self.page:
            return 200, "text/html", self.page.encode()
        files = sorted(self.folder.glob(f"{name.replace('-', '_')}-*.whl"))
        if not files:
            return 404, "text/plain", b"no such project"
        return 200, "text/html", "".join(["<!DOCTYPE html><body>", *map(self._link, files)]).encode()

    def _link(self, file: Path) -> str:
        digest = self.announced.get(file.name, file_sha256(file))
        fragment = f"#sha256={digest}" if digest else ""
        return f'<a href="../../files/{html.escape(file.name)}{fragment}">{file.name}</a>\n'


@contextlib.contextmanager
def serving(index: PackageIndex) -> Iterator[str]:
    """Serve an index; yield the URL of its pages."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.requests.append(self.path)
            status, kind, data = index.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            missing = index.cut if index.is_interrupted and kind == "application/octet-stream" else 0
            self.send_header("Content-Length", str(len(data) + missing))
            # As registries say of their wheels: a program's cache must not keep a bad one.
            if kind == "application/octet-stream":
                self.send_header("Cache-Control", "max-age=365000000, immutable, public")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_HEAD = do_GET  # noqa: N815 - the standard library's name

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()
