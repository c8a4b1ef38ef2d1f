"""The outputs of a pooling request with several parts become one, or its first failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.pooling.gathering import Gathered, Gathering


class Numbers:
    """Stands where a tensor does."""

    def __init__(self, count: int) -> None:
        self._values = np.zeros(count)

    def numel(self) -> int:
        """Return the count."""
        return self._values.size


def part(count: int = 1) -> Any:
    """Return the output of a part with so many numbers."""
    return SimpleNamespace(outputs=SimpleNamespace(data=Numbers(count)))


@pytest.mark.parametrize("failure", [ValueError("no"), part(count=9)], ids=["error", "too many numbers"])
def test_parts_that_end_after_a_failure_are_ignored(failure: Any) -> None:
    """All other parts end well, in any order: the request has failed once, and is not done."""
    done: list[Gathered] = []
    failed: list[Any] = []
    gathering = Gathering(3, done.append, failed.append, most=5)
    gathering.take(1, failure)
    gathering.take(2, part())
    gathering.take(0, part())
    gathering.take(1, part())
    assert not done
    (error,) = failed
    assert error is failure or isinstance(error, InvalidRequestError)
