"""What the kinds of requests have in common: each checks itself, and says how it is answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from triton_vllm import vllm_api
from triton_vllm.base import official
from triton_vllm.base.errors import UnsupportedError
from triton_vllm.reply.response import ToldAssembler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triton_vllm.engine.fit import Fit
    from triton_vllm.engine.order import Order
    from triton_vllm.engine.runner import Runner
    from triton_vllm.operator.request import OperatorRequest
    from triton_vllm.reply.reply import Reply, ResponseBuilder
    from triton_vllm.vllm_api import Parsers, Schema, Vllm


@dataclass
class Served:
    """The model that a request is checked against.

    Attributes:
        name: its name in Triton.
        vllm: the loaded vLLM.
        fit: the checks in front of the engine.
        find_adapter: raises an error for a name that no LoRA adapter can have.
        parsers: read the answers to chats. None leaves the answers unparsed.
        schema: vLLM's sampling parameters.
        pooling_types: vLLM's pooling parameters with their types.
    """

    name: str
    vllm: Vllm
    fit: Fit
    find_adapter: Callable[[str], object]
    parsers: Parsers | None = None
    schema: Schema = field(init=False)
    pooling_types: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.schema = vllm_api.sampling_schema(self.vllm)
        self.pooling_types = vllm_api.pooling_types(self.vllm)

    def require_adapter(self, name: str | None) -> None:
        """Refuse a request for an adapter that cannot exist.

        Raises:
            InvalidRequestError: the text has the name.
        """
        if name is not None:
            self.find_adapter(name)

    def require_task(self, task: str) -> None:
        """Refuse a request for what the model cannot do.

        Raises:
            UnsupportedError: as the official backend says it.
        """
        # A model that makes text of speech has another task (vllm/tasks.py, GENERATION_TASKS).
        names = {task, "transcription"} if task == "generate" else {task}
        if names.isdisjoint(self.fit.facts.tasks):
            raise UnsupportedError(
                f"{official.FAILED_PREFIX}Model {self.name} does not support '{task}' request"
            )


@dataclass(frozen=True)
class Call:
    """A checked request of vLLM, ready to be started.

    Attributes:
        order: what vLLM will be asked.
        assembler: makes the responses.
        bulky: whether the answer may take long to write.
    """

    order: Order
    assembler: ResponseBuilder
    bulky: bool = False

    @property
    def streams(self) -> bool:
        """Whether the client wants responses before the answer is complete."""
        return self.order.streams

    def start(self, runner: Runner, reply: Reply) -> None:
        """Give the request to the engine; its answer goes to ``reply``."""
        runner.submit(self.order, reply)


class Request(ABC):
    """A parsed request of one kind."""

    @abstractmethod
    def call(self, served: Served, options: Mapping[str, Any]) -> AnyCall:
        """Check the request against the model, and return what can be started.

        Args:
            served: the model.
            options: additional keyword arguments of vLLM's ``add_request``.

        Raises:
            AdapterError: the reason for a refusal.
        """


@dataclass(frozen=True)
class Operation(Request):
    """An operator's request; it was checked when it was read, and is started as it is.

    Attributes:
        request: the operation and its arguments.
        assembler: see ``Call``, as for the others.
    """

    request: OperatorRequest
    assembler: ResponseBuilder = field(default_factory=ToldAssembler)
    bulky: bool = False
    streams: bool = False

    def call(self, served: Served, options: Mapping[str, Any]) -> Operation:  # noqa: ARG002
        """See ``Request``."""
        return self

    def start(self, runner: Runner, reply: Reply) -> None:
        """See ``Call``."""
        runner.operate(self.request, reply)


AnyCall = Call | Operation
