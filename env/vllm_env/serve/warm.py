"""Warm a model: load it once, and keep the caches that vLLM fills in the model's folder.

This works for any model folder that tritonserver can load, with or without a manifest. The model
itself (triton_vllm's warm_cache.py) lets vLLM use the folder. It records there for which versions
and devices the caches are valid.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from vllm_env.base.errors import CommandError, VllmEnvError
from vllm_env.base.filesystem import give_tree, make_readable, owner_of
from vllm_env.base.workspace import TEMPLATE, Workspace
from vllm_env.model.files import VERSION_FOLDER, arguments_file
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
# A model of hundreds of GB may have to be downloaded first.
_READY_SECONDS = 3600.0
# Read by triton_vllm/startup/warm_cache.py.
_VARIABLE = "TRITON_VLLM_WARM"
# Says which GPUs of this machine reach each other (vLLM's all_reduce_utils.py). Another machine
# may be wired differently.
_OF_THIS_MACHINE = "gpu_p2p_access_cache_*.json"


@dataclass(frozen=True)
class Warmed:
    """The result of a warm run.

    Attributes:
        folder: the caches.
        files: the number of files in it.
        size: their size in bytes.
        ready_seconds: time from the server's launch until it was ready.
    """

    folder: Path
    files: int
    size: int
    ready_seconds: float


def warm(workspace: Workspace, binary: Path, model: Path, *, log: Path) -> Warmed:
    """Load a model once with its own engine arguments, and keep the caches that vLLM filled.

    They are in ``model/vllm_cache``. The server loads no other model of the repository.

    Args:
        workspace: for the locks.
        binary: the tritonserver program.
        model: the model's folder.
        log: receives the server's output; its old content is removed.

    Raises:
        CommandError: the model did not load; ``cause`` or ``tail`` says why.
        VllmEnvError: the model left no caches, or they cannot be written. In both cases older
            caches are unchanged.
    """
    model = model.absolute()
    refuse_mounts(model, (CACHE_NAME,))
    try:
        return _fill(workspace, binary, model, log)
    except CommandError as error:
        name = arguments_file(model)
        raise CommandError(
            f"--warm: {model.name} did not load with its own {name}: {error.what}",
            tail=error.tail,
            cause=error.cause or "The lines above, from the server's log, say why.",
            remedy=(
                "The build is in place, and older caches are unchanged. "
                f"Put a model that this machine can serve into {model / name}. {error.remedy}"
            ).rstrip(),
        ) from error
    except OSError as error:
        file = error.filename or model
        raise VllmEnvError(
            f"--warm: {model / CACHE_NAME} cannot be written: {error.strerror} ({file}).",
            cause="Older caches are unchanged.",
            remedy="Free space or change the permissions, and try again.",
        ) from error


def _fill(workspace: Workspace, binary: Path, model: Path, log: Path) -> Warmed:
    """Let vLLM fill new caches while the model loads, and put them in the place of older ones.

    Raises:
        CommandError: the model did not load.
        VllmEnvError: it left no caches.
        OSError: they cannot be written.
    """
    repository = model.resolve().parent
    with contextlib.ExitStack() as stack:
        # vLLM fills a staging folder inside the model's folder. The lock is not held while the
        # model loads: that may take an hour, and a build must be able to publish.
        with publishing(workspace, repository):
            remove_abandoned_staging(model.parent)
            caches = stack.enter_context(staging_in(model)) / CACHE_NAME
            caches.mkdir()
        seconds = _load(binary, model, caches, log)
        files, size = _finish(caches, log)
        give_tree(caches, owner_of(model.resolve()))
        # Publishing exchanges the model's folder. Caches placed in the old one would be lost.
        with publishing(workspace, repository):
            _place(caches, model / CACHE_NAME)
    return Warmed(folder=model / CACHE_NAME, files=files, size=size, ready_seconds=seconds)


def _load(binary: Path, model: Path, caches: Path, log: Path) -> float:
    """Serve the model until it is ready; return the seconds that this took."""
    log.unlink(missing_ok=True)
    started = time.monotonic()
    launch = Launch(
        environment={_VARIABLE: str(caches)},
        arguments=("--model-control-mode=explicit", f"--load-model={model.name}"),
        ready_timeout=_READY_SECONDS,
    )
    with TritonServer(binary, model.parent, log=log, launch=launch):
        return time.monotonic() - started


def _finish(caches: Path, log: Path) -> tuple[int, int]:
    """Make the caches ready for other machines and users; return the number of files and bytes."""
    for file in caches.glob(_OF_THIS_MACHINE):
        file.unlink()
    files = [path for path in caches.rglob("*") if path.is_file()]
    # The model writes the record, and vLLM all other files.
    has_caches = (caches / RECORD_NAME).is_file() and len(files) > 1
    if not has_caches:
        raise VllmEnvError(
            "--warm: the model loaded, but vLLM left no caches.",
            cause="The model's folder has another 1/model.py than this project's, or an older one.",
            remedy=f"Copy {TEMPLATE / VERSION_FOLDER} into the model's folder. "
            f"The server's log is {log}.",
        )
    # vLLM creates some files with mode 0600.
    make_readable(caches)
    return len(files), sum(path.stat().st_size for path in files)


def _place(caches: Path, target: Path) -> None:
    """Rename the new caches to ``target``; older ones come into the staging folder instead."""
    if not os.path.lexists(target):
        caches.rename(target)
    # On a file system that cannot exchange folders, there is a moment without caches.
    elif not exchange(caches, target):
        target.rename(caches.with_name("old"))
        caches.rename(target)
