"""What a job asks of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triton_vllm.operator.request import OperatorRequest

if TYPE_CHECKING:
    from triton_vllm.call import Request
    from triton_vllm.vllm_api import Conversation


# The text of an order would show a client's prompt.
@dataclass(frozen=True, repr=False)
class Order:
    """A checked request, as vLLM will be asked.

    Attributes:
        request: the parsed request.
        params: vLLM's SamplingParams or PoolingParams. None for an operator request.
        options: additional keyword arguments of vLLM's ``add_request``.
        conversation: the chat for the parsers, if the model has parsers. Otherwise None.
        most_numbers: the most numbers in a pooling request's answer. 0 means no limit.
        bulky: whether the answer may take long to write.
    """

    request: Request
    params: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    conversation: Conversation | None = None
    most_numbers: int = 0
    bulky: bool = False

    @property
    def parts(self) -> tuple[Any, ...]:
        """What vLLM gets: one input at a time, so each is a request of its own there."""
        return getattr(self.request, "parts", None) or (self.request,)

    @property
    def weight(self) -> int:
        """How many requests it counts for: one for each part and each completion."""
        if isinstance(self.request, OperatorRequest):
            return 0
        return len(self.parts) * self.completions

    @property
    def completions(self) -> int:
        """The completions of each part."""
        return getattr(self.params, "n", 1)

    @property
    def streams(self) -> bool:
        """Whether the client wants new tokens as soon as they exist."""
        return getattr(self.request, "stream", False)
