"""Pass the operator's limits of audio to vLLM."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, MutableMapping

    from triton_vllm.base.limits import Limits

SECONDS_VARIABLE = "VLLM_MAX_AUDIO_DECODE_DURATION_S"
MEGABYTES_VARIABLE = "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"
MIB = 1 << 20
UNBOUNDED = 1_000_000_000
"""Used in place of 0, with which vLLM would refuse every audio."""


def limit(limits: Limits, known: Collection[str], environ: MutableMapping[str, str]) -> None:
    """Set vLLM's variables for audio; variables that the operator has set stay.

    Args:
        limits: the model's limits.
        known: the variables that this vLLM reads.
        environ: this process's environment.
    """
    # vLLM measures each audio while it decodes it, wherever the audio came from. Versions before
    # 0.24 do not, and lack the variables.
    chosen = {
        SECONDS_VARIABLE: limits.max_clip_seconds or UNBOUNDED,
        MEGABYTES_VARIABLE: math.ceil(limits.max_clip_bytes / MIB) or UNBOUNDED,
    }
    for name, value in chosen.items():
        if name in known:
            environ.setdefault(name, str(value))
