"""Unpack an environment that was built in parts (`--layout parts`), before anything in it is imported."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from triton_vllm.base.protocols import Log
    from triton_vllm.startup.progress import Progress

MODULE = "_vllm_env_unpack"
"""A module that only the small archive of an environment in parts contains."""


def unpack(model_dir: Path, log: Log, progress: Progress) -> None:
    """Switch this process to the whole environment, unpacked by this start or by an earlier one on this machine.

    Raises:
        ConfigError: a part is missing or differs from the build, or there is no folder to unpack to.
    """
    if importlib.util.find_spec(MODULE) is None:
        return
    progress.phase("looking for the unpacked environment")
    module = importlib.import_module(MODULE)
    try:
        module.use(str(model_dir), log.info)
    except module.UnpackError as error:
        raise ConfigError(str(error)) from None
