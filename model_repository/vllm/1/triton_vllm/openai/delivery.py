"""How a request to the port gets its outputs and its end: by vLLM's own collectors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from triton_vllm import vllm_api
from triton_vllm.engine.job import Delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_vllm.base.errors import AdapterError
    from triton_vllm.base.protocols import Collector, Output
    from triton_vllm.engine.job import Item
    from triton_vllm.vllm_api import Vllm


class Collected(Delivery):
    """Leaves the outputs to vLLM's application, and ends what it waits for.

    All methods are called in the event loop.

    Args:
        vllm: the loaded vLLM.
        note_output: called for each output.

    Attributes:
        closed: whether the answer is written, or its client is gone.
    """

    # uvicorn notices a client that has left.
    is_watched: ClassVar[bool] = False
    pending = ()

    def __init__(self, vllm: Vllm, note_output: Callable[[], None]) -> None:
        self._vllm = vllm
        self._note_output = note_output
        self._puts: list[Callable[[Output | Exception], None]] = []
        self._error: AdapterError | None = None
        # Set by ``take_place``.
        self._places: asyncio.Semaphore | None = None
        self.closed = False

    async def take_place(self, most: int) -> None:
        """Wait until vLLM works on fewer than ``most`` of its own requests for the job.

        ``follow`` gives the place back with the last output.
        """
        if self._places is None:
            self._places = asyncio.Semaphore(most)
        await self._places.acquire()

    def follow(self, collector: Collector) -> None:
        """Note each output of one of vLLM's own requests, and end that request with the job.

        If the job has ended already, it ends at once.
        """
        put = collector.put
        places = self._places

        def noted(item: Output | Exception) -> None:
            self._note_output()
            put(item)
            if places is not None and (isinstance(item, Exception) or item.finished):
                places.release()

        # Patch collector-put: here also because vLLM tells nobody that such an output has come.
        collector.put = noted
        self._puts.append(put)
        if self._error is not None:
            put(vllm_api.ends_generate(self._vllm, self._error))

    def end(self, item: Item) -> None:
        """See ``Delivery``; the last item is always an error here."""
        error: Any = item
        self._error = error
        for put in self._puts:
            put(vllm_api.ends_generate(self._vllm, error))

    def lasts(self, item: Item) -> bool:  # noqa: ARG002
        """See ``Delivery``; only the middleware knows when the answer is written."""
        return True

    def refuse(self, error: AdapterError) -> None:
        """See ``Delivery``; a job that has ended has its error already."""

    def give_up(self) -> None:
        """See ``Delivery``."""
        self.closed = True
