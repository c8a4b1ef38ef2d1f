"""Makes LoRA adapters, an embedding model and a cross-encoder: ``python model_maker.py REQUEST.json ANSWER.json``.

The request names the folder of a Llama and the one to make, with two adapters for it and two BERTs; or that of a model that
chats. The same request makes the same bytes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

RANK = 8
PROJECTIONS = ("q_proj", "v_proj")


def main(request_file: str, answer_file: str) -> None:
    """Make all of them."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    if "chat" in request:
        make_chat(Path(request["chat"]), request)
        Path(answer_file).write_text("{}", encoding="utf-8")
        return
    base, made = Path(request["llama"]), Path(request["made"])
    for seed, name in enumerate(("adapter_one", "adapter_two")):
        make_adapter(base, made / name, seed)
    make_bert(base, made / "embedding", scores=False)
    make_bert(base, made / "cross_encoder", scores=True)
    Path(answer_file).write_text("{}", encoding="utf-8")


def make_adapter(base: Path, folder: Path, seed: int) -> None:
    """Write an adapter in PEFT's layout, strong enough to change every answer."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    size = config["hidden_size"]
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name in PROJECTIONS:
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(RANK, size, generator=random)
            weights[f"{key}.lora_B.weight"] = torch.randn(size, RANK, generator=random)
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "target_modules": list(PROJECTIONS),
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def make_bert(base: Path, folder: Path, *, scores: bool) -> None:
    """Write a BERT with random weights and the tokenizer of ``base``; one that scores has a head with a single label."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(0)
    vocabulary = json.loads((base / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=256,
        initializer_range=0.5 if scores else 0.02,  # else all pairs score nearly the same
        num_labels=1 if scores else 2,
    )
    (BertForSequenceClassification if scores else BertModel)(config).eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder / name)


def make_chat(folder: Path, request: dict[str, Any]) -> None:
    """Train a Llama whose answers think and call tools, with a chat template and defaults of its own.

    The request has the template, what is one token each, generation_config.json, conversations with their answers, and
    perhaps the number of positions.
    """
    import torch
    from tokenizers import AddedToken

    sys.path.insert(0, str(Path(request["trainer"]).parent))
    import standin_train

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    recipe = {"vocabulary": 512, "hidden": 128, "heads": 2, "layers": 2, "architecture": "llama"}
    recipe |= {"positions": request.get("positions", 2048), "facts": request["facts"]}
    tokenizer = standin_train.make_tokenizer(recipe, folder)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in request["tokens"]])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = folder / "tokenizer_config.json"
    values = json.loads(settings.read_text(encoding="utf-8")) | {"chat_template": request["template"]}
    settings.write_text(json.dumps(values), encoding="utf-8")
    end = tokenizer.token_to_id(standin_train.END)
    model = standin_train.make_model(recipe, vocabulary=tokenizer.get_vocab_size(), end=end)
    standin_train.train(model, tokenizer, request["facts"])
    model.eval().save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").write_text(json.dumps(request["defaults"] | {"eos_token_id": end}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
