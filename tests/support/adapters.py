"""Folders with LoRA adapters, and what loads them in place of vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

from support.engine_parts import Log
from triton_vllm.lora.config import Adapters
from triton_vllm.lora.copies import Copies
from triton_vllm.lora.store import AdapterStore

MOST = 2**31 - 1
"""vLLM keeps an adapter's number in 32 bits with a sign."""


def weights_in(folder):
    return Path(folder, "adapter_model.safetensors").read_text()


class Llm:
    """In place of AsyncLLM: knows which adapters it has been given, and what it has read of each."""

    def __init__(self):
        self.errored = False
        self.loads = []
        self.held = {}
        self.hangs = None

    async def add_lora(self, request):
        self.loads.append(request.lora_name)
        if self.hangs is not None:
            self.hangs.set()
            await asyncio.Event().wait()
        if request.lora_path.startswith("/"):
            weights = weights_in(request.lora_path)
            if weights == "broken":
                raise ValueError("no such layer in /secret/place")
            self.held[request.lora_int_id] = weights


class Folders:
    """The operator's directory with adapters `a` and `b`, one elsewhere that is `listed`, and one of a hub."""

    def __init__(self, place, shared=None):
        self.place, self.log = place / "directory", Log()
        self.write("a", "first")
        self.write("b", "second")
        self.write("../elsewhere", "third")
        listed = {"listed": place / "elsewhere", "hub": "org/name", "gone": place / "nowhere"}
        self.copies = Copies(shared)
        self.store = AdapterStore(Adapters(True, listed, self.place), self.copies, self.make, self.log)

    @staticmethod
    def make(name, number, path):
        assert 0 < number <= MOST
        return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)

    def write(self, name, weights):
        (self.place / name).mkdir(parents=True, exist_ok=True)
        (self.place / name / "adapter_config.json").write_text("{}")
        (self.place / name / "adapter_model.safetensors").write_text(weights)

    def copied(self):
        return sorted(map(weights_in, filter(Path.is_dir, self.copies._folder.iterdir())))


def read(version):
    return weights_in(version.request.lora_path)
