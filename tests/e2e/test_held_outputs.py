"""An output that is held back is afterwards what the real vLLM has received."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from support.repositories import CHECKOUT

if TYPE_CHECKING:
    from support.serving import Parts

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# In an interpreter of the environment: outputs as EngineCore sends them are received, held back, and given.
_HOLD = """
import asyncio, json, sys
from types import SimpleNamespace
import numpy as np, torch
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
sys.path.insert(0, sys.argv[1])
from triton_vllm.vllm_api import outputs

packed = []

class Packer(outputs.Packer):
    def pack(self, output):
        packed.append(output.request_id)
        return super().pack(output)

outputs.PACKED_FROM_OUTPUTS, outputs.Packer = 1, Packer

def numbers(rows, wide):
    values = np.full((rows, wide), -0.5, np.float32)
    values[0, 0] = float("-inf")
    return [np.arange(rows * wide).reshape(rows, wide), values, np.arange(rows)]

def lists(wide):
    return LogprobsLists(*numbers(1, wide))

prompt = LogprobsTensors(*map(torch.from_numpy, numbers(1700, 21)))
event = EngineCoreEvent(EngineCoreEventType.SCHEDULED, 1.5)
sent = [
    EngineCoreOutput("first", [0], lists(21)),
    EngineCoreOutput("prompt", [1], lists(21), prompt),
    EngineCoreOutput("end", [2], lists(21), finish_reason=FinishReason.STOP, stop_reason="\u00e9", events=[event]),
    EngineCoreOutput("wide", [3, 4], lists(300), stop_reason=7, trace_headers={"a": "b"}),
    EngineCoreOutput("experts", [5], lists(1), routed_experts=np.arange(600).reshape(2, 300)),
    EngineCoreOutput("transfer", [], lists(1), kv_transfer_params={"blocks": [1, 2]}),
]
queue = asyncio.Queue()
core = SimpleNamespace(get_output_async=queue.get, outputs_queue=queue)
states = {output.request_id for output in sent}
outputs.deliver_fairly(SimpleNamespace(engine_core=core, output_processor=SimpleNamespace(request_states=states)))
encode, decode = MsgpackEncoder(1 << 32).encode, MsgpackDecoder(EngineCoreOutputs).decode
for output in sent:
    queue.put_nowait(decode(encode(EngineCoreOutputs(outputs=[output]))))

async def take():
    given = []
    while len(given) < len(sent):
        given += (await core.get_output_async()).outputs
    return given

given = {output.request_id: output for output in asyncio.run(take())}
same = [output.request_id for output in sent if encode(given[output.request_id]) == encode(output)]
writable = all(given[name].new_logprobs.logprobs.flags.writeable for name in packed)
print(json.dumps([same, packed, writable]))
"""


def test_held_outputs_are_given_as_they_were_received(parts: Parts) -> None:
    """With arrays of any size, and what only some outputs have. Arrays can be written to, as torch wants it."""
    done = subprocess.run(
        [parts.environment / "bin/python", "-c", _HOLD, str(CHECKOUT / "model_repository/vllm/1")],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    same, packed, writable = json.loads(done.stdout.splitlines()[-1])
    assert same == ["first", "prompt", "end", "wide", "experts", "transfer"]
    assert packed == ["end", "wide", "experts", "transfer"]
    assert writable
