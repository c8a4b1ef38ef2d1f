"""Where an engine comes from: this process alone starts it, or several instances share one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from triton_vllm import vllm_api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.base.protocols import EngineClient


@dataclass(frozen=True)
class Loss:
    """Why an engine is given up.

    Attributes:
        what: has happened to it, as a predicate for the log.
        in_order: whether it ended as it should, as at each unloading of a model.
    """

    what: str
    in_order: bool = False


class Source(Protocol):
    """Where an engine comes from: this process alone starts it, or several share it."""

    async def start(self) -> EngineClient:
        """Start the engine or connect to it, and return its client; called once more after each loss."""

    def share(self) -> None:
        """Tell others that the engine serves."""

    def loss(self) -> Loss | None:
        """Return why the engine is to be given up if its client does not know; called twice a second."""

    def retire(self, *, hung: bool) -> None:
        """Have others give the engine up."""

    def close(self) -> None:
        """Tell others that the engine is about to be ended for good."""


class Sole:
    """An engine of this process alone.

    Args:
        vllm: the loaded vLLM.
        values: engine arguments.
    """

    def __init__(self, vllm: vllm_api.Vllm, values: Mapping[str, Any]) -> None:
        self._vllm = vllm
        self._values = values

    async def start(self) -> EngineClient:
        """See `Source`."""
        # Blocks the loop, as in vLLM's own server: there is nothing else to do until the model is loaded.
        return vllm_api.start(self._vllm, self._values)

    def loss(self) -> None:
        """Return nothing: the client knows."""

    def share(self) -> None:
        """Do nothing, as there are no others."""

    close = share

    def retire(self, *, hung: bool) -> None:
        """Do nothing, as there are no others."""
