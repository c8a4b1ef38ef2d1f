"""Makes a tiny vision-language model: ``python vision_maker.py REQUEST.json ANSWER.json``.

The request names a folder with a tokenizer to start from and the folder to make: a BLIP-2 with random weights. Of the
models that vLLM 0.32 loads without torchvision, which an environment for CPU has not, it is the smallest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

IMAGE = "<image>"
SIDE, PATCH = 56, 14  # pixels
QUERIES = 8  # tokens that a picture becomes


def main(request_file: str, answer_file: str) -> None:
    """Make it."""
    import torch
    from tokenizers import Tokenizer
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        BlipImageProcessor,
        PreTrainedTokenizerFast,
    )

    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    folder = Path(request["folder"])
    raw = Tokenizer.from_file(str(Path(request["tokenizer"]) / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    width = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config={**width, "image_size": SIDE, "patch_size": PATCH},
        qformer_config={**width, "encoder_hidden_size": 64, "vocab_size": 64},
        text_config={
            "model_type": "opt",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        num_query_tokens=QUERIES,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config).eval()
    with torch.no_grad():  # so strong that two pictures cannot lead to the same answer
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.2)
        model.query_tokens.normal_(0, 1.0)
    model.save_pretrained(folder)
    images = BlipImageProcessor(size={"height": SIDE, "width": SIDE})
    Blip2Processor(images, tokenizer, num_query_tokens=QUERIES).save_pretrained(folder)
    Path(answer_file).write_text("{}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
