"""What the engine needs of another API that answers with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_vllm.base.protocols import EngineClient


class Front(Protocol):
    """Another API over the engine; all methods are called in the event loop."""

    async def use(self, llm: EngineClient, tasks: Sequence[str]) -> None:
        """Answer with this engine from now on."""

    def leave(self) -> None:
        """Take no more requests."""

    async def close(self) -> None:
        """End the connections; the requests have been ended."""
