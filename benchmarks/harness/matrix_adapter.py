"""Write the LoRA adapter that a row of ``gpu_matrix.py`` asks with."""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_adapter(config: Mapping[str, object], folder: Path) -> Path:
    """Write a LoRA adapter ``a`` with random weights; return the folder of the adapters.

    Args:
        config: the ``config.json`` of the base model, of a Llama shape.
        folder: the folder of the adapters.
    """
    rank = 8
    # The adapter changes o_proj, which maps the values of all heads to the hidden size. The values
    # of ``config`` have no types, hence int(str()).
    outputs = int(str(config["hidden_size"]))
    inputs = int(str(config["num_attention_heads"])) * int(str(config["head_dim"]))
    source = random.Random(8)
    # What the file safetensors has in front of the numbers: type, shape and place of each tensor.
    header: dict[str, Any] = {}
    data = bytearray()
    for layer in range(int(str(config["num_hidden_layers"]))):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        # Each shape is the number of rows and of columns, in this order.
        for part, shape in (("lora_A", [rank, inputs]), ("lora_B", [outputs, rank])):
            values = [source.uniform(-1, 1) for _ in range(shape[0] * shape[1])]
            begin = len(data)
            # e is the half precision of F16.
            data += struct.pack(f"<{len(values)}e", *values)
            header[f"{name}.{part}.weight"] = {
                "dtype": "F16",
                "shape": shape,
                "data_offsets": [begin, len(data)],
            }
    adapter = folder / "a"
    adapter.mkdir(parents=True, exist_ok=True)
    adapter_config = {
        "peft_type": "LORA",
        "r": rank,
        # So large, because the adapter must change answers: with dummy weights, attention adds 1e-6
        # to a residual of 1e-3.
        "lora_alpha": 8192,
        "target_modules": ["o_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(adapter_config), encoding="utf-8")
    encoded = json.dumps(header).encode()
    # safetensors: the header's length, the header, and the numbers.
    content = struct.pack("<Q", len(encoded)) + encoded + bytes(data)
    (adapter / "adapter_model.safetensors").write_bytes(content)
    return folder
