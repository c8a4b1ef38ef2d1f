"""``ready.sh``: with the answers of a model in each state; tests/e2e/test_kubernetes.py has a real one."""

from __future__ import annotations

import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support.manifests import KUBERNETES
from triton_vllm.base.errors import DEAD, NOT_TAKEN

SCRIPT = KUBERNETES / "probes" / "ready.sh"
REFUSED = "`parameters` has an unknown key 'not_a_parameter'"


@pytest.mark.parametrize(
    ("status", "error", "is_ready"),
    [(200, REFUSED, True), (400, REFUSED, False), (200, DEAD, False), (200, NOT_TAKEN, False)],
    ids=["refused", "Triton says no", "no engine", "given up"],
)
def test_a_model_that_takes_no_requests_is_not_ready(status: int, error: str, *, is_ready: bool) -> None:
    """The text of its refusal says so: before 26.03, Triton calls such a model ready."""

    class Server(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # as Triton's

        def do_GET(self) -> None:
            self.answer(status, "")

        def do_POST(self) -> None:
            self.answer(400, json.dumps({"error": error}))

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        argv = ["bash", SCRIPT, "vllm", str(server.server_port)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        server.shutdown()
    assert (done.returncode == 0) is is_ready, done.stderr
