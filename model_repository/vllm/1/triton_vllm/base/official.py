"""Names and texts of the official vLLM backend that we keep with any value of COMPATIBILITY.

Its clients and log readers depend on them. docs/official_backend.md lists them.
"""

from __future__ import annotations

DIALECT_NAME = "official"
"""The value of COMPATIBILITY."""
ARGUMENTS_NAME = "model.json"
"""The file with the engine arguments, in the version's directory."""
FAILED_PREFIX = "Error generating stream: "
"""The prefix of the reason of each failed request."""
NO_LORA = "LoRA feature is not enabled."
CANCELLING = "[vllm] Cancelling the request"
CANCELLED = "[vllm] Successfully cancelled the request"
UNHEALTHY_LINE = "[vllm] Engine is not healthy and model will be unloaded"


def pinned_line(kind: str, gpus: str, instance: str) -> str:
    """Return the log line of an instance that has its own GPUs, as the official backend writes it.

    Args:
        kind: the kind of the instance group, without ``KIND_``. For GPU, Triton chose the GPUs; for
            MODEL, the parameter ``GPU_DEVICE_IDS`` did.
        gpus: the numbers of the GPUs.
        instance: the model's name, ``_``, and the instance's device.
    """
    if kind == "GPU":
        return (
            f"Detected KIND_GPU model instance, explicitly setting GPU device={gpus} for {instance}"
        )
    return (
        "Detected KIND_MODEL instance with GPU_DEVICE_IDS specified. "
        f"Setting CUDA_VISIBLE_DEVICES={gpus} for {instance}."
    )
