"""Choose a model for a machine that reaches no model hub: the smoke run's stand-in."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_env.base import report
from vllm_env.base.filesystem import file_sha256, give_tree, owner_of, write_whole
from vllm_env.base.workspace import Workspace
from vllm_env.model.files import ENGINE_ARGS_NAME, EXAMPLE_NAME

EXAMPLE_MODEL = "facebook/opt-125m"
"""The model that vllm_engine_args.example.json names."""
STANDIN_NAME = "standin"
_POOLING = ("embed", "embedding", "classify", "score", "reward")


def is_fetchable(workspace: Workspace, model: str) -> bool:
    """Return whether vLLM would find a model by its name, in the hub's cache or on the hub."""
    # 1) The hub's cache on this machine. huggingface_hub reads these variables, and the narrower
    # one wins. An interrupted download has no config.json.
    variables = os.environ
    caches = variables.get("XDG_CACHE_HOME") or "~/.cache"
    home = variables.get("HF_HOME") or f"{caches}/huggingface"
    hub = Path(variables.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    folder = hub / f"models--{model.replace('/', '--')}"
    if any(folder.glob("snapshots/*/config.json")):
        return True
    # 2) The hub itself.
    if variables.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    return workspace.network.answers(variables.get("HF_ENDPOINT") or "https://huggingface.co")


def own_model(
    workspace: Workspace, own: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Mapping[str, Any]]:
    """Return a model's own files for the smoke run, and report the choice.

    Args:
        workspace: for the network.
        own: JSON objects by the path of their file; the first one holds the engine arguments.
            They name folders in the model's folder by absolute path.

    Returns:
        ``own``, or an empty mapping if this machine cannot serve the model.
    """
    arguments = next(iter(own.values()))
    model = str(arguments.get("model", ""))
    reason = _reason_against(workspace, model, arguments)
    choice = f"{model} with the model's own engine arguments"
    if reason:
        choice = f"its stand-in, not {model or 'the model'}: {reason}"
    report.note(
        f"the smoke run serves {choice} (--smoke-model serves another, --no-smoke-run none)"
    )
    return {} if reason else own


def _reason_against(workspace: Workspace, model: str, arguments: Mapping[str, Any]) -> str:
    """Return why this machine cannot serve a model, or an empty string."""
    if not model:
        return "the engine arguments name no model"
    # The smoke run checks that each prompt gets a text.
    if arguments.get("runner") == "pooling" or arguments.get("task") in _POOLING:
        return "it does not answer with text"
    # Path.is_dir() raises if a folder may not be entered; os.path.isdir() returns False.
    if os.path.isdir(model):  # noqa: PTH112
        return ""
    if model.startswith(("/", ".")):
        return f"there is no folder {model}"
    return "" if is_fetchable(workspace, model) else "no model hub answers"


def offer_standin(template: Path, model: Path, standin: Path, arguments: Mapping[str, Any]) -> bool:
    """Let a model with the example's engine arguments serve a copy of the stand-in.

    Return whether it serves the copy now. Nothing changes if the user has edited the engine
    arguments.
    """
    file = model / ENGINE_ARGS_NAME
    if not file.is_file() or file.read_bytes() != (template / EXAMPLE_NAME).read_bytes():
        return False
    # The copy is in the model's folder, so its name holds wherever the repository is mounted.
    copy = model / STANDIN_NAME
    if not os.path.lexists(copy):
        shutil.copytree(standin, copy)
        give_tree(copy, owner_of(model))
    # Another folder or link with that name is the user's.
    elif copy.is_symlink() or _digests(copy) != _digests(standin):
        return False
    write_whole(file, json.dumps({**arguments, "model": STANDIN_NAME}, indent=4) + "\n")
    return True


def _digests(folder: Path) -> dict[Path, str]:
    """Return the SHA-256 of each file below a folder, by its path there."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {file.relative_to(folder): file_sha256(file) for file in files}
