"""Import what EngineCore imports, and wait to become it.

``head_start.py`` runs the text of this file in a new interpreter. It uses only the standard
library, because the interpreter does not know this package yet.

    python -c TEXT --multiprocessing-fork DESCRIPTOR MODULE...

The descriptor is a socket. The other end sends in this order:

    8 bytes     the length of the variables; with them the descriptors that EngineCore inherits
    variables   the environment, JSON
    the rest    what multiprocessing sends to a spawned process
"""

# ruff: noqa: E402
from __future__ import annotations

import sys

# `python -c` would also import from the server's working folder, which may have files of any name.
# EngineCore gets its parent's list from multiprocessing.
sys.path[:] = [folder for folder in sys.path if folder]

import contextlib
import importlib
import json
import logging.config
import os
import signal
import socket
from multiprocessing import forkserver, resource_tracker, spawn

# vLLM reads this variable in its import, which is over when the variable comes.
_LOGGING = "VLLM_LOGGING_CONFIG_PATH"
# multiprocessing itself sends fewer, and the kernel takes 253 at once.
_MOST_DESCRIPTORS = 250


def _main(descriptor: str, *modules: str) -> None:
    other_end = socket.socket(fileno=int(descriptor))
    os.set_inheritable(other_end.fileno(), False)  # noqa: FBT003 - the standard library's order
    # A Ctrl-C would end this process with a traceback. The server decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging_config = os.environ.get(_LOGGING)
    for module in modules:
        # A vLLM without this module works, too. A broken one fails again when it is needed.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    head, descriptors, _, _ = socket.recv_fds(other_end, 8, _MOST_DESCRIPTORS)
    # The other end was closed: nobody needs this process.
    if not head:
        os._exit(0)
    _take_variables(other_end, int.from_bytes(head, "big"))
    # vLLM has followed the value that this process was started with. Once more, and the loggers
    # that were made since would be silent.
    if os.environ.get(_LOGGING) not in (None, "", logging_config):
        with open(os.environ[_LOGGING], encoding="utf-8") as file:
            logging.config.dictConfig(json.load(file))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # From here on as multiprocessing's forkserver starts its processes.
    tracker, *inherited = descriptors
    vars(resource_tracker._resource_tracker)["_fd"] = tracker  # noqa: SLF001
    vars(forkserver._forkserver)["_inherited_fds"] = inherited  # noqa: SLF001
    data = other_end.detach()
    sys.exit(spawn._main(data, os.dup(data)))  # noqa: SLF001


def _take_variables(other_end: socket.socket, length: int) -> None:
    received = other_end.recv(length, socket.MSG_WAITALL)
    os.environ.clear()
    os.environ.update(json.loads(received))


# A spawned process looks for `__main__` of its parent, and must not run this again.
if sys.argv[1:2] == ["--multiprocessing-fork"]:
    _main(*sys.argv[2:])
