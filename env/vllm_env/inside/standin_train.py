"""Makes a tiny language model that knows a few sentences.

    python standin_train.py RECIPE.json FOLDER

serve/standin.py writes the recipe. It runs this file in the interpreter of a packed environment,
because this needs torch and transformers.
"""

import json
import sys
from pathlib import Path
from typing import Any

MAX_STEPS = 1500
CHECK_EVERY = 25  # steps
LEARNING_RATE = 3e-3
# Each token of an answer must be this likely. Then neither another attention kernel nor half
# precision changes an answer.
MIN_PROBABILITY = 0.95
PAD = "<pad>"
END = "</s>"


class TrainingError(Exception):
    """The model does not give the answers that it was taught."""


def main(recipe_file: str, folder: str) -> None:
    """Train a model and save it; the smoke run that serves it checks every answer."""
    import torch

    # Matrices this small are slower on several threads. One thread gives the same sums every time.
    torch.set_num_threads(1)
    recipe = json.loads(Path(recipe_file).read_text(encoding="utf-8"))
    torch.manual_seed(recipe["seed"])
    out = Path(folder)
    tokenizer = make_tokenizer(recipe, out)
    model = make_model(
        recipe, vocabulary=tokenizer.get_vocab_size(), end=tokenizer.token_to_id(END)
    )
    train(model, tokenizer, recipe["facts"])
    model.save_pretrained(out, safe_serialization=True)


def make_tokenizer(recipe: dict[str, Any], out: Path) -> Any:
    """Make a byte-level BPE, which can encode any text; write its two files and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe["vocabulary"],
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [prompt + answer for prompt, answer in recipe["facts"]]
    tokenizer.train_from_iterator(texts * 2, trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    # transformers 4 and 5 would save different class names. Both know this one.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": recipe["positions"],
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    text = json.dumps(settings, indent=1) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return tokenizer


def make_model(recipe: dict[str, Any], *, vocabulary: int, end: int) -> Any:
    """Return an untrained OPT or Llama of the recipe's size.

    ``vocabulary`` is the number of tokens, ``end`` the token that ends a text.
    """
    hidden = recipe["hidden"]
    shared = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": recipe["layers"],
        "num_attention_heads": recipe["heads"],
        "max_position_embeddings": recipe["positions"],
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": 0,  # PAD is the first special token
    }
    # Only the one that is needed: each import takes some tenths of a second.
    if recipe["architecture"] == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        llama = LlamaConfig(intermediate_size=2 * hidden, tie_word_embeddings=True, **shared)
        return LlamaForCausalLM(llama)
    from transformers import OPTConfig, OPTForCausalLM

    opt = OPTConfig(ffn_dim=2 * hidden, word_embed_proj_dim=hidden, dropout=0.0, **shared)
    return OPTForCausalLM(opt)


def train(model: Any, tokenizer: Any, facts: list[list[str]]) -> None:
    """Train until each token of each answer is likely enough (``MIN_PROBABILITY``).

    Each of ``facts`` is a prompt and the answer to it.

    Raises:
        TrainingError: ``MAX_STEPS`` were not enough.
    """
    import torch

    end = tokenizer.token_to_id(END)
    # A row has the tokens of a prompt, its answer and the end. The answer begins at its start.
    rows = [[*tokenizer.encode(prompt + answer).ids, end] for prompt, answer in facts]
    starts = [len(tokenizer.encode(prompt).ids) for prompt, _ in facts]
    # Fill up shorter rows. The mask has a 1 for each of their own tokens.
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    # transformers leaves labels of -100 out of the loss.
    labels = tokens.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    lowest = 0.0
    for step in range(1, MAX_STEPS + 1):
        result = model(input_ids=tokens, attention_mask=mask, labels=labels)
        if step % CHECK_EVERY == 0:
            lowest = lowest_probability(result.logits.detach(), rows, starts)
            if lowest >= MIN_PROBABILITY:
                return
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
    raise TrainingError(
        f"after {MAX_STEPS} steps a token of an answer has probability {lowest:.2f}, "
        f"not {MIN_PROBABILITY}"
    )


def lowest_probability(logits: Any, rows: list[list[int]], starts: list[int]) -> float:
    """Return the probability of the least likely token of all answers.

    Args:
        logits: the model's output, of the shape (row, position, token).
        rows: the tokens of each prompt and its answer.
        starts: the position of each answer's first token.
    """
    # The logits at a position are those of the next token.
    probabilities = logits.softmax(-1)
    return min(
        float(probabilities[number, position - 1, row[position]])
        for number, (row, start) in enumerate(zip(rows, starts, strict=True))
        for position in range(start, len(row))
    )


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except TrainingError as error:
        sys.exit(f"error: {error}")
