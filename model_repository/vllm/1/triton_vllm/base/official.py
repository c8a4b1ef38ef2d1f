"""What the official vLLM backend says and publishes, where its words are part of the contract (docs/official_backend.md).

Read in vllm_backend's src/model.py and src/utils/metrics.py (2026).
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from triton_vllm.base.errors import DEAD, CancelledError, cut

if TYPE_CHECKING:
    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.protocols import Log

NAME = "official"
"""The value of COMPATIBILITY."""
ARGUMENTS_NAME = "model.json"
"""Where it has the engine arguments, in the version's directory."""
FAILED = "Error generating stream: "
"""What stands before the reason of each request that fails."""
CANCELLING = "[vllm] Cancelling the request"
CANCELLED = "[vllm] Successfully cancelled the request"
UNLOADING = "[vllm] Engine is not healthy and model will be unloaded"

NOT_FOUND = re.compile(r"LoRA (.*) is not supported, we currently support ", re.DOTALL)
_NO_LORA = "LoRA feature is not enabled."

COUNTERS = frozenset({"vllm:prompt_tokens_total", "vllm:generation_tokens_total"})
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LATENCY = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", _TTFT),
    "vllm:time_per_output_token_seconds": ("vllm:time_per_output_token_seconds", _PER_TOKEN),
    "vllm:inter_token_latency_seconds": ("vllm:time_per_output_token_seconds", _PER_TOKEN),  # vLLM's name for it since 0.11
    "vllm:e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds", _LATENCY),
    "vllm:request_prompt_tokens": ("vllm:request_prompt_tokens", ()),
    "vllm:request_generation_tokens": ("vllm:request_generation_tokens", ()),
    "vllm:request_params_n": ("vllm:request_params_n", ()),
}
"""Name and buckets of what it makes of each of vLLM's histograms; without buckets those of vLLM, which are its own as well."""


def bound_label(bound: str) -> str:
    """Return a bucket's bound as Triton writes it: `1` where Python's client has `1.0`."""
    return bound if bound == "+Inf" else f"{float(bound):.16g}"


def published_name(sample: str, bound: str | None) -> str | None:
    """Return the name under which it publishes one of vLLM's samples, None if it does not.

    Args:
        sample: vLLM's name.
        bound: of a bucket, its label `le`.
    """
    if sample in COUNTERS:
        return sample
    family, _, suffix = sample.rpartition("_")
    if family not in HISTOGRAMS:
        return None
    name, bounds = HISTOGRAMS[family]
    if bound is not None and bounds and float(bound) not in (*bounds, math.inf):
        return None
    return f"{name}_{suffix}"


def pinned(kind: str, gpus: str, instance: str) -> str:
    """Return what it logs of an instance (`NAME_DEVICE`) with GPUs of its own: Triton's for KIND_GPU, else GPU_DEVICE_IDS."""
    if kind == "GPU":
        return f"Detected KIND_GPU model instance, explicitly setting GPU device={gpus} for {instance}"
    return f"Detected KIND_MODEL instance with GPU_DEVICE_IDS specified. Setting CUDA_VISIBLE_DEVICES={gpus} for {instance}."


def report(log: Log, text: str) -> None:
    """Log an answer of `answer` as the official backend does; it says nothing of others here."""
    found = NOT_FOUND.match(text)
    if text.startswith(FAILED):
        log.error(f"[vllm] {text}")
    elif found:
        log.info(f"[vllm] LoRA {found[1]} not found.")
    elif text == _NO_LORA:
        log.info("[vllm] LoRA is not enabled, please restart the backend with LoRA enabled.")


def answer(error: AdapterError) -> tuple[str, str]:
    """Return the text and the name of the `TritonError` code with which it answers a request that fails."""
    text = str(error)
    if isinstance(error, CancelledError) or text == DEAD:
        return text, error.code
    known = text.startswith((FAILED, "LoRA "))  # adapters are looked up before anything else, and without those words
    return text if known else cut(FAILED + text), "INTERNAL"
