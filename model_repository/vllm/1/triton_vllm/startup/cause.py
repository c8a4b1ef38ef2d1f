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
LONGEST = 400
"""Characters of the cause that are kept; vLLM can print a whole configuration."""
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*", re.MULTILINE)


class Cause:
    """Collect the errors that vLLM's processes log while vLLM starts; a context manager.

    A variable makes EngineCore and the workers log errors to a file as well; forked processes
    inherit a handler. They keep the file open after it is removed. If the operator has configured
    vLLM's logging, this class changes nothing and finds nothing.

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
        self._handler: logging.Handler | None = None

    def __enter__(self) -> Cause:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        chosen = (
            self._environment.get(PATH_VARIABLE) or self._environment.get(OFF_VARIABLE, "1") == "0"
        )
        if self._config is None or chosen:
            return self
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="triton_vllm_load_"))
            path = self._folder / "logging.json"
            path.write_text(json.dumps(_with_file(self._config, self._errors)), encoding="utf-8")
            self._handler = logging.FileHandler(self._errors, encoding="utf-8")
        except (
            OSError,
            TypeError,
            KeyError,
            ValueError,
        ):  # the disk is full, or the configuration has another shape
            return self
        self._handler.setLevel(logging.ERROR)
        logging.getLogger("vllm").addHandler(self._handler)
        self._environment[PATH_VARIABLE] = str(path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            del self._environment[PATH_VARIABLE]
            logger = logging.getLogger(
                "vllm"
            )  # vLLM has added the file's handler in this process as well
            for handler in {
                self._handler,
                *(
                    h
                    for h in logger.handlers
                    if getattr(h, "baseFilename", "") == str(self._errors)
                ),
            }:
                logger.removeHandler(handler)
                handler.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def find(self) -> str:
        """Return the first exception as one line, or an empty string; call it before the context ends."""
        try:
            text = self._errors.read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return ""
        return first_exception(text)

    @property
    def _errors(self) -> Path:
        if self._folder is None:
            raise ValueError("there is no file")
        return self._folder / "errors.log"


def _with_file(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a configuration of Python's logging with an additional handler for vLLM's errors."""
    made = {
        "class": "logging.FileHandler",
        "filename": os.fspath(path),
        "level": "ERROR",
        "encoding": "utf-8",
    }
    logger = config["loggers"]["vllm"]
    own = {**logger, "handlers": [*logger["handlers"], "load"]}
    return {
        **config,
        "handlers": {**config["handlers"], "load": made},
        "loggers": {**config["loggers"], "vllm": own},
    }


def first_exception(text: str) -> str:
    """Return the exception line of the first traceback in a log; later exceptions follow from it."""
    _, found, rest = text.partition("Traceback (most recent call last):")
    raised = _RAISED.search(rest) if found else None
    return raised[0].strip()[:LONGEST] if raised else ""
