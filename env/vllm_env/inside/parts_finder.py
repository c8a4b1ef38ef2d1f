"""Unpacks the parts of an environment as soon as an interpreter imports one of their modules.

This file is copied into the small archive's site-packages as ``_vllm_env_parts.py``. A ``.pth``
file there runs it. So a user's own ``model.py`` needs no change: its ``import vllm`` is enough.
This project's model asks for the parts earlier, so that its log says what it waits for. The stub
that completes a configuration imports no module of the parts, and unpacks nothing.
"""

import importlib.machinery
import json
import os
import sys


class PartsFinder:
    """Finds the modules of the parts after all other finders; removed when the parts are there."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where a module of the parts is now.

        Raises:
            ImportError: the parts cannot be unpacked.
        """
        if path is not None or name not in self._names:
            return None
        # Its imports take 30 ms, and most interpreters do not need them.
        import _vllm_env_unpack

        _vllm_env_unpack.use(_own_model())
        return importlib.machinery.PathFinder.find_spec(name, None)


def _own_model() -> str:
    """Return the folder of the model that this stub serves.

    In another program it is some folder without parts, so nothing is found there.
    """
    # A stub's first argument is MODEL/VERSION/model.py. An embedded interpreter has no sys.argv.
    # The kernel ends each argument with a zero byte, so the list has an empty last item.
    with open("/proc/self/cmdline", "rb") as stream:
        arguments = stream.read().split(b"\0")
    if len(arguments) < 2:
        return ""
    script = os.path.abspath(os.fsdecode(arguments[1]))
    return os.path.dirname(os.path.dirname(script))


def _start() -> None:
    site_packages = os.path.dirname(os.path.abspath(__file__))
    description = os.path.join(site_packages, "_vllm_env_parts.json")
    with open(description, encoding="utf-8") as stream:
        names = json.load(stream)["modules"]
    sys.meta_path.append(PartsFinder(frozenset(names)))


_start()
