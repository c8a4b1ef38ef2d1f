"""Unpack an environment that was built in parts (``--layout parts``)."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from triton_vllm.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from triton_vllm.base.protocols import Log
    from triton_vllm.startup.progress import Progress

UNPACK_MODULE = "_vllm_env_unpack"
"""A module that only the small archive of an environment in parts contains."""


def unpack(model_dir: Path, log: Log, progress: Progress) -> None:
    """Switch this process to the whole environment; call it before anything in it is imported.

    Args:
        model_dir: the folder with the environment's parts.
        log: reports the unpacking.
        progress: reports the phase.

    Raises:
        ConfigError: a part is missing or differs from the build, or no folder can be written.
    """
    if importlib.util.find_spec(UNPACK_MODULE) is None:
        return
    # The first start on a machine unpacks on all cores. Later starts only find the result.
    progress.phase("looking for the unpacked environment")
    module = importlib.import_module(UNPACK_MODULE)
    try:
        module.use(str(model_dir), log.info)
    except module.UnpackError as error:
        # Its text already names the cause and the remedy; a traceback would add nothing.
        raise ConfigError(str(error)) from None
