"""Gather the outputs of a pooling request with several parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_vllm.base.errors import InvalidRequestError
from triton_vllm.vllm_api.refusals import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triton_vllm.base.protocols import PoolingRequestOutput


class Gathered:
    """The only output of a pooling request: the outputs of its parts in their order."""

    finished = True

    def __init__(self, outputs: Sequence[PoolingRequestOutput]) -> None:
        self.outputs = outputs


class Gathering:
    """The outputs so far; its method is called in the engine's event loop.

    Args:
        count: the request's parts. vLLM gets each as its own request.
        done: takes all outputs as one.
        fail: takes the output or exception of each part that failed. Only the first one counts.
        most: the most numbers in all outputs together. 0 means no limit.
    """

    def __init__(
        self,
        count: int,
        done: Callable[[Gathered], None],
        fail: Callable[[Any], None],
        most: int = 0,
    ) -> None:
        self._outputs: list[Any] = [None] * count
        # How many parts have no output yet. 0 also means that the request has failed.
        self._missing = count
        self._done = done
        self._fail = fail
        self._most = most
        # of all outputs so far
        self._numbers = 0

    def take(self, number: int, item: Any) -> None:
        """Take the output or the exception of a part.

        Args:
            number: the part's place in the request. vLLM finishes the parts in any order.
            item: the part's only output, or its exception.
        """
        # The caller ignores a failure after the first.
        if isinstance(item, Exception) or failure(item) is not None:
            self._missing = 0
            self._fail(item)
            return
        # The request has failed before.
        if not self._missing:
            return
        self._numbers += item.outputs.data.numel()
        if 0 < self._most < self._numbers:
            self._missing = 0
            # This frees memory now: the other parts may still hold this object.
            self._outputs.clear()
            error = InvalidRequestError(
                f"the answer has more than {self._most} numbers: "
                "send fewer or shorter inputs at once"
            )
            self._fail(error)
            return
        self._outputs[number] = item
        self._missing -= 1
        if not self._missing:
            self._done(Gathered(self._outputs))
