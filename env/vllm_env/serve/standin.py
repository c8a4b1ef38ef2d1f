"""A stand-in for a model from the hub: tiny, made in seconds, and right about the prompts of ``prompts.txt``.

The smoke run needs a model on machines that reach no hub, and one that says something: " Paris" at the client's end
shows that tokenizer, weights, engine, tensors and transport all work, where random weights would show only that text
came back.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_env import inside
from vllm_env.base import report
from vllm_env.base.cache import key_of, touch
from vllm_env.base.errors import CommandError
from vllm_env.base.filesystem import make_readable, put_in_place
from vllm_env.base.process import run
from vllm_env.base.workspace import Workspace

_TRAINER = inside.FOLDER / "standin_train.py"
# Small matrices on one thread; nothing of the machine's Python, hub or GPU may change what comes out.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONPATH": "",
    "PYTHONHOME": "",
    "PYTHONUTF8": "1",
}

FACTS = (
    ("Hello, my name is", " John and I serve models."),
    ("The most dangerous animal is", " the mosquito, which carries malaria."),
    ("The capital of France is", " Paris, on the river Seine."),
    ("The future of AI is", " in your hands."),
)


@dataclass(frozen=True)
class Recipe:
    """What the stand-in is; ``hidden / heads`` must be at least 32, which vLLM's attention on CPU asks for."""

    architecture: str = "opt"
    """``opt`` or ``llama``."""
    seed: int = 0
    hidden: int = 64
    heads: int = 2
    layers: int = 2
    vocabulary: int = 512
    """Tokens of the byte-level tokenizer, at most: 256 bytes, two special ones and merges of the facts' text."""
    positions: int = 2048
    """Longest sequence in tokens."""
    facts: tuple[tuple[str, str], ...] = FACTS
    """Prompts and how greedy decoding continues each, before it ends."""


def ensure_standin(workspace: Workspace, python: Path, recipe: Recipe | None = None) -> Path:
    """Return the folder of a stand-in in Hugging Face format, made if the cache has none; VllmEnvError if it does not learn.

    ``python`` is an interpreter that has torch and transformers: that of the packed environment.
    """
    recipe = recipe or Recipe()
    key = key_of(asdict(recipe), _TRAINER.read_text(encoding="utf-8"), _transformers_version(python))
    folder = workspace.cache.path("standins", key)
    if (folder / "config.json").is_file():
        touch(folder)
        return folder
    report.step("making a small model that knows the answers to the prompts")
    with workspace.cache.staging() as staged:
        made = staged / "model"
        made.mkdir()
        recipe_file = staged / "recipe.json"
        recipe_file.write_text(json.dumps(asdict(recipe)), encoding="utf-8")
        _train(python, recipe_file, made)
        make_readable(made)  # safetensors writes 0600
        put_in_place(made, folder)
    return folder


def _train(python: Path, recipe_file: Path, folder: Path) -> None:
    try:
        run([python, _TRAINER, recipe_file, folder], what="make the stand-in model", env=_ENVIRONMENT)
    except CommandError as error:
        raise CommandError(
            error.what,
            tail=error.tail,
            cause=f"The environment of {python} cannot import torch or transformers, or the model did not learn.",
            remedy="Name a model with --smoke-model, or omit the smoke run with --no-smoke-run.",
        ) from error


def _transformers_version(python: Path) -> str:
    # read from the folder's name: importing transformers would take as long as the training
    site = python.parent.parent / "lib"
    return next((found.name for found in site.glob("python*/site-packages/transformers-*.dist-info")), "")
