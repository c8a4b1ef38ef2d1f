"""The baseline without a server: vLLM's AsyncLLM, with the load generator in the same process.

The environment's Python runs this file. It reads one load per line from stdin, and writes one
measurement per line to stdout, both as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The environment's Python does not find the package harness by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.load import Client, run_load
from harness.shapes import count_tokens
from harness.workload import Load

if TYPE_CHECKING:
    from loadtest.record import Record, Request


class EngineClient:
    """A client that calls the engine directly."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine = engine
        self._name = name
        self._asked = 0

    async def ask(self, request: Request, record: Record) -> None:
        """Let the engine answer, and add each piece with its number of tokens to the record."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(**request.parameters, output_kind=kind)
        self._asked += 1
        request_id = f"{self._name}-{self._asked}"
        # vLLM has deprecated plain strings since 0.20 and logs a warning for each request. All
        # versions accept a dictionary.
        prompt = {"prompt": request.prompt}
        async for output in self._engine.generate(prompt, sampling, request_id):
            text = output.outputs[0].text
            record.add((text,), count_tokens(text))

    async def close(self) -> None:
        """See ``load.Client``."""


async def serve(arguments: dict[str, Any], replies: int) -> None:
    """Start the engine; then answer loads until stdin ends.

    Args:
        arguments: the engine arguments.
        replies: file descriptor for the measurements.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    os.write(replies, b'{"ready": true}\n')
    # One load is one line. It is read in a thread, because the engine's own tasks need the event
    # loop meanwhile.
    while line := await asyncio.to_thread(sys.stdin.readline):
        load = Load(**json.loads(line))
        # The names are part of the requests' ids, which must be unique.
        names = [f"{load.seed}-{number}" for number in range(load.in_flight)]
        clients: list[Client] = [EngineClient(engine, name) for name in names]
        reply = asdict(await run_load(clients, load))
        os.write(replies, json.dumps(reply).encode() + b"\n")
    engine.shutdown()


def main() -> None:
    """Run the worker."""
    # stdout is only for replies. Whatever vLLM and its processes print there goes to stderr.
    replies = os.dup(1)
    os.dup2(2, 1)
    work = serve(json.loads(sys.argv[1]), replies)
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


if __name__ == "__main__":
    main()
