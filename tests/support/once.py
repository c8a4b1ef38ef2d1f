"""What the workers of one run share: the first that needs it makes it, the others wait."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_env.base.locks import locked

if TYPE_CHECKING:
    from collections.abc import Callable

RUN = "VLLM_ENV_TEST_RUN"
"""The variable with the folder of this run, which tests/conftest.py makes and removes."""


def run_folder() -> Path:
    """The folder of this run."""
    return Path(os.environ[RUN])


def once(name: str, make: Callable[[Path], Path]) -> Path:
    """Return what ``make`` returned, in this process or in another worker, for the path ``name`` in the run's folder."""
    folder, done = (run_folder() / f"{name}{end}" for end in ("", ".done"))
    folder.parent.mkdir(exist_ok=True)
    with locked(folder.with_suffix(".lock"), lambda: None):
        if not done.exists():
            done.write_text(str(make(folder)), encoding="utf-8")
    return Path(done.read_text(encoding="utf-8"))
