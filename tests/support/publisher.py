"""A process that publishes two sets in turn without pause, to be killed."""

from __future__ import annotations

import json
import multiprocessing
import signal
from typing import TYPE_CHECKING

from vllm_env.base.cache import Cache
from vllm_env.base.interrupts import take_interrupts
from vllm_env.base.workspace import Workspace
from vllm_env.layout.layouts import LAYOUTS
from vllm_env.publish import publish as module
from vllm_env.publish.model_folder import BuiltSet

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
    from multiprocessing.synchronize import Semaphore
    from pathlib import Path

SIZE = 100_000
"""Bytes of each file; all are the set's tag."""
TAGS = ("0", "1")


def start(folder: Path, template: Path, *, in_place: bool) -> tuple[ForkServerProcess, Semaphore]:
    """Start a process that publishes into ``folder/place/models``; return it and what is released after each time.

    It is forked from a server that has imported the packager: a new interpreter takes longer than what the test is about.
    """
    for tag in TAGS:
        for file in _files(folder, tag):  # written here, where nobody is killed in the middle of it
            if not file.exists():
                file.write_text(tag * SIZE)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    begun, published = context.Semaphore(0), context.Semaphore(0)
    child = context.Process(target=_publish_for_ever, args=(folder, template, in_place, begun, published), daemon=True)
    child.start()
    begun.acquire()
    return child, published


def _files(folder: Path, tag: str) -> tuple[Path, Path]:
    return folder / f"stub{tag}", folder / f"env{tag}"


def _publish_for_ever(folder: Path, template: Path, in_place: bool, begun: Semaphore, published: Semaphore) -> None:
    # As the command line does: an interrupt waits until what is staged is removed. SIGTERM ends it like SIGKILL.
    take_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if in_place:
        module.staging_place = lambda _: None  # type: ignore[assignment]
    workspace, number = Workspace(Cache(folder)), 0
    begun.release()
    while True:
        number += 1
        tag = TAGS[number % 2]
        stub, environment = _files(folder, tag)
        built = BuiltSet(stub, environment, LAYOUTS["archive"], json.dumps({"tag": tag}), "{}")
        module.publish(workspace, built, folder / "place" / "models", "vllm", template)
        published.release()
