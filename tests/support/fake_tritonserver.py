"""A program with tritonserver's options that is ready at once; for tests of what starts, watches and stops it.

What else it does is told by FAKE_TRITON, words in any order:

    orphan    starts a child in a session of its own, with no marker in its environment, that outlives it
    child     starts a child that outlives it
    deaf      does not end at SIGTERM
    fills     writes caches where a model that is warmed does
    broken    prints the lines of a load that failed and ends with 1
    never     is never ready
    stubless  starts a stub whose libraries are missing, and waits for it for ever; before that it extracts an environment
    abandoned starts a stub that says that the server has given its load up; waits for ever
    crash     aborts as tritonserver does when its stub dies at start-up; with crash-once only the first time
    taken     finds its port taken, as tritonserver says it; with taken-once only the first time
    stranger  has another name over gRPC
"""

from __future__ import annotations

import http.server
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

COMMAND = shlex.join([sys.executable, __file__])
"""What a shell script starts."""
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Ready(http.server.BaseHTTPRequestHandler):
    """Answers 200 to everything, with the server's metadata."""

    name = ""

    def do_GET(self) -> None:
        """Answers."""
        body = json.dumps({"name": self.name}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def tell_name(name: str, address: str) -> grpc.Server:
    """Start a gRPC frontend that only tells the server's metadata."""
    answer = grpc.unary_unary_rpc_method_handler(
        lambda _, __: service_pb2.ServerMetadataResponse(name=name),
        request_deserializer=service_pb2.ServerMetadataRequest.FromString,
        response_serializer=service_pb2.ServerMetadataResponse.SerializeToString,
    )
    server = grpc.server(futures.ThreadPoolExecutor(1))
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ServerMetadata": answer})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(address)
    server.start()
    return server


def fill(folder: Path) -> None:
    """Write a record, a kernel that only its owner may read, and what vLLM notes of this machine's GPUs."""
    (folder / "kernels").mkdir(mode=0o700)
    (folder / "kernels" / "one").write_text("one")
    (folder / "kernels" / "one").chmod(0o600)
    (folder / "gpu_p2p_access_cache_for_0,1.json").write_text("{}")
    (folder / "warm.json").write_text("new")


def launcher(folder: Path) -> Path:
    """Make a launcher like that of the provisioned Triton, a shell script that becomes the program; return its path."""
    path = folder / "tritonserver"
    path.write_text(f'#!/bin/sh\nexec {COMMAND} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def leave_files(backend_config: str) -> None:
    """Write the files that tritonserver and its stubs leave, if it is told how to name its shared memory."""
    if backend_config:
        prefix = backend_config.rpartition("=")[2]
        Path("/dev/shm", f"{prefix}region").write_text("left")
        Path(os.environ["TMPDIR"], "socket").write_text("left")


def serve(options: dict[str, str], grpc_name: str) -> None:
    """Tell the server's name over HTTP, and ``grpc_name`` over gRPC, until a signal comes."""
    frontend = tell_name(grpc_name, f"{options['grpc-address']}:{options['grpc-port']}")
    Ready.name = options["id"]
    http.server.HTTPServer((options["http-address"], int(options["http-port"])), Ready).serve_forever()
    frontend.stop(None)


STUBS = {
    "stubless": "echo stub: error while loading shared libraries: libx.so; exit 127",
    "abandoned": "echo the server has given this load up; exit 1",
}


def wait_for_stub(word: str) -> None:
    """Start a stub that ends, and wait for it for ever."""
    if word == "stubless":
        Path("/tmp", os.environ["FAKE_EXTRACTED"]).mkdir()
    stub = subprocess.Popen(["sh", "-c", STUBS[word]])
    signal.pause()
    stub.wait()


def main() -> None:
    """Do what it is told, then serve."""
    words = os.environ.get("FAKE_TRITON", "").split()
    options = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if argument.startswith("--"))
    if "fills" in words:
        fill(Path(os.environ["TRITON_VLLM_WARM"]))
    if "broken" in words:
        print("I1120 10:00:00.000000 1 model_lifecycle.cc:472] loading: vllm:1")
        reason = r"Internal: ConfigError: model.json: \"model\" is missing\n\nAt:\n  /1/model.py(3): initialize\n"
        print(f'E1120 10:00:00.000000 1 backend_model.cc:692] "ERROR: Failed to create instance: {reason[10:]}"')
        print(f"""E1120 10:00:00.000000 1 model_lifecycle.cc:642] "failed to load 'vllm' version 1: {reason}\"""", flush=True)
        print("error: creating server: Internal - failed to load all models", flush=True)
        sys.exit(1)
    log = Path("/proc/self/fd/1").readlink()
    if "crash" in words or ("crash-once" in words and "lock_exception" not in log.read_text()):
        print("  what():  boost::interprocess::lock_exception", flush=True)
        os.abort()
    if "taken" in words or ("taken-once" in words and "already in use" not in log.read_text()):
        print(f"failed to start HTTP service: Unavailable - Socket '127.0.0.1:{options['http-port']}' already in use", flush=True)
        sys.exit(1)
    leave_files(options.get("backend-config", ""))
    if "child" in words:
        subprocess.Popen(SLEEP)
    if "orphan" in words:
        unmarked = {name: value for name, value in os.environ.items() if name != "TRITON_VLLM_SERVER_ID"}
        subprocess.Popen(SLEEP, start_new_session=True, env=unmarked)
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(json.dumps(options), flush=True)
    for word in STUBS.keys() & set(words):
        wait_for_stub(word)
    if "never" in words:
        signal.pause()
    serve(options, "another" if "stranger" in words else options["id"])


if __name__ == "__main__":
    main()
