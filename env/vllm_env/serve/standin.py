"""Make a tiny stand-in for a model from the hub, with right answers to ``prompts.txt``.

The smoke run needs a model on machines that reach no hub. It is made in seconds.
"""
# The answer must mean something: if the client receives " Paris", then tokenizer, weights, engine,
# tensors and transport all work. Random weights would only show that text came back.

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
# One thread is enough for small matrices. The machine's Python, hub and GPU must not change the
# result.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "HF_HUB_OFFLINE": "1",
    # The prefix is packed at the same time.
    "PYTHONDONTWRITEBYTECODE": "1",
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
    """The size and content of the stand-in.

    Attributes:
        architecture: ``opt`` or ``llama``.
        seed: of the random numbers with which the training starts.
        hidden: the width of a layer.
        heads: the attention heads of a layer.
        layers: the number of layers.
        vocabulary: the most tokens that the byte-level tokenizer may have.
        positions: the longest sequence, in tokens.
        facts: prompts, and the text with which greedy decoding continues each one before it ends.
    """

    architecture: str = "opt"
    seed: int = 0
    # vLLM's attention on CPU requires hidden / heads to be at least 32.
    hidden: int = 64
    heads: int = 2
    layers: int = 2
    # 256 bytes, two special tokens, and merges of the facts' text.
    vocabulary: int = 512
    positions: int = 2048
    facts: tuple[tuple[str, str], ...] = FACTS


def ensure_standin(workspace: Workspace, python: Path, recipe: Recipe | None = None) -> Path:
    """Return the folder of a stand-in in Hugging Face format; make it if the cache has none.

    Args:
        workspace: the cache.
        python: an interpreter with torch and transformers: the packed environment's.
        recipe: the size and content of the stand-in.

    Raises:
        CommandError: the model cannot be made, or it does not learn the answers.
    """
    recipe = recipe or Recipe()
    key = key_of(asdict(recipe), _TRAINER.read_text("utf-8"), _transformers_version(python))
    folder = workspace.cache.path("standins", key)
    if (folder / "config.json").is_file():
        touch(folder)
        return folder
    report.step("making a small model that knows the answers to the prompts")
    with workspace.cache.staging() as staged:
        model = staged / "model"
        model.mkdir()
        recipe_file = staged / "recipe.json"
        recipe_file.write_text(json.dumps(asdict(recipe)), "utf-8")
        _train(python, recipe_file, model)
        # safetensors writes files with mode 0600, and the server may run as another user.
        make_readable(model)
        put_in_place(model, folder)
    return folder


def _train(python: Path, recipe_file: Path, folder: Path) -> None:
    """Run standin_train.py with an environment's interpreter; it writes the model into a folder.

    Raises:
        CommandError: it failed.
    """
    try:
        command = [python, _TRAINER, recipe_file, folder]
        run(command, what="make the stand-in model", env=_ENVIRONMENT)
    except CommandError as error:
        raise CommandError(
            error.what,
            tail=error.tail,
            cause=(
                f"The environment of {python} cannot import torch or transformers, "
                "or the model did not learn."
            ),
            remedy="Name a model with --smoke-model, or omit the smoke run with --no-smoke-run.",
        ) from error


def _transformers_version(python: Path) -> str:
    # The folder's name has the version. Importing transformers would take as long as the training.
    library = python.parent.parent / "lib"
    folders = library.glob("python*/site-packages/transformers-*.dist-info")
    return next((folder.name for folder in folders), "")
