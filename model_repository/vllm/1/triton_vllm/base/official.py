"""Names and texts of the official vLLM backend that are part of the contract, with any value of COMPATIBILITY."""

from __future__ import annotations

NAME = "official"
"""The value of COMPATIBILITY."""
ARGUMENTS_NAME = "model.json"
"""The file with the engine arguments, in the version's directory."""
FAILED = "Error generating stream: "
"""The prefix of the reason of each failed request."""
NO_LORA = "LoRA feature is not enabled."
CANCELLING = "[vllm] Cancelling the request"
CANCELLED = "[vllm] Successfully cancelled the request"
UNLOADING = "[vllm] Engine is not healthy and model will be unloaded"


def pinned(kind: str, gpus: str, instance: str) -> str:
    """Return the log line of an instance (``NAME_DEVICE``) with its own GPUs: Triton's for KIND_GPU, else GPU_DEVICE_IDS."""
    if kind == "GPU":
        return (
            f"Detected KIND_GPU model instance, explicitly setting GPU device={gpus} for {instance}"
        )
    return f"Detected KIND_MODEL instance with GPU_DEVICE_IDS specified. Setting CUDA_VISIBLE_DEVICES={gpus} for {instance}."
