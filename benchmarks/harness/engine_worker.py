"""The baseline without a server: vLLM's AsyncLLM, with the load generator in the same process.

The environment's Python runs this file. It reads one load (JSON) per line from stdin and writes one measurement per line to
stdout.
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
from harness.workload import Load

if TYPE_CHECKING:
    from harness.load import Request
    from harness.metrics import Answer


class EngineClient:
    """A client that calls the engine directly."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine, self._name, self._asked = engine, name, 0

    async def ask(self, request: Request, answer: Answer) -> None:
        """See ``load.Client``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(
            max_tokens=request.answer_tokens, ignore_eos=True, temperature=0, output_kind=kind
        )
        self._asked += 1
        # vLLM has deprecated plain strings since 0.20 and logs a warning for each request. All versions accept a dictionary.
        async for output in self._engine.generate(
            {"prompt": request.prompt}, sampling, f"{self._name}-{self._asked}"
        ):
            answer.add(output.outputs[0].text)

    async def close(self) -> None:
        """See ``load.Client``."""


async def serve(arguments: dict[str, Any], replies: int) -> None:
    """Start the engine; then answer loads until stdin ends."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    os.write(replies, b'{"ready": true}\n')
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        load = Load(**json.loads(line))
        clients: list[Client] = [
            EngineClient(engine, f"{load.seed}-{i}") for i in range(load.in_flight)
        ]
        reply = asdict(await run_load(clients, load))
        os.write(replies, json.dumps(reply).encode() + b"\n")
    engine.shutdown()


def main() -> None:
    """Run the worker. stdout is only for replies, so vLLM's own output is sent to stderr."""
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
