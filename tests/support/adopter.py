"""A process that adopts a model folder again and again, to be killed."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from support.patience import LIMIT
from support.small_fixtures import workspace_in
from vllm_env.base.workspace import TEMPLATE
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.publish.adopt import read_adoption, stage_template
from vllm_env.publish.model_folder import BuiltSet
from vllm_env.publish.publish import publish

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
    from multiprocessing.synchronize import Semaphore


def start(source: Path, target: Path, made: Path) -> ForkServerProcess:
    """Start a process that makes ``target`` from ``source`` and removes it, and return it when it has done so once.

    ``made`` has what is placed: ``stub``, ``environment`` and ``manifest``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    done = context.Semaphore(0)
    child = context.Process(target=_adopt_for_ever, args=(source, target, made, done), daemon=True)
    child.start()
    assert done.acquire(timeout=LIMIT)
    return child


def adopt(source: Path, target: Path, made: Path) -> None:
    """Make ``target`` from ``source``, as the command does with what a build has made."""
    workspace = workspace_in(made)
    manifest = (made / "manifest").read_text()
    adoption = read_adoption(source, target, TEMPLATE, "vllm_env.tar.gz")
    with workspace.cache.staging() as staging:
        template = stage_template(adoption, TEMPLATE, staging / target.name)
        built = BuiltSet(made / "stub", made / "environment", LAYOUTS["archive"], manifest, "{}", adopted_from=source)
        publish(workspace, built, target.parent, target.name, template)


def _adopt_for_ever(source: Path, target: Path, made: Path, done: Semaphore) -> None:
    while True:
        adopt(source, target, made)
        # out of the repository first, so that a process that is killed here leaves no part of it there
        gone = Path(tempfile.mkdtemp(dir=made))
        target.rename(gone / "model")
        shutil.rmtree(gone)
        done.release()
