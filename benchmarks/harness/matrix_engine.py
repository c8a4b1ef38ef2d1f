"""vLLM's engine in process, for a row of ``gpu_matrix.py``: ``python matrix_engine.py < QUESTION``.

The environment's Python runs this file. The question is JSON: engine arguments, prompts and a kind.
The last line of stdout is the answer: for each prompt a list of numbers, from three runs that ask
the same in different batches. So their difference is the engine's difference from itself.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import wave
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def _prompt_logprobs(engine: Any) -> Callable[[list[str]], list[list[float]]]:
    """Return a function that asks for the log probabilities of the prompts' own tokens."""
    from vllm import SamplingParams

    # The greedy texts of dummy weights may differ: their log probabilities nearly tie.
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)

    def ask(prompts: list[str]) -> list[list[float]]:
        found = engine.generate(prompts, sampling, use_tqdm=False)
        return [
            # The first token has no log probability.
            [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]
            for output in found
        ]

    return ask


def _pooled(engine: Any, kind: str) -> Callable[[list[str]], list[list[float]]]:
    """Return a function that asks for embeddings or scores.

    A score is that of a cross-encoder for a prompt paired with the first one.

    Args:
        engine: vLLM's ``LLM``.
        kind: ``embedding`` or ``score``.
    """

    def embed(prompts: list[str]) -> list[list[float]]:
        found = engine.embed(prompts, use_tqdm=False)
        return [list(output.outputs.embedding) for output in found]

    def score(prompts: list[str]) -> list[list[float]]:
        return [
            [output.outputs.score for output in engine.score(prompt, prompts[0], use_tqdm=False)]
            for prompt in prompts
        ]

    return embed if kind == "embedding" else score


def _prompt(asked: str | dict[str, str]) -> Any:
    """Return a prompt for vLLM.

    Args:
        asked: a text; or a text with a picture or a recording in base64, by the keys ``text``,
            ``image`` and ``audio``.
    """
    if isinstance(asked, str):
        return asked
    data: dict[str, Any] = {}
    if "image" in asked:
        from PIL import Image

        data["image"] = Image.open(io.BytesIO(base64.b64decode(asked["image"])))
    else:
        import numpy

        with wave.open(io.BytesIO(base64.b64decode(asked["audio"]))) as sound:
            # 16-bit samples, which vLLM takes as numbers from -1 to 1, with their rate.
            samples = numpy.frombuffer(sound.readframes(sound.getnframes()), numpy.int16)
            data["audio"] = (samples.astype(numpy.float32) / 32768, sound.getframerate())
    return {"prompt": asked["text"], "multi_modal_data": data}


def main(question: str) -> None:
    """Start the engine, ask, and print the answer; see the module's docstring."""
    # stdout is only for the answer. Whatever vLLM and its processes print goes to stderr.
    replies = os.dup(1)
    os.dup2(2, 1)
    from vllm import LLM

    asked = json.loads(question)
    prompts: list[Any] = [_prompt(one) for one in asked["prompts"]]
    engine = LLM(**asked["arguments"])
    kind = asked["kind"]
    ask = _pooled(engine, kind) if kind in {"embedding", "score"} else _prompt_logprobs(engine)
    if kind == "score":
        # Each score is asked for by itself, so there are no batches of other sizes.
        runs = [ask(prompts), ask(prompts)]
    else:
        # Batches of other sizes use other kernels and other orders of additions.
        alone = [ask([prompt])[0] for prompt in prompts]
        together = ask(prompts)
        among_more = ask(prompts * 4)[: len(prompts)]
        runs = [alone, together, among_more]
    os.write(replies, json.dumps(runs).encode() + b"\n")
    # On a GPU, Python's own end often aborts: "terminate called without an active exception" (vLLM
    # 0.33, 30 November 2026).
    engine.llm_engine.engine_core.shutdown()
    os._exit(0)


if __name__ == "__main__":
    # Not an argument, which may have at most 128 KiB: a question may have pictures.
    main(sys.stdin.read())
