"""Statements in vLLM's sources that the adapter relies on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api_contract.needs import OLDEST

if TYPE_CHECKING:
    from collections.abc import Mapping

# Module -> (the first version that must have them, statements).
# - registry: `triton_vllm.startup.inspector` uses them; without them, only a first start is slower.
# - audio: keep long audio from being decoded (`triton_vllm.media.audio`), and identify vLLM's
#   refusal (`vllm_api.too_large`).
STATEMENTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "vllm.model_executor.models.registry": (
        OLDEST,
        (
            "_SUBPROCESS_COMMAND = [sys.executable, '-m', 'vllm.model_executor.models.registry']",
            "cloudpickle.dumps((fn, output_filepath))",
            "subprocess.run(_SUBPROCESS_COMMAND, input=input_bytes, capture_output=True)",
        ),
    ),
    # `vllm_api.cpu_worker` relies on the name by which generators are made, and on their being
    # wound back.
    "vllm.v1.worker.gpu_model_runner": (
        "0.28",
        ("generator = torch.Generator(device=self.device)", "gen.set_offset(gen.get_offset() - 4)"),
    ),
    # `openai.checked_engine` is the `self` of these two methods, so they call its `add_request`.
    "vllm.v1.engine.async_llm": (OLDEST, ("await self.add_request(",)),
    "vllm.multimodal.media.audio": (
        "0.24",
        (
            "envs.VLLM_MAX_AUDIO_DECODE_DURATION_S",
            "Set VLLM_MAX_AUDIO_DECODE_DURATION_S to increase this limit.",
        ),
    ),
}
