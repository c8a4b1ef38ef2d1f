"""Greedy decoding by transformers: ``python reference_transformers.py REQUEST.json ANSWER.json``.

The request holds a model's folder, prompts and a number of tokens; the answer, for each prompt, the new token ids with
their log probabilities, those of the prompt's own tokens from the second on, and the text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(request_file: str, answer_file: str) -> None:
    """Answer one prompt after the other, so that no padding plays a part."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
    answer = []
    for prompt in request["prompts"]:
        given = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            made = model.generate(
                torch.tensor([given]),
                attention_mask=torch.ones(1, len(given), dtype=torch.long),
                do_sample=False,
                max_new_tokens=request["max_tokens"],
            )[0]
            sure = model(made[None]).logits[0].log_softmax(-1)
        every = [float(sure[place - 1, int(made[place])]) for place in range(1, len(made))]
        new = made[len(given) :].tolist()
        answer.append(
            {
                "token_ids": new,
                "logprobs": every[len(given) - 1 :],
                "prompt_logprobs": every[: len(given) - 1],
                "text": tokenizer.decode(new, skip_special_tokens=True),
            }
        )
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
