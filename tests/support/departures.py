"""A gRPC client program whose streams end in the ways that users' streams end: ``python departures.py URL MOMENT ROUNDS``.

Each round opens eight streams at once on a connection of its own. It prints the number of streams that have reached their moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import tritonclient.grpc.aio as grpcclient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STREAMS = 8
MOMENTS = ("reads on", "leaves at the last data", "leaves at the final flag", "cancels", "closes the channel", "is killed")
ENDLESS = {"max_tokens": 60_000, "ignore_eos": True}
"""A request that is still going on when its client gives it up."""
LONGEST_ROUND_S = 120.0
"""On a busy machine."""


class Stream:
    """One request, and what its client reads of the answer."""

    def __init__(self, client: grpcclient.InferenceServerClient, parameters: dict[str, Any], *, empty_final: bool) -> None:
        self._parameters = parameters
        self._empty_final = empty_final
        self._answers = client.stream_infer(self._requests())

    async def _requests(self) -> AsyncIterator[dict[str, Any]]:
        inputs = []
        for name, value, kind in (
            ("text_input", b"The capital of France is", "BYTES"),
            ("stream", True, "BOOL"),
            ("sampling_parameters", json.dumps(self._parameters).encode(), "BYTES"),
        ):
            tensor = grpcclient.InferInput(name, [1], kind)
            tensor.set_data_from_numpy(np.array([value], dtype=np.object_ if kind == "BYTES" else np.bool_))
            inputs.append(tensor)
        yield {"model_name": "vllm", "inputs": inputs, "enable_empty_final_response": self._empty_final}

    async def first(self) -> None:
        """Wait for the first response."""
        await anext(self._answers)

    async def to_the_final_flag(self) -> None:
        """Leave the loop as most examples do."""
        async for result, error in self._answers:
            if error is not None:
                raise error
            if result.get_response().parameters["triton_final_response"].bool_param:
                break

    async def to_the_end(self) -> None:
        """Read until the server ends the stream."""
        async for _, error in self._answers:
            if error is not None:
                raise error

    async def cancel(self) -> None:
        """Leave at the first response, which may be the only one."""
        await self.first()
        self._answers.cancel()


STEPS = {
    "reads on": Stream.to_the_end,
    "leaves at the last data": Stream.cancel,
    "leaves at the final flag": Stream.to_the_final_flag,
    "cancels": Stream.cancel,
}


async def _round(url: str, moment: str) -> None:
    client = grpcclient.InferenceServerClient(url, channel_args=[("grpc.use_local_subchannel_pool", 1)])
    ends = moment in {"reads on", "leaves at the final flag"}
    parameters = {"temperature": 0, "max_tokens": 16} if ends else ENDLESS
    empty_final = moment != "leaves at the last data"  # a client that does not ask for the flag has nothing else to wait for
    if not empty_final:
        parameters = {"max_tokens": 1}
    streams = [Stream(client, parameters, empty_final=empty_final) for _ in range(STREAMS)]
    step = STEPS.get(moment, Stream.first)
    await asyncio.wait_for(asyncio.gather(*map(step, streams)), LONGEST_ROUND_S)
    if moment == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    await client.close()


def _kill_in_round(url: str) -> None:
    """Run a round in a process of its own, which is killed when it has its first responses."""
    child = os.fork()  # before this process has used gRPC, which would not survive it
    if child == 0:
        asyncio.run(_round(url, "is killed"))
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise SystemExit("a client got no responses")


def main(url: str, moment: str, rounds: int) -> None:
    """Run the rounds, one after the other."""
    for _ in range(rounds):
        if moment == "is killed":
            _kill_in_round(url)
        else:
            asyncio.run(_round(url, moment))
    print(rounds * STREAMS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
