"""A process that adopts a model's folder and gives it back without pause, to be killed."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

from support.small_fixtures import workspace_in
from vllm_env.layout import LAYOUTS
from vllm_env.plan import TEMPLATE
from vllm_env.publish.adopt import AdoptedSet, read_adoption, undo
from vllm_env.publish.publish import publish

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
    from multiprocessing.synchronize import Semaphore
    from pathlib import Path


def start(model: Path, made: Path) -> ForkServerProcess:
    """Start a process that adopts ``model`` and undoes it, and return it when it has done so once.

    What is placed lies in ``made``: ``stub`` and ``environment``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    done = context.Semaphore(0)
    child = context.Process(target=_adopt_for_ever, args=(model, made, done), daemon=True)
    child.start()
    assert done.acquire(timeout=120)
    return child


def _adopt_for_ever(model: Path, made: Path, done: Semaphore) -> None:
    workspace = workspace_in(made)
    while True:
        adoption = read_adoption(model, TEMPLATE, "vllm_env.tar.gz")
        built = AdoptedSet(made / "stub", made / "environment", LAYOUTS["archive"], "{}", "{}", adoption=adoption)
        publish(workspace, built, model.parent, model.name, TEMPLATE)
        undo(workspace, model)
        done.release()
