"""COMPATIBILITY: where this model differs from the official vLLM backend on purpose.

A ``Dialect`` holds one side of the differences. The load chooses it. The official behaviour was
read in vllm_backend's src/model.py and src/utils/metrics.py (2026). docs/official_backend.md lists
the differences.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from triton_vllm.base.errors import DEAD, CancelledError, cut
from triton_vllm.base.official import FAILED_PREFIX, NO_LORA

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.protocols import Log

NOT_FOUND = re.compile(r"LoRA (.*) is not supported, we currently support ", re.DOTALL)
OFFICIAL_COUNTERS = frozenset({"vllm:prompt_tokens_total", "vllm:generation_tokens_total"})
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LATENCY = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", _TTFT),
    "vllm:time_per_output_token_seconds": ("vllm:time_per_output_token_seconds", _PER_TOKEN),
    # Since 0.11, vLLM uses this name for the one above.
    "vllm:inter_token_latency_seconds": ("vllm:time_per_output_token_seconds", _PER_TOKEN),
    "vllm:e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds", _LATENCY),
    "vllm:request_prompt_tokens": ("vllm:request_prompt_tokens", ()),
    "vllm:request_generation_tokens": ("vllm:request_generation_tokens", ()),
    "vllm:request_params_n": ("vllm:request_params_n", ()),
}
"""vLLM's histograms with the official backend's name and buckets; ``()`` means vLLM's buckets.

A bucket is named by its upper bound.
"""


class Dialect:
    """The behaviour without COMPATIBILITY; ``OfficialDialect`` replaces parts of it.

    Attributes:
        is_official: whether COMPATIBILITY asks for the official backend's behaviour.
        takes_empty_text: whether an empty ``text_input`` goes to vLLM. Otherwise it is refused.
        takes_unknown_fields: whether unknown fields of an ``embedding_request`` are ignored.
            Otherwise they are refused.
        reads_timeout: whether Triton's timeout of a request is obeyed.
        merges_outputs: whether a response may contain several outputs.
        metrics_period_s: seconds between two updates of the metrics.
    """

    # docs/official_backend.md has the reason for each of these values.
    is_official = False
    takes_empty_text = False
    takes_unknown_fields = False
    reads_timeout = True
    merges_outputs = True
    metrics_period_s = 1.0

    def error(self, error: AdapterError) -> tuple[str, str]:
        """Return the text and the name of the ``TritonError`` code for a failed request."""
        return str(error), error.code

    def log_error(self, log: Log, text: str) -> None:
        """Log the text of an error."""
        # Our own dialect logs nothing: the client has the text, and could fill the log with it.

    def metric_name(self, sample: str, labels: Mapping[str, str]) -> str | None:
        """Return the name under which one of vLLM's samples is published; None omits it."""
        del labels
        return sample

    def metric_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the labels with which a sample is published."""
        return dict(labels)


class OfficialDialect(Dialect):
    """The official backend's behaviour."""

    is_official = True
    takes_empty_text = True
    takes_unknown_fields = True
    reads_timeout = False
    merges_outputs = False
    metrics_period_s = 0.05

    def error(self, error: AdapterError) -> tuple[str, str]:
        """See ``Dialect``."""
        # The official backend reports all errors but two as internal ones, with the same prefix.
        text = str(error)
        if isinstance(error, CancelledError) or text == DEAD:
            return text, error.code
        # It looks up adapters first, so errors about them have no prefix.
        if not text.startswith((FAILED_PREFIX, "LoRA ")):
            text = cut(FAILED_PREFIX + text)
        return text, "INTERNAL"

    def log_error(self, log: Log, text: str) -> None:
        """See ``Dialect``."""
        not_found = NOT_FOUND.match(text)
        if text.startswith(FAILED_PREFIX):
            log.error(f"[vllm] {text}")
        elif not_found:
            log.info(f"[vllm] LoRA {not_found[1]} not found.")
        elif text == NO_LORA:
            log.info("[vllm] LoRA is not enabled, please restart the backend with LoRA enabled.")

    def metric_name(self, sample: str, labels: Mapping[str, str]) -> str | None:
        """See ``Dialect``."""
        if sample in OFFICIAL_COUNTERS:
            return sample
        # A histogram's samples have the suffixes `bucket`, `sum` and `count`.
        family, _, suffix = sample.rpartition("_")
        if family not in HISTOGRAMS:
            return None
        name, bounds = HISTOGRAMS[family]
        # Only a bucket has this label, its upper bound.
        bound = labels.get("le")
        if bound is not None and bounds:
            is_official_bucket = float(bound) in (*bounds, math.inf)
            # A bucket's count includes all smaller buckets, so the rest stays right without some.
            if not is_official_bucket:
                return None
        return f"{name}_{suffix}"

    def metric_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """See ``Dialect``."""
        # Triton writes a bucket's bound as `1`, where Python's client has `1.0`.
        bound = labels.get("le")
        if bound is None:
            return {}
        return {"le": bound if bound == "+Inf" else f"{float(bound):.16g}"}


OURS = Dialect()
OFFICIAL = OfficialDialect()
