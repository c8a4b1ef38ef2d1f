"""What a GPU host is to show beside speed: answers, metrics and cancellation under the real tritonserver.

    python3 benchmarks/device_checks.py --environment ENV --triton-root ROOT --device gpu [--tensor-parallel-size 2]

Writes what was seen to `--out` (markdown and JSON) and exits 1 if anything is missing.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tritonclient.grpc as grpcclient

from harness import machine
from harness.load import Load
from harness.servers import Setting, set_parameter
from harness.shapes import MARK, SHAPES, Shape, write_checkpoint
from harness.targets import TritonTarget

if TYPE_CHECKING:
    from collections.abc import Callable

_CPU = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
_GPU = {"dtype": "float16", "max_model_len": 2048, "gpu_memory_utilization": 0.5}


class ChecksFailedError(Exception):
    """Something that should be seen was not."""


class MetricsTriton(TritonTarget):
    """The server with this model's metrics switched on."""

    def prepare(self) -> Path:
        """Place the model and switch its metrics on."""
        store = super().prepare()
        set_parameter(store / self.model / "config.pbtxt", "REPORT_CUSTOM_METRICS", "yes")
        return store

    def families(self) -> dict[str, float]:
        """Return the sum over labels of every `vllm:` sample."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=5) as reply:
            text = reply.read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("vllm:"):
                name, value = line.split("{", 1)[0], float(line.rsplit(" ", 1)[1])
                found[name] = found.get(name, 0.0) + value
        return found


class Stream:
    """One gRPC stream that can be cancelled."""

    def __init__(self, port: int, prompt: str, tokens: int) -> None:
        self.replies: queue.Queue[tuple[float, Any, Any]] = queue.Queue()
        self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{port}")
        self._client.start_stream(lambda result, error: self.replies.put((time.monotonic(), result, error)))
        sampling = json.dumps({"max_tokens": tokens, "ignore_eos": True, "temperature": 0})
        inputs = []
        for name, value, kind in (
            ("text_input", prompt.encode(), "BYTES"),
            ("sampling_parameters", sampling.encode(), "BYTES"),
            ("stream", True, "BOOL"),
            ("exclude_input_in_output", True, "BOOL"),
        ):
            tensor = grpcclient.InferInput(name, [1], kind)
            tensor.set_data_from_numpy(np.array([value], dtype=np.object_ if kind == "BYTES" else np.bool_))
            inputs.append(tensor)
        self._client.async_stream_infer("vllm", inputs, request_id="1", enable_empty_final_response=True)

    def cancel(self) -> None:
        """Cancel what is in flight and close."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def check_answers(server: MetricsTriton, shape: Shape) -> list[str]:
    """Ask whole and streamed answers; the load checks the count of tokens of each."""
    seen = []
    for stream in (False, True):
        for tokens, in_flight in ((1, 1), (64, 8)):
            load = Load(in_flight, 2 * in_flight, 32, tokens, stream, shape.vocabulary, seed=tokens)
            pieces = server.measure(load).pieces_per_answer
            mode = "streaming" if stream else "whole"
            seen.append(f"{2 * in_flight} {mode} answers of exactly {tokens} tokens in {pieces:.1f} pieces each")
    return seen


def check_greedy(server: MetricsTriton, _shape: Shape) -> list[str]:
    """Ask the same prompt twice at temperature 0."""
    texts = []
    for _ in range(2):
        stream = Stream(server.grpc, f"{MARK}5 {MARK}6 {MARK}7", 16)
        texts.append("".join(_texts(stream)))
        stream.cancel()
    if texts[0] != texts[1]:
        raise ChecksFailedError(f"greedy answers differ: {texts}")
    return [f"greedy answer, twice the same: `{texts[0][:80]}`"]


def _texts(stream: Stream) -> list[str]:
    texts = []
    while True:
        _, result, error = stream.replies.get(timeout=60)
        if error:
            raise ChecksFailedError(str(error))
        response = result.get_response()
        if response.raw_output_contents:
            texts.append(response.raw_output_contents[0][4:].decode())
        if response.parameters["triton_final_response"].bool_param:
            return texts


def check_cancellation(server: MetricsTriton, _shape: Shape, tokens: int = 1900) -> list[str]:
    """Cancel a long answer after its eighth piece; the engine must stop counting tokens."""
    before = settled(server)
    stream = Stream(server.grpc, f"{MARK}9 {MARK}10", tokens)
    for _ in range(8):
        stream.replies.get(timeout=60)
    stream.cancel()
    after = settled(server)
    time.sleep(1)
    later = server.families()["vllm:generation_tokens_total"]
    made = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    running = after["vllm:num_requests_running"]
    if running or later != after["vllm:generation_tokens_total"] or made >= tokens:
        raise ChecksFailedError(f"cancelled request: {made:.0f} of {tokens} tokens made, {running:.0f} running")
    return [f"cancelled after 8 pieces: the engine made {made:.0f} of {tokens} tokens, then 0 running"]


def settled(server: MetricsTriton, limit_s: float = 15) -> dict[str, float]:
    """Return the metrics once nothing runs and they have stopped changing."""
    last: dict[str, float] = {}
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        time.sleep(1.1)
        now = server.families()
        if now and now == last and not now.get("vllm:num_requests_running"):
            return now
        last = now
    return last


def check_metrics(server: MetricsTriton, _shape: Shape) -> list[str]:
    """Count vLLM's families on Triton's metrics endpoint; tokens must be those that were asked for."""
    found = settled(server)
    families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in found}
    wanted = {"vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_requests_running"}
    if not wanted <= set(found):
        raise ChecksFailedError(f"metrics lack {wanted - set(found)}")
    tokens = found["vllm:generation_tokens_total"]
    return [f"{len(families)} families of vLLM on Triton's metrics endpoint; generation_tokens_total {tokens:.0f}"]


def main(arguments: list[str] | None = None) -> int:
    """Start the server, run every check, report all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--environment", type=Path, required=True, metavar="DIR")
    add("--triton-root", type=Path, default=Path("/opt/tritonserver"), metavar="DIR")
    add("--model-repository", type=Path, default=Path("model_repository"), metavar="DIR")
    add("--shape", choices=sorted(SHAPES), default="tiny-opt")
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--tensor-parallel-size", type=int, default=1)
    add("--out", type=Path, default=Path("benchmarks/results/device_checks"), metavar="PATH", help="without suffix")
    add("--work", type=Path, metavar="DIR")
    add("--commit", default="")
    options = parser.parse_args(arguments)
    work = options.work or Path(tempfile.mkdtemp(prefix="device_checks_"))
    gpu, shape = options.device == "gpu", SHAPES[options.shape]
    engine: dict[str, object] = {"model": str(write_checkpoint(shape, work / shape.name)), "load_format": "dummy"}
    engine.update(_GPU if gpu else _CPU)
    engine["tensor_parallel_size"] = options.tensor_parallel_size
    variables = {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1"}
    environment, root = options.environment.absolute(), options.triton_root.absolute()
    server = MetricsTriton(Setting(environment, root, options.model_repository.absolute(), engine, variables, work))
    seen, failed = [], []
    try:
        took = server.start()
        seen.append(
            f"tensor_parallel_size {options.tensor_parallel_size}, {shape.name} shape: ready after {took:.1f} s"
        )
        checks: tuple[Callable[[MetricsTriton, Shape], list[str]], ...]
        checks = (check_answers, check_greedy, check_metrics, check_cancellation)
        for check in checks:
            try:
                seen += check(server, shape)
            except Exception as error:  # noqa: BLE001 - the other checks are worth as much
                failed.append(f"FAILED: {type(error).__name__}: {error}")
    finally:
        server.stop()
    described = machine.describe(environment, root, commit=options.commit)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# Seen on the device, {shape.name} shape", "\n".join(described.lines())]
    lines.append("\n".join(f"- {line}" for line in [*seen, *failed]))
    options.out.with_name(f"{options.out.name}.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join([*seen, *failed]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
