"""Choose a model for a machine that reaches no model hub: the smoke run's stand-in instead of the example's model."""

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
    """Return whether vLLM would find a model by its name: in the hub's local cache, or because the hub answers."""
    # The place of huggingface_hub's cache.
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    if any((hub / f"models--{model.replace('/', '--')}").glob("snapshots/*/config.json")):
        return True
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return not offline and workspace.network.answers(
        os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    )


def own_model(
    workspace: Workspace, own: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Mapping[str, Any]]:
    """Return a model's own files for the smoke run, or an empty mapping if this machine cannot serve it; report the choice.

    The first entry of ``own`` holds the engine arguments. They name folders in the model's folder by absolute path.
    """
    arguments = next(iter(own.values()))
    model = str(arguments.get("model", ""))
    reason = ""
    if not model:
        reason = "it names none"
    elif arguments.get("runner") == "pooling" or arguments.get("task") in _POOLING:
        reason = "it answers with no text"
    elif os.path.isdir(model):  # noqa: PTH112 - returns False if a folder may not be entered
        pass
    elif model.startswith(("/", ".")):
        reason = f"there is no folder {model}"
    elif not is_fetchable(workspace, model):
        reason = "no model hub answers"
    which = (
        f"its stand-in, not {model}: {reason}"
        if reason
        else f"{model} with the model's own engine arguments"
    )
    report.note(f"the smoke run serves {which} (--smoke-model serves another, --no-smoke-run none)")
    return {} if reason else own


def offer_standin(template: Path, model: Path, standin: Path, arguments: Mapping[str, Any]) -> bool:
    """Let a model with the example's engine arguments serve a copy of the stand-in; return whether it does now.

    If a folder or link with the copy's name is not such a copy, it is the user's, and nothing changes.
    """
    file = model / ENGINE_ARGS_NAME
    if not file.is_file() or file.read_bytes() != (template / EXAMPLE_NAME).read_bytes():
        return False
    copy = model / STANDIN_NAME
    if not os.path.lexists(copy):
        shutil.copytree(standin, copy)
        give_tree(copy, owner_of(model))
    elif copy.is_symlink() or _digests(copy) != _digests(standin):
        return False
    write_whole(file, json.dumps({**arguments, "model": STANDIN_NAME}, indent=4) + "\n")
    return True


def _digests(folder: Path) -> dict[Path, str]:
    return {
        path.relative_to(folder): file_sha256(path) for path in folder.rglob("*") if path.is_file()
    }
