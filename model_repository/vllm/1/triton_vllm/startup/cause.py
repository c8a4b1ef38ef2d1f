"""Find out why vLLM did not start: its processes write that to the log, and AsyncLLM only says that they did."""

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
"""Characters of the cause; vLLM can print a whole configuration."""
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*", re.MULTILINE)


class Cause:
    """Collect what vLLM's processes log as errors while it starts; a context manager.

    EngineCore and the workers are told by a variable to log errors to a file besides, forked ones by a handler; they keep the
    file open after it is removed. Where the operator has configured vLLM's logging, nothing is changed and nothing found.

    Args:
        config: vLLM's own configuration of its log, None if this vLLM has none, or for processes on other machines.
        environment: the variables that vLLM's processes get.
    """

    def __init__(self, config: Mapping[str, Any] | None, environment: MutableMapping[str, str]) -> None:
        self._config = config
        self._environment = environment
        self._folder: Path | None = None
        self._handler: logging.Handler | None = None

    def __enter__(self) -> Cause:  # noqa: PYI034 - Self is not in the typing of Python 3.10
        chosen = self._environment.get(PATH_VARIABLE) or self._environment.get(OFF_VARIABLE, "1") == "0"
        if self._config is None or chosen:
            return self
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="triton_vllm_load_"))
            path = self._folder / "logging.json"
            path.write_text(json.dumps(_with_file(self._config, self._errors)), encoding="utf-8")
            self._handler = logging.FileHandler(self._errors, encoding="utf-8")
        except (OSError, TypeError, KeyError, ValueError):  # no room, or a configuration of another shape
            return self
        self._handler.setLevel(logging.ERROR)
        logging.getLogger("vllm").addHandler(self._handler)
        self._environment[PATH_VARIABLE] = str(path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            del self._environment[PATH_VARIABLE]
            logger = logging.getLogger("vllm")  # vLLM has configured it in this process as well
            for handler in {self._handler, *(h for h in logger.handlers if getattr(h, "baseFilename", "") == str(self._errors))}:
                logger.removeHandler(handler)
                handler.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def find(self) -> str:
        """Return the exception that came first, in a line, or nothing; call it before the end."""
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
    """Return a configuration of Python's logging with one more handler for vLLM's errors."""
    made = {"class": "logging.FileHandler", "filename": os.fspath(path), "level": "ERROR", "encoding": "utf-8"}
    logger = config["loggers"]["vllm"]
    own = {**logger, "handlers": [*logger["handlers"], "load"]}
    return {**config, "handlers": {**config["handlers"], "load": made}, "loggers": {**config["loggers"], "vllm": own}}


def first_exception(text: str) -> str:
    """Return the last line of the first traceback in a log: what went wrong before the others that followed from it."""
    _, found, rest = text.partition("Traceback (most recent call last):")
    raised = _RAISED.search(rest) if found else None
    return raised[0].strip()[:LONGEST] if raised else ""
