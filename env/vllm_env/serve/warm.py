"""Warm a model: the stock tritonserver loads it once, and the caches that vLLM fills stay in the model's folder.

This works for any model folder that tritonserver can load, with or without a manifest. The model itself (triton_vllm's
warm_cache.py) lets vLLM use the folder and records there for which versions and devices the caches are valid.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import give_tree, make_readable, owner_of
from vllm_env.base.workspace import Workspace
from vllm_env.model.files import arguments_file
from vllm_env.model.manifest import CACHE_NAME
from vllm_env.publish.exchange import (
    exchange,
    publishing,
    refuse_mounts,
    remove_abandoned_staging,
    staging_in,
)

from .server import Launch, TritonServer

RECORD_NAME = "warm.json"
READY_SECONDS = 3600.0  # s; a model of hundreds of GB may have to be downloaded first
_VARIABLE = "TRITON_VLLM_WARM"  # read by triton_vllm/startup/warm_cache.py
# Says which GPUs of this machine reach each other (vLLM's all_reduce_utils.py). Another machine may be wired differently.
_OF_THIS_MACHINE = "gpu_p2p_access_cache_*.json"


@dataclass(frozen=True)
class Warmed:
    """The result of a warm run: the folder, its number of files and bytes, and the time from launch to ready (s)."""

    folder: Path
    files: int
    size: int
    ready_seconds: float


def warm(
    workspace: Workspace,
    binary: Path,
    model: Path,
    *,
    log: Path,
    ready_timeout: float = READY_SECONDS,
) -> Warmed:
    """Load a model once with its own engine arguments and keep the caches that vLLM filled, in ``model/vllm_cache``.

    vLLM fills them in a staging folder inside the model's folder. After the server has ended cleanly, one step puts them in
    place. The server loads no other model of the repository.

    Args:
        workspace: for the locks.
        binary: the tritonserver program.
        model: the model's folder.
        log: receives the server's output; its old content is removed.
        ready_timeout: the model must be ready within this time (s).

    Raises:
        CommandError: the model did not load; ``tail`` says why. Older caches are unchanged.
        VllmEnvError: the model left no caches, or they cannot be written. Older caches are unchanged.
    """
    model = model.absolute()
    refuse_mounts(model, (CACHE_NAME,))
    try:
        return _fill(workspace, binary, model, log, ready_timeout)
    except CommandError as error:
        raise CommandError(
            f"--warm: {model.name} did not load with its own {arguments_file(model)}: {error.what}",
            tail=error.tail,
            cause="The lines above, from the server's log. What was built is in place, and older caches are as they were.",
            remedy=f"Put a model that this machine can serve into {model / arguments_file(model)}. The whole log is {log}.",
        ) from error
    except OSError as error:
        raise VllmEnvError(
            f"--warm: {model / CACHE_NAME} cannot be written: {error.strerror} ({error.filename or model}).",
            cause="Older caches are as they were.",
            remedy="Free space or change the permissions, and try again.",
        ) from error


def _fill(
    workspace: Workspace, binary: Path, model: Path, log: Path, ready_timeout: float
) -> Warmed:
    repository = model.resolve().parent
    with contextlib.ExitStack() as stack:
        with publishing(workspace, repository):
            remove_abandoned_staging(model.parent)
            filled = stack.enter_context(staging_in(model)) / CACHE_NAME
            filled.mkdir()
        seconds = _load(binary, model, filled, log, ready_timeout)
        files, size = _finish(filled, log)
        give_tree(filled, owner_of(model.resolve()))
        with publishing(workspace, repository):
            _place(filled, model / CACHE_NAME)
    return Warmed(model / CACHE_NAME, files, size, seconds)


def _load(binary: Path, model: Path, filled: Path, log: Path, ready_timeout: float) -> float:
    """Serve the model until it is ready; return the seconds that this took."""
    log.unlink(missing_ok=True)
    started = time.monotonic()
    launch = Launch(
        {_VARIABLE: str(filled)},
        ("--model-control-mode=explicit", f"--load-model={model.name}"),
        ready_timeout,
    )
    with TritonServer(binary, model.parent, log=log, launch=launch):
        return time.monotonic() - started


def _finish(filled: Path, log: Path) -> tuple[int, int]:
    """Remove files that are valid only on this machine, let the server's user read the rest; return files and bytes."""
    for file in filled.glob(_OF_THIS_MACHINE):
        file.unlink()
    files = [path for path in filled.rglob("*") if path.is_file()]
    if not (filled / RECORD_NAME).is_file() or len(files) < 2:
        raise VllmEnvError(
            "--warm: the model loaded, but vLLM left no caches.",
            cause="The model's folder has another 1/model.py than this project's, or an older one.",
            remedy=f"Copy 1/ from this checkout's model_repository/vllm. The server's log is {log}.",
        )
    make_readable(filled)  # vLLM creates some files with mode 0600
    return len(files), sum(path.stat().st_size for path in files)


# exchange() fails on some file systems; then there is a moment without caches.
def _place(filled: Path, target: Path) -> None:
    if not os.path.lexists(target):
        filled.rename(target)
    elif not exchange(filled, target):
        target.rename(filled.with_name("old"))
        filled.rename(target)
