"""Embeddings by transformers: ``python reference_embedding.py REQUEST.json ANSWER.json``.

The request holds a model's folder and strings; the answer, for each string, its token ids and the normalised vector of its
first token, which is what vLLM takes of a BERT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(request_file: str, answer_file: str) -> None:
    """Embed all strings."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    model = AutoModel.from_pretrained(request["model"], dtype=torch.float32).eval()
    answer = []
    for text in request["texts"]:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            first = model(input_ids=torch.tensor([ids])).last_hidden_state[0, 0]
        answer.append({"token_ids": ids, "vector": torch.nn.functional.normalize(first, dim=-1).tolist()})
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
