"""An output that is held back is afterwards what the real vLLM has received."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from support.serving import Parts

pytestmark = pytest.mark.e2e

# In an interpreter of the environment: outputs as EngineCore sends them are received, held back, and given.
_HOLD = """
import asyncio, json, sys
from types import SimpleNamespace
import numpy as np, torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
sys.path.insert(0, sys.argv[1])
from triton_vllm.vllm_api import outputs

outputs.WHOLE = 2
def numbers(rows, wide):
    return [np.arange(rows * wide).reshape(rows, wide), np.full((rows, wide), -0.5, np.float32), np.arange(rows)]

def lists(wide):
    return LogprobsLists(*numbers(1, wide))

prompt = LogprobsTensors(*map(torch.from_numpy, numbers(1700, 21)))
sent = [
    EngineCoreOutput("prompt", [1], lists(21), prompt),
    EngineCoreOutput("prompt", [2], lists(21), finish_reason=FinishReason.STOP, stop_reason="\u00e9"),
    EngineCoreOutput("wide", [3], lists(300)),
    EngineCoreOutput("transfer", [], lists(1), kv_transfer_params={"blocks": [1, 2]}),
]
queue = asyncio.Queue()
core = SimpleNamespace(get_output_async=queue.get, outputs_queue=queue)
states = {output.request_id for output in sent}
outputs.deliver_fairly(SimpleNamespace(engine_core=core, output_processor=SimpleNamespace(request_states=states)))
encode, decode = MsgpackEncoder(1 << 32).encode, MsgpackDecoder(EngineCoreOutputs).decode
for output in sent * 2:
    queue.put_nowait(decode(encode(EngineCoreOutputs(outputs=[output]))))

async def take():
    given = []
    while len(given) < 2 * len(sent):
        given += (await core.get_output_async()).outputs
    return given

given = asyncio.run(take())
raw = {name: [encode(o) for o in sent * 2 if o.request_id == name] for name in states}
print(json.dumps({name: raw[name] == [encode(o) for o in given if o.request_id == name] for name in states}))
"""


def test_held_outputs_are_given_as_they_were_received(parts: Parts) -> None:
    """With arrays of any size, the prompt's log probabilities, and what only some outputs have."""
    done = subprocess.run(
        [parts.environment / "bin/python", "-c", _HOLD, str(CHECKOUT / "model_repository/vllm/1")],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"prompt": True, "wide": True, "transfer": True}
