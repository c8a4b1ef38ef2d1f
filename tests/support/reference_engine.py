"""vLLM's engine in process: ``python reference_engine.py REQUEST.json ANSWER.json``.

The request holds engine arguments and a list of prompts with sampling parameters; the answer, for each prompt, the
completions in the order of their index.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(request_file: str, answer_file: str) -> None:
    """Answer all prompts in one batch."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no second import of vLLM, no process to leave behind
    from vllm import LLM, SamplingParams

    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    engine = LLM(**request["engine_args"])
    prompts = [item["prompt"] for item in request["prompts"]]
    parameters = [SamplingParams(**item["parameters"]) for item in request["prompts"]]
    found = engine.generate(prompts, parameters, use_tqdm=False)
    answer = [
        [
            {"text": one.text, "token_ids": list(one.token_ids), "finish_reason": one.finish_reason}
            for one in sorted(output.outputs, key=lambda one: one.index)
        ]
        for output in found
    ]
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
