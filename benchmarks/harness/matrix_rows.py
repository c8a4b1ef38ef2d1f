"""The rows of ``gpu_matrix.py``: each is a way in which people configure a model, as data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from harness.matrix_shapes import MATRIX_SHAPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# With these, no process uses multicast between GPUs (cuMulticastCreate). On a host that others
# share, it can put the GPUs out of service. FlashInfer's all-reduce may choose it by itself.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
COMMON_ARGUMENTS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 512,
    "max_num_seqs": 16,
    # As much must be free when an engine starts, also next to others on the same GPU.
    "gpu_memory_utilization": 0.2,
    # Rows side by side, and the engine after the server, start with the same memory.
    "kv_cache_memory_bytes": 2 * 2**30,
}
CHECKS = (
    *("text", "embedding", "score", "lora", "choice", "sleep", "kill", "refused"),
    *("image", "audio", "warm"),
)


@dataclass(frozen=True)
class Row:
    """A configuration that people use.

    Attributes:
        name: its name on the command line and on the page.
        shape: a key of ``MATRIX_SHAPES``.
        arguments: engine arguments, in addition to ``COMMON_ARGUMENTS``.
        check: one of ``CHECKS``. It chooses the requests. ``lora``, ``choice``, ``sleep`` and
            ``kill`` (of a worker) ask in addition to ``text``. With ``refused``, the model must
            not load. With ``warm``, it is loaded twice. The second load finds the caches of the
            first.
        gpus: number of GPUs.
        count: number of front ends.
        parameters: of config.pbtxt.
        variables: environment variables of the server.
        draft: the shape of the draft model.
        says: with ``refused``, what the message must contain.
        compares: whether the engine in process can be compared.
        distinct: whether each prompt must have another answer. vLLM's dummy weights leave 32-bit
            integers as the memory has them, so those of GPTQ and AWQ may all be equal.
    """

    name: str
    shape: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    check: str = "text"
    gpus: int = 1
    count: int = 1
    parameters: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    draft: str = ""
    says: str = ""
    compares: bool = True
    distinct: bool = True

    def environment(self) -> dict[str, str]:
        """Return the environment variables for each process of this row."""
        return {**self.variables, **(NO_MULTICAST if self.gpus > 1 else {})}


_REAL = {"load_format": "auto"}
_TP2 = {"tensor_parallel_size": 2}
_DP2 = {"data_parallel_size": 2}
_EP = {"enable_expert_parallel": True}
_LORA = {"enable_lora": True, "max_lora_rank": 8}
_SLEEP = {"OPERATOR_REQUESTS": "sleep,wake_up,is_sleeping"}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
_DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}
# What matters most comes first: the device time may end in the midst of the table. An engine with
# data parallelism cannot run in one process, and with an adapter on a CPU there are no
# prompt_logprobs. Such rows compare nothing. A vLLM that is pinned by a commit is another
# environment: run the first row with it.
ROWS = (
    Row("llama", "llama"),
    Row("fp8-blocks", "qwen3-fp8"),
    Row("fp8-blocks-moe", "qwen3-moe-fp8"),
    Row("count-2", "llama", count=2),
    Row(
        "flashinfer-attention",
        "llama",
        {"attention_backend": "FLASHINFER"},
        check="refused",
        says="attention_backend",
    ),
    Row("tp-2", "llama", _TP2, check="kill", gpus=2),
    Row("qwen3", "qwen3"),
    Row("gemma3", "gemma3"),
    Row("deepseek-v3", "deepseek-v3"),
    Row("deepseek-v3-fp8-blocks", "deepseek-v3-fp8"),
    Row("qwen3-moe", "qwen3-moe"),
    Row("gpt-oss-mxfp4", "gpt-oss"),
    Row("fp8-online", "llama", {"quantization": "fp8"}),
    Row("fp8-kv-cache", "llama", {"kv_cache_dtype": "fp8"}),
    Row("gptq", "llama-gptq", distinct=False),
    Row("awq", "llama-awq", distinct=False),
    Row("qwen3-next", "qwen3-next"),
    Row("falcon-h1", "falcon-h1"),
    Row("embedding", "qwen3", {"runner": "pooling", "convert": "embed"}, check="embedding"),
    Row("reranker", "qwen3-reranker", {"runner": "pooling"}, check="score"),
    Row("lora", "llama", _LORA, check="lora", compares=False),
    Row("ngram", "llama", {"speculative_config": _NGRAM}),
    Row("draft-model", "llama", {"speculative_config": _DRAFT}, draft="llama"),
    Row("structured-output", "llama", check="choice"),
    Row("sleep", "llama", {"enable_sleep_mode": True}, check="sleep", parameters=_SLEEP),
    Row("picture", "qwen2-vl", _REAL, check="image"),
    Row("speech", "whisper", {**_REAL, "max_model_len": 448}, check="audio"),
    Row("warm", "llama", check="warm"),
    Row("tp-2-count-2", "llama", _TP2, gpus=2, count=2),
    Row("tp-2-fp8-blocks", "qwen3-fp8", _TP2, gpus=2),
    Row("pp-2", "llama", {"pipeline_parallel_size": 2}, gpus=2),
    Row("dp-2", "llama", _DP2, gpus=2, compares=False),
    Row("ep-2", "qwen3-moe", {**_TP2, **_EP}, gpus=2),
    Row("dp-2-ep", "qwen3-moe", {**_DP2, **_EP}, gpus=2, compares=False),
    Row("lora-tp-2", "llama", {**_TP2, **_LORA}, check="lora", gpus=2, compares=False),
)


def select(names: Iterable[str], gpus: int) -> list[Row]:
    """Return the rows with these names in this order; without names, all that ``gpus`` can run.

    Raises:
        ValueError: a name is unknown, or its row needs more GPUs.
    """
    known = {row.name: row for row in ROWS}
    wanted = list(names)
    if not wanted:
        return [row for row in ROWS if row.gpus <= gpus]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no row is called {', '.join(unknown)}: --list shows the names")
    if large := [name for name in wanted if known[name].gpus > gpus]:
        raise ValueError(f"{', '.join(large)} needs more than {gpus} GPU: give --gpus 2")
    return [known[name] for name in wanted]


def require_no_multicast(row: Row, environment: Mapping[str, str]) -> None:
    """Check that a row on several GPUs cannot use multicast between them.

    Raises:
        RuntimeError: a variable is not set; nothing may be started.
    """
    if row.gpus == 1:
        return
    for name, value in NO_MULTICAST.items():
        if environment.get(name) != value:
            raise RuntimeError(f"{row.name} does not start without {name}={value}")


def digest(row: Row, model: Path, device: str) -> str:
    """Return the digest of all that a row's result depends on.

    It depends on the model's code and its lock, on the row with its shapes, and on the device.

    Args:
        row: the row.
        model: the built model's folder.
        device: ``gpu`` or ``cpu``.
    """
    content = hashlib.sha256()
    for file in sorted((model / "1").rglob("*.py")):
        content.update(f"{file.relative_to(model)}\0".encode() + file.read_bytes() + b"\0")
    manifest = model / "vllm_env.json"
    lock = json.loads(manifest.read_text("utf-8"))["lock_digest"] if manifest.is_file() else ""
    shapes = [asdict(MATRIX_SHAPES[name]) for name in (row.shape, row.draft) if name]
    about = [lock, device, asdict(row), COMMON_ARGUMENTS, shapes]
    content.update(json.dumps(about, sort_keys=True).encode())
    return content.hexdigest()[:16]
