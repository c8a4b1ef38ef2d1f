"""The counter of refused requests, as Prometheus' client shows a family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triton_vllm.base.protocols import PrometheusSample

NAME = "vllm_env_requests_refused"


@dataclass
class _Sample:
    name: str
    labels: Mapping[str, object]
    value: float


@dataclass
class _Family:
    name: str
    type: str
    documentation: str
    samples: Sequence[PrometheusSample]


def family(counts: Mapping[str, int]) -> _Family:
    """Return the family.

    Args:
        counts: the number of refused requests by the error's code, such as ``INVALID_ARG``.
    """
    samples = [
        _Sample(f"{NAME}_total", {"reason": code.lower()}, count) for code, count in counts.items()
    ]
    return _Family(NAME, "counter", "Requests that got an error, by Triton's code.", samples)
