"""What vLLM's processes log as errors while it starts becomes the reason of the failed load."""

from __future__ import annotations

import errno
import logging
import logging.config
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from triton_vllm.base.errors import ConfigError
from triton_vllm.startup.cause import LONGEST_CAUSE, PATH_VARIABLE, Cause, first_exception, shared_memory_remedy

# as vLLM's own, which needs vLLM
CONFIG = {
    "formatters": {"vllm": {"format": "%(levelname)s %(message)s"}},
    "handlers": {"vllm": {"class": "logging.StreamHandler", "formatter": "vllm", "stream": "ext://sys.stdout"}},
    "loggers": {"vllm": {"handlers": ["vllm"], "level": "INFO", "propagate": False}},
    "version": 1,
    "disable_existing_loggers": False,
}
# what EngineCore does, with vLLM's way to read its configuration
ENGINE_CORE = """
import json, logging.config, os, sys
logging.config.dictConfig(json.load(open(os.environ["VLLM_LOGGING_CONFIG_PATH"])))
log = logging.getLogger("vllm.v1.engine.core")
log.info("starting")
log.warning("Error: no cause")
try:
    raise ValueError("No common block size for 16. ")
except ValueError:
    log.exception("EngineCore failed to start.")
try:
    raise RuntimeError("and then this")
except RuntimeError:
    log.exception("later")
"""


def test_the_first_exception_of_a_process_is_found_and_its_log_is_as_ever():
    """The line goes to the log too, and nothing is left behind."""
    environment = dict(os.environ)
    with Cause(CONFIG, environment) as cause:
        path = Path(environment[PATH_VARIABLE])
        done = subprocess.run([sys.executable, "-c", ENGINE_CORE], env=environment, capture_output=True, text=True, check=True)
        assert cause.find() == "ValueError: No common block size for 16."
    assert "INFO starting" in done.stdout
    assert "ERROR EngineCore failed to start." in done.stdout
    assert not path.parent.exists()
    assert PATH_VARIABLE not in environment


def test_a_forked_process_is_heard_too():
    """It does not read the configuration again: a handler of this process is what it has."""
    logger = logging.getLogger("vllm")
    with Cause(CONFIG, {}) as cause:
        try:
            raise KeyError("forked")  # noqa: TRY301 - the log needs an exception
        except KeyError:
            logger.exception("failed")
        assert cause.find() == "KeyError: 'forked'"
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    assert logger.handlers == []


@pytest.mark.parametrize(
    ("config", "environment"),
    [(None, {}), (CONFIG, {PATH_VARIABLE: "/own.json"}), (CONFIG, {"VLLM_CONFIGURE_LOGGING": "0"}), ({"strange": 1}, {})],
)
def test_the_operators_own_logging_is_left_alone(config, environment):
    """So is a vLLM whose configuration is unknown: the load must not fail over this."""
    before = dict(environment)
    with Cause(config, environment) as cause:
        assert environment == before
        assert cause.find() == ""
    assert environment == before


def test_the_cause_is_a_line_of_bounded_length():
    """Exceptions can carry a whole configuration; a log without a traceback has no cause."""
    text = "Traceback (most recent call last):\n  File x\n    raise y\ntorch.OutOfMemoryError: " + "x" * 5000 + "\nmore\n"
    assert first_exception(text).startswith("torch.OutOfMemoryError: xxx")
    assert len(first_exception(text)) == LONGEST_CAUSE
    assert first_exception("ValueError: not raised here") == ""


MIB = 1 << 20
FULL = OSError(errno.ENOSPC, "No space left on device")


def remedy(monkeypatch, error, size, free):
    """Return the remedy on a machine with this much shared memory, in MiB."""
    status = SimpleNamespace(f_frsize=4096, f_blocks=size * MIB // 4096, f_bavail=free * MIB // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    return shared_memory_remedy(error)


@pytest.mark.parametrize(
    ("error", "size", "free", "says"),
    [
        (FULL, 1, 0, "/dev/shm has 1 MiB, of which 0 MiB are free: "),
        (FULL, 1, 1, "/dev/shm has 1 MiB, of which 1 MiB are free: "),
        (FULL, 64, 20, "/dev/shm has 64 MiB, of which 20 MiB are free: "),
        (ConfigError(f"vLLM did not start: OSError: {FULL}"), 64, 0, "docker run --shm-size=1g"),
    ],
)
def test_a_load_for_which_shared_memory_was_too_small_names_it(monkeypatch, error, size, free, says):
    """Python's error names no file."""
    found = remedy(monkeypatch, error, size, free)
    assert found is not None
    assert says in found


@pytest.mark.parametrize(("error", "size", "free"), [(FULL, 64, 60), (FULL, 4096, 100), (RuntimeError("no memory"), 1, 0)])
def test_shared_memory_with_room_is_not_the_reason(monkeypatch, error, size, free):
    """Another file system is full, or the error is another one."""
    assert remedy(monkeypatch, error, size, free) is None
