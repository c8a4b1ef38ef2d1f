"""Find out why vLLM did not start.

vLLM's processes write the reason to the log. AsyncLLM only raises that they failed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

PATH_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
OFF_VARIABLE = "VLLM_CONFIGURE_LOGGING"
LONGEST_CAUSE = 400
"""Characters of the cause that are kept; vLLM can print a whole configuration."""
_NO_SPACE = "No space left on device"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives on Linux
# The load's processes have ended, and have freed what they had.
_FULL_BELOW_BYTES = 8 << 20
"""With fewer free bytes than this after a load, shared memory was full."""
_FREE_FROM_BYTES = 64 << 20
"""With more free bytes than this after a load, it was not."""
_EXCEPTION_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*", re.MULTILINE)


class Cause:
    """Collect the errors that vLLM's processes log while vLLM starts; a context manager.

    If the operator has configured vLLM's logging, this class changes nothing and finds nothing.

    Args:
        config: vLLM's own logging configuration. None if this vLLM has none, or if processes run on
            other machines.
        environment: the variables that vLLM's processes get.
    """

    def __init__(
        self, config: Mapping[str, Any] | None, environment: MutableMapping[str, str]
    ) -> None:
        self._config = config
        self._environment = environment
        self._folder: Path | None = None
        self._handler: logging.FileHandler | None = None

    def __enter__(self) -> Cause:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        """Make vLLM's logger write errors also to a file, here and in vLLM's other processes."""
        is_off = self._environment.get(OFF_VARIABLE) == "0"
        is_configured = bool(self._environment.get(PATH_VARIABLE))
        if self._config is None or is_off or is_configured:
            return self
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="triton_vllm_load_"))
            errors = self._folder / "errors.log"
            path = self._folder / "logging.json"
            path.write_text(json.dumps(_with_file(self._config, errors)), encoding="utf-8")
            self._handler = logging.FileHandler(errors, encoding="utf-8")
        # The disk is full, or the configuration has another shape. The load must not fail for that.
        except (OSError, TypeError, KeyError, ValueError):
            return self
        # A forked process does not read the configuration again; it inherits this handler. A new
        # process reads it, by the variable.
        self._handler.setLevel(logging.ERROR)
        logging.getLogger("vllm").addHandler(self._handler)
        self._environment[PATH_VARIABLE] = str(path)
        return self

    def __exit__(self, *_: object) -> None:
        """Undo what ``__enter__`` did: remove the variable, the handlers and the file."""
        if self._handler is not None:
            del self._environment[PATH_VARIABLE]
            # vLLM may have read the configuration in this process, too. Then its logger has one
            # more handler for the file, and may have dropped ours.
            logger = logging.getLogger("vllm")
            for handler in [*logger.handlers]:
                if getattr(handler, "baseFilename", "") == self._handler.baseFilename:
                    logger.removeHandler(handler)
                    handler.close()
            self._handler.close()
        # vLLM's processes keep the file open, so they can go on writing to it.
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def find(self) -> str:
        """Return the first exception as one line; call it before the context ends.

        It is empty if no process has logged an exception.
        """
        if self._handler is None:
            return ""
        try:
            file = Path(self._handler.baseFilename)
            return first_exception(file.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return ""


def _with_file(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a configuration of Python's logging with an additional handler for vLLM's errors."""
    handler = {
        "class": "logging.FileHandler",
        "filename": str(path),
        "level": "ERROR",
        "encoding": "utf-8",
    }
    # Copied, because the dictionary is vLLM's own. "load" is our handler's name in it.
    logger = config["loggers"]["vllm"]
    logger = {**logger, "handlers": [*logger["handlers"], "load"]}
    return {
        **config,
        "handlers": {**config["handlers"], "load": handler},
        "loggers": {**config["loggers"], "vllm": logger},
    }


def first_exception(text: str) -> str:
    """Return the exception line of the first traceback in a log, or an empty string."""
    # Later exceptions follow from the first one. Without a traceback, `rest` is empty.
    _, _, rest = text.partition("Traceback (most recent call last):")
    exception = _EXCEPTION_LINE.search(rest)
    return exception[0].strip()[:LONGEST_CAUSE] if exception else ""


def shared_memory_remedy(error: BaseException) -> str | None:
    """Return what to do if a load has failed because shared memory is full; else None.

    vLLM's processes have semaphores and queues there, next to Triton's own region. Python's error
    about them names no file.
    """
    if _NO_SPACE not in str(error):
        return None
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    size = status.f_blocks * status.f_frsize
    free = status.f_bavail * status.f_frsize
    # In a small region, half of it is enough.
    enough = max(_FULL_BELOW_BYTES, min(size // 2, _FREE_FROM_BYTES))
    # If shared memory has space, another file system is full.
    if free > enough:
        return None
    return (
        f"{SHARED_MEMORY} has {size >> 20} MiB, of which {free >> 20} MiB are free: give it more, "
        "for example with docker run --shm-size=1g"
    )
