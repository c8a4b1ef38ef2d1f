"""What a GPU host must show beside speed: answers, metrics and cancellation under the real tritonserver.

    python3 benchmarks/device_checks.py --environment ENV --triton-root ROOT --device gpu [--tensor-parallel-size 2 [--ray]]

With `--ray` vLLM's workers are actors of a Ray cluster of as many nodes as there are ranks, all on this host with one GPU
each, and one of them is killed at the end. Writes what was seen to `--out` and exits 1 if anything is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tritonclient.grpc as grpcclient

from harness import machine, results
from harness.processes import exit_on_sigterm
from harness.ray_cluster import RayCluster
from harness.servers import Setting, set_parameter
from harness.shapes import MARK, SHAPES, Shape, write_checkpoint
from harness.targets import TritonTarget
from harness.workload import Load

if TYPE_CHECKING:
    from collections.abc import Callable

_CPU = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
_GPU = {"dtype": "float16", "max_model_len": 2048, "gpu_memory_utilization": 0.5}
# Both nodes share this host's /dev/shm, by which vLLM takes them for one whose GPUs all workers see, and tries ways to
# add up that need this. Between two machines it would not.
_RAY_ENGINE = {"distributed_executor_backend": "ray", "disable_custom_all_reduce": True}
_RAY_VARIABLES = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
_RESTART_LIMIT_S = 90


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


def check_workers(cluster: RayCluster, nodes: list[str]) -> list[str]:
    """Ask Ray where the workers are: one on each node."""
    actors = cluster.actors()
    if sorted(actor.node for actor in actors) != nodes:
        raise ChecksFailedError(f"workers are not one on each of {nodes}: {actors}")
    seen = [f"Ray's actor {actor.name}, process {actor.pid}, on node {actor.node}" for actor in actors]
    used = machine.gpu_memory()
    return [*seen, f"memory in use by GPU: {used}"] if used else seen


def check_killed_worker(cluster: RayCluster, server: MetricsTriton, nodes: list[str]) -> list[str]:
    """Kill the last node's worker while it answers: the request must get an error, and later ones answers again."""
    stream = Stream(server.grpc, f"{MARK}11 {MARK}12", 1900)
    stream.replies.get(timeout=60)
    (victim,) = (actor.pid for actor in cluster.actors() if actor.node == nodes[-1])
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    error = None
    while error is None:
        _, _, error = stream.replies.get(timeout=60)
    told = time.monotonic() - began
    stream.cancel()
    while True:
        stream = Stream(server.grpc, f"{MARK}11 {MARK}12", 8)
        try:
            _texts(stream)
            break
        except ChecksFailedError:
            if time.monotonic() > began + _RESTART_LIMIT_S:
                raise
            time.sleep(0.5)
        finally:
            stream.cancel()
    back = time.monotonic() - began
    check_workers(cluster, nodes)
    return [f"a worker killed in the midst of an answer: after {told:.1f} s `{error}`; answers again after {back:.0f} s"]


def check_end(cluster: RayCluster) -> list[str]:
    """After the server's end: no actor may live, and the cluster must leave no process."""
    limit = time.monotonic() + 15
    while (actors := cluster.actors()) and time.monotonic() < limit:
        time.sleep(0.5)
    left = cluster.stop()
    if actors or left:
        raise ChecksFailedError(f"left after the end: actors {actors}, {left} processes of the cluster")
    return ["after the server's end Ray has no actor, after the cluster's end there is no process of it"]


def main(arguments: list[str] | None = None) -> int:
    """Start the server, run every check, report all."""
    options = _options(arguments)
    exit_on_sigterm()
    work = options.work or Path(tempfile.mkdtemp(prefix="device_checks_"))
    gpu, shape = options.device == "gpu", SHAPES[options.shape]
    engine: dict[str, object] = {"model": str(write_checkpoint(shape, work / shape.name)), "load_format": "dummy"}
    engine.update(_GPU if gpu else _CPU)
    engine["tensor_parallel_size"] = options.tensor_parallel_size
    variables = {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1"}
    environment, root = options.environment.absolute(), options.triton_root.absolute()
    seen: list[str] = []
    failed: list[str] = []

    def attempt(check: Callable[..., list[str]], *what: object) -> None:
        try:
            seen.extend(check(*what))
        except Exception as error:  # noqa: BLE001 - the other checks are worth as much
            failed.append(f"FAILED: {type(error).__name__}: {error}")

    cluster, nodes = None, []
    if options.ray:
        engine.update(_RAY_ENGINE)
        variables.update(_RAY_VARIABLES)
        cluster = RayCluster(environment / "bin" / "python", work, options.tensor_parallel_size, variables, gpus=gpu)
        variables.update({"RAY_ADDRESS": cluster.address, "CUDA_VISIBLE_DEVICES": "0"})
    server = MetricsTriton(Setting(environment, root, options.model_repository.absolute(), engine, variables, work))
    try:
        if cluster is not None:
            nodes = cluster.start()
            seen.append(f"Ray cluster of nodes {', '.join(nodes)}, a raylet and a GPU each")
        took = server.start()
        seen.append(f"tensor_parallel_size {options.tensor_parallel_size}, {shape.name} shape: ready after {took:.1f} s")
        for check in (check_answers, check_greedy, check_metrics, check_cancellation):
            attempt(check, server, shape)
        if cluster is not None:
            attempt(check_workers, cluster, nodes)
            attempt(check_killed_worker, cluster, server, nodes)
    finally:
        server.stop()
        if cluster is not None:
            attempt(check_end, cluster)
            cluster.stop()
    described = machine.describe(environment, root, commit=options.commit)
    given = shlex.join(sys.argv[1:] if arguments is None else arguments)
    out = results.take(options.out, described.commit, f"python3 benchmarks/device_checks.py {given}")
    lines = [f"# Seen on the device, {shape.name} shape", "\n".join(described.lines())]
    lines.append("\n".join(f"- {line}" for line in [*seen, *failed]))
    out.with_name(f"{out.name}.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join([*seen, *failed]))
    return 1 if failed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--environment", type=Path, required=True, metavar="DIR")
    add("--triton-root", type=Path, default=Path("/opt/tritonserver"), metavar="DIR")
    add("--model-repository", type=Path, default=Path("model_repository"), metavar="DIR")
    add("--shape", choices=sorted(SHAPES), default="tiny-opt")
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--tensor-parallel-size", type=int, default=1)
    add("--ray", action="store_true", help="on a Ray cluster made for it; the environment needs ray")
    add("--out", type=Path, default=Path("benchmarks/results/device_checks"), metavar="PATH", help="time and commit are added")
    add("--work", type=Path, metavar="DIR")
    add("--commit", default="")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
