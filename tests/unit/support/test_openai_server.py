"""Kept answers of vLLM's server are those to the same requests in the same order; the server is started only for others."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support import openai_server as module


class Server(ThreadingHTTPServer):
    """One that keeps the bodies of its requests."""

    bodies: list[bytes]


class Numbering(BaseHTTPRequestHandler):
    """Answers a request with its number since the server was started, and refuses one for ``/no``."""

    server: Server

    def do_POST(self):
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        answer = str(len(self.server.bodies)).encode()
        self.send_response(400 if self.path == "/no" else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Return the requests of each server that was started."""
    servers = []

    @contextmanager
    def numbering(*_):
        with Server(("127.0.0.1", 0), Numbering) as server:
            server.bodies = []
            servers.append(server.bodies)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()

    monkeypatch.setattr(module, "openai_server", numbering)
    monkeypatch.setenv("VLLM_ENV_TEST_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("VLLM_ENV_TEST_RUN", str(tmp_path))
    monkeypatch.delenv("VLLM_ENV_TEST_FRESH", raising=False)
    (tmp_path / "model").mkdir()
    return servers


def ask(folder, *requests, forget=0):
    """Return the answers that one run gets."""
    with module.kept_server(folder / "env", {"model": str(folder / "model")}, folder / "log") as server:
        answers = [server.ask(path, {"text": text}) for path, text in requests]
        server.forget(forget)
        return answers


def test_the_server_is_started_for_what_is_not_kept(started, tmp_path):
    """It is asked what came before, too: its answer may depend on that."""
    first, again, other = ("/a", "x"), ("/a", "x"), ("/a", "y")
    assert ask(tmp_path, first, again) == ["1", "2"]
    assert ask(tmp_path, first, again) == ["1", "2"]
    assert len(started) == 1
    assert ask(tmp_path, first, again, other) == ["1", "2", "3"]
    assert [[json.loads(body)["text"] for body in bodies] for bodies in started] == [["x", "x"], ["x", "x", "y"]]
    assert ask(tmp_path, other) == ["1"]
    assert len(started) == 3


def test_what_is_forgotten_is_asked_again(started, tmp_path):
    """The last answers only."""
    requests = [("/a", "x"), ("/a", "y")]
    ask(tmp_path, *requests, forget=1)
    assert len(list(tmp_path.glob("data/references/*.json"))) == 1
    assert ask(tmp_path, *requests) == ["1", "2"]
    assert len(started) == 2


def test_a_refusal_is_not_kept(started, tmp_path):
    """It fails each time."""
    for number in (1, 2):
        with pytest.raises(AssertionError, match="1"):
            ask(tmp_path, ("/no", "x"))
        assert len(started) == number
