"""Give vLLM's output handler the engine's outputs in a fair order when it has fallen behind."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton_vllm.base.protocols import EngineClient

# A log probability costs the event loop 5 to 8 us, so 16 outputs with 20 each take about 2 ms.
SLICE_OUTPUTS = 16
"""The most outputs with log probabilities that are handled at a time."""
STEPS_IN_A_ROW = 8
"""After so many steps, held outputs are given although more steps have arrived."""
PACKED_FROM_OUTPUTS = 2_000
"""Once so many outputs are held, further ones are packed.

To pack an output and to unpack it takes 20 us. So a short delay is worked off without packing.
"""
_SIZE_BYTES = 8


def deliver_fairly(llm: EngineClient) -> None:
    """Let a client's output handler take its outputs from ``FairOutputs`` from now on."""
    # Patch fair-outputs: vLLM handles outputs in the order in which they came (since 0.11;
    # v1/engine/async_llm.py, output_handler). It may go when a new request no longer waits there
    # for the log probabilities of others. A vLLM without this method keeps its own order.
    if hasattr(llm, "engine_core"):
        llm.engine_core.get_output_async = FairOutputs(llm).take


class FairOutputs:
    """Takes the outputs of EngineCore, and gives them to vLLM's output handler.

    EngineCore sends a message for each of its steps, with the outputs for all requests. It does not
    wait for the handler. With log probabilities it can be seconds ahead. In vLLM's order, the first
    token of a new request would wait for all of that. So outputs with log probabilities are held
    back then. Each request gets one of them in turn, and all other outputs go first.

    Args:
        llm: the engine's client, before it has taken any output.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._receive = llm.engine_core.get_output_async
        # The held outputs of each request, in the order of their turns.
        self._held: dict[str, _Held] = {}
        self._held_count = 0
        self._packer = _make_packer()
        # Messages taken since held outputs were given.
        self._taken_in_a_row = 0

    async def take(self) -> Any:
        """Wait for outputs, and return them in a message of vLLM's type.

        Raises:
            Exception: vLLM's own exception.
        """
        # The handler itself waits only if no outputs are there. Other tasks, such as a
        # cancellation, must run although it has fallen behind.
        await asyncio.sleep(0)
        arrived = self._llm.engine_core.outputs_queue.qsize()
        # Held outputs go last, but not so late that they never go.
        if not arrived or self._taken_in_a_row >= STEPS_IN_A_ROW:
            self._taken_in_a_row = 0
            held = self._next_held()
            if held is not None:
                return held
        message = await self._receive()
        has_fallen_behind = bool(self._held) or arrived > 1
        if has_fallen_behind:
            self._hold_back(message)
            self._taken_in_a_row += 1
        return message

    def _hold_back(self, message: Any) -> None:
        """Move the outputs with log probabilities from a message to the held ones."""
        # `_next_held` fills copies of this message with the outputs that are held here.
        emptied = copy.copy(message)
        emptied.outputs = []
        # The handler gets the step's figures once, with the outputs that stay in the message.
        emptied.scheduler_stats = None
        stay = []
        for output in message.outputs:
            request = output.request_id
            # The outputs of a request keep their order, so they wait behind held ones.
            must_wait = _has_log_probabilities(output) or request in self._held
            if not must_wait:
                stay.append(output)
                continue
            held = self._held.setdefault(request, _Held(self._packer))
            held.append(emptied, output, pack=self._held_count >= PACKED_FROM_OUTPUTS)
            self._held_count += 1
        message.outputs = stay

    def _next_held(self) -> Any:
        """Remove the next held outputs, and return them in a message; None if there are none.

        They are all of one step, one for each request, and at most ``SLICE_OUTPUTS``.
        """
        emptied = None
        outputs: list[Any] = []
        while self._held and len(outputs) < SLICE_OUTPUTS:
            # The request whose turn it is.
            request = next(iter(self._held))
            held = self._held[request]
            # vLLM, too, ignores the outputs of a request that has been aborted.
            if request not in self._llm.output_processor.request_states:
                del self._held[request]
                self._held_count -= len(held.messages)
                continue
            # vLLM takes all outputs of a message for outputs of the same time.
            is_of_another_step = emptied is not None and held.messages[0] is not emptied
            if is_of_another_step:
                break
            emptied, output = held.popleft()
            outputs.append(output)
            self._held_count -= 1
            # The request goes to the end of the line, if it has more.
            del self._held[request]
            if held.messages:
                self._held[request] = held
        if emptied is None:
            return None
        filled = copy.copy(emptied)
        filled.outputs = outputs
        return filled


def _make_packer() -> Packer | None:
    """Return a packer, or None if this vLLM has a codec of another kind."""
    with contextlib.suppress(ImportError, AttributeError):
        return Packer()
    return None


class Packer:
    """Packs outputs as EngineCore sends them.

    With 20 log probabilities an output takes 0.25 kB, and 1.9 kB as the objects that vLLM makes of
    it.
    """

    def __init__(self) -> None:
        codec: Any = importlib.import_module("vllm.v1.serial_utils")
        output_type: Any = importlib.import_module("vllm.v1.engine").EngineCoreOutput
        # An output is packed into one part. By default, an array of 256 bytes or more would be a
        # part of its own.
        self._encoder = codec.MsgpackEncoder(size_threshold=1 << 32)
        self._decoder = codec.MsgpackDecoder(output_type)

    def pack(self, output: Any) -> bytes:
        """Return the output in one part."""
        part: bytes
        (part,) = self._encoder.encode(output)
        return part

    def unpack(self, packed: bytearray) -> Any:
        """Return a packed output. Its arrays are views of ``packed``."""
        return self._decoder.decode(packed)


class _Held:
    """The held outputs of one request.

    Packed ones are in one buffer. As objects, hundreds of thousands of them would lie between
    objects that live longer, and Python gives a megabyte back only when no object lives in it.

    Args:
        packer: packs outputs, if this vLLM's outputs can be packed.

    Attributes:
        messages: for each output, the message it came in, without any outputs.
    """

    def __init__(self, packer: Packer | None) -> None:
        self.messages: deque[Any] = deque()
        self._packer: Any = packer
        # Each output, or None for a packed one.
        self._outputs: deque[Any] = deque()
        # The packed outputs, each after its size in bytes.
        self._packed = bytearray()

    def append(self, message: Any, output: Any, *, pack: bool) -> None:
        """Add an output, packed if ``pack`` is set and packing makes it smaller.

        Args:
            message: the message it came in, without any outputs.
            output: the output.
            pack: whether to pack it.
        """
        # A prompt's log probabilities are a few large arrays, which stay as large.
        if pack and self._packer and output.new_prompt_logprobs_tensors is None:
            packed = self._packer.pack(output)
            self._packed += len(packed).to_bytes(_SIZE_BYTES, "little")
            self._packed += packed
            output = None  # it is in `_packed`
        self.messages.append(message)
        self._outputs.append(output)

    def popleft(self) -> tuple[Any, Any]:
        """Remove the first output, and return its message and the output."""
        message = self.messages.popleft()
        output = self._outputs.popleft()
        # None: it is the first of the packed ones.
        if output is None:
            end = _SIZE_BYTES + int.from_bytes(self._packed[:_SIZE_BYTES], "little")
            output = self._packer.unpack(self._packed[_SIZE_BYTES:end])
            del self._packed[:end]
        return message, output


def _has_log_probabilities(output: Any) -> bool:
    return output.new_logprobs is not None or output.new_prompt_logprobs_tensors is not None
