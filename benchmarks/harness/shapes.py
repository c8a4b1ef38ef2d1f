"""Make checkpoints of a given shape without weights, for engines that load dummy weights.

A checkpoint is a ``config.json`` and a WordLevel tokenizer. Each token is one word that starts with
``MARK``. So the number of tokens in a text is the number of marks in it, whichever target wrote the
text and however it was split.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping
    from pathlib import Path

MARK = "w"


@dataclass(frozen=True)
class Shape:
    """A model's architecture, from which vLLM makes dummy weights.

    Attributes:
        vocabulary: number of tokens.
        positions: longest prompt with its answer, in tokens.
        config: the checkpoint's ``config.json``.
        specials: the last tokens of the vocabulary, which are no words.
        template: the chat template.
        files: more JSON files of the checkpoint.
        has_weights: whether it needs real random weights. Dummy ones are so small that a picture
            hardly changes an answer.
    """

    vocabulary: int
    positions: int
    config: Mapping[str, object]
    specials: tuple[str, ...] = ()
    template: str = ""
    files: Mapping[str, object] = field(default_factory=dict)
    has_weights: bool = False

    @property
    def words(self) -> int:
        """Return the number of tokens that are words."""
        return self.vocabulary - len(self.specials)


def _opt(*, hidden: int, heads: int, layers: int, vocabulary: int, positions: int) -> Shape:
    """Return the shape of an OPT model with these sizes."""
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "ffn_dim": 4 * hidden,
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "vocab_size": vocabulary,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }
    return Shape(vocabulary, positions, config)


_LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}

SHAPES = {
    # vLLM's attention on a CPU needs heads of at least 32 values: 64 / 2.
    "tiny-opt": _opt(hidden=64, heads=2, layers=2, vocabulary=2048, positions=8192),
    # OPT-125M's vocabulary and positions, small enough for two cores.
    "small-opt": _opt(hidden=64, heads=2, layers=2, vocabulary=50272, positions=2048),
    "opt-125m": _opt(hidden=768, heads=12, layers=12, vocabulary=50272, positions=2048),
    "llama-7b": Shape(vocabulary=32000, positions=4096, config=_LLAMA_7B),
}


def write_checkpoint(shape: Shape, folder: Path) -> Path:
    """Write ``config.json`` and the tokenizer of ``shape`` into ``folder``; return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {f"{MARK}{i}": i for i in range(shape.words)}
    specials = {token: shape.words + i for i, token in enumerate(shape.specials)}
    # How a special token is found in a text.
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **flags, "special": True}
            for token, number in specials.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary | specials, "unk_token": f"{MARK}3"},
    }
    # transformers 4 and 5 both know only this class name.
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.positions,
        "clean_up_tokenization_spaces": False,
    }
    if shape.template:
        about["chat_template"] = shape.template
    files = {
        **shape.files,
        "config.json": shape.config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": about,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def make_prompt(source: random.Random, tokens: int, vocabulary: int) -> str:
    """Return a prompt of exactly ``tokens`` tokens."""
    # Random, so that no prefix cache holds it. Numbers below 4 are left out: among them are the
    # special tokens (padding, begin, end, unknown).
    numbers = source.choices(range(4, vocabulary), k=tokens)
    return " ".join(f"{MARK}{number}" for number in numbers)


def count_tokens(text: str) -> int:
    """Return the number of tokens in a text that a model of such a checkpoint has written."""
    return text.count(MARK)
