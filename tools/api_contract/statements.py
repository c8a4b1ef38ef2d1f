"""Statements in vLLM's sources that the adapter relies on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api_contract.needs import OLDEST

if TYPE_CHECKING:
    from collections.abc import Mapping

# Module -> (the first version that must have them, statements).
# - audio: keep long audio from being decoded (`triton_vllm.media.audio`), and identify vLLM's
#   refusal (`vllm_api.too_large`).
STATEMENTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
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
