"""Send attacks: a process of its own, whose work must not delay the neighbour's clock.

It reads one attack per line from stdin, sends it, and writes what came of it per line to stdout,
both as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

# This file is a program, which does not find the package harness by itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.attacks import Attack
from harness.shapes import SHAPES, make_prompt
from loadtest.backends import client_for
from loadtest.endpoint import Endpoint
from loadtest.record import Outcome, Record, Request

# A piece with log probabilities is one long line.
_LINE_BYTES = 64 << 20
# The line of the empty chunk that ends an answer. Triton leaves the connection open.
_LAST_CHUNK = b"0\r\n"
_PATH = "/v2/models/vllm/generate_stream"


async def send(attack: Attack, client: Any, http: int, shape: str) -> dict[str, Any]:
    """Send all requests of an attack; return the ends of its requests and the first reason."""
    source = random.Random(attack.name)
    vocabulary = SHAPES[shape].vocabulary
    began = time.monotonic()
    records = []
    for index in range(attack.requests):
        prompt = make_prompt(source, attack.prompt_tokens, vocabulary)
        request = Request(
            index, prompt, attack.parameters, attack.stream, cancel_after=attack.leave_after
        )
        now = time.perf_counter()
        records.append(Record(request, due=now, sent=now))
    ask = _over_http(http) if attack.http else client.ask
    await asyncio.gather(*(ask(record.request, record) for record in records))
    for record in records:
        record.outcome = record.outcome or Outcome.ANSWERED
    ends = Counter(record.outcome.value for record in records if record.outcome)
    reason = next((record.reason for record in records if record.reason), "")
    return {"ends": dict(ends), "reason": reason[:300], "seconds": time.monotonic() - began}


def _over_http(port: int) -> Any:
    """Return what streams one request by Triton's generate endpoint."""

    async def ask(request: Request, record: Record) -> None:
        parameters = json.dumps(request.parameters)
        fields = {"text_input": request.prompt, "stream": True, "sampling_parameters": parameters}
        body = json.dumps(fields).encode()
        head = f"POST {_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LINE_BYTES)
        writer.write(head.encode() + body)
        pieces = 0
        async for line in reader:
            if b'"error"' in line[:100]:
                record.fail("refused", line.decode(errors="replace"))
                break
            if line == _LAST_CHUNK:
                break
            pieces += line.startswith(b"data:")
            if pieces == request.cancel_after:
                record.outcome = Outcome.CANCELLED
                break
        # The client leaves without a word.
        writer.transport.abort()

    return ask


async def main(grpc: int, http: int, shape: str) -> None:
    """Serve attacks until stdin ends."""
    loop = asyncio.get_running_loop()
    async with client_for("triton")(Endpoint(f"127.0.0.1:{grpc}", "vllm")) as client:
        await client.require_model(("text_input",))
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await send(Attack(**json.loads(line)), client, http, shape)))
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
