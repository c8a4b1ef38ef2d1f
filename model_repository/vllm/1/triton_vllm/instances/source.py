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
    """Why an engine is abandoned.

    Attributes:
        what: ends the log's sentence "the engine …", for example `has died`.
        in_order: whether it ended normally, e.g. because the model was unloaded.
    """

    what: str
    in_order: bool = False


class Source(Protocol):
    """The origin of an engine: this process alone starts it, or several processes share it."""

    async def start(self) -> EngineClient:
        """Start the engine or connect to it, and return its client; called again after each loss."""

    def share(self) -> None:
        """Tell the other instances that the engine serves."""

    def loss(self) -> Loss | None:
        """Return why the engine must be abandoned if its client does not know that; called twice a second."""

    def retire(self, *, hung: bool) -> None:
        """Make the other instances abandon the engine."""

    def close(self) -> None:
        """Tell the other instances that the engine is about to end for good."""


class Sole:
    """An engine that only this process uses.

    Args:
        vllm: the loaded vLLM.
        values: engine arguments.
    """

    def __init__(self, vllm: vllm_api.Vllm, values: Mapping[str, Any]) -> None:
        self._vllm = vllm
        self._values = values

    async def start(self) -> EngineClient:
        """See `Source`."""
        # Blocks the loop, as in vLLM's own server: nothing else can be done until the model is loaded.
        return vllm_api.start(self._vllm, self._values)

    def loss(self) -> None:
        """Return None: the client itself knows whether the engine has died."""

    def share(self) -> None:
        """Do nothing, because there are no other instances."""

    close = share

    def retire(self, *, hung: bool) -> None:
        """Do nothing, because there are no other instances."""
