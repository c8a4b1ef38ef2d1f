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
        """Unpack the parts for a module of theirs, and return where it is now; else return None.

        Raises:
            ImportError: the parts cannot be unpacked.
        """
        # The import of a submodule has the path of its package, which is found by now.
        is_submodule = path is not None
        if is_submodule or name not in self._names:
            return None
        # Its imports take 30 ms, and most interpreters do not need them.
        import _vllm_env_unpack

        _vllm_env_unpack.use(_own_model())
        return importlib.machinery.PathFinder.find_spec(name, None)


def _own_model() -> str:
    """Return the folder of the model that this stub serves.

    Another program's first argument is no such file, so the result is some folder without packed
    parts. It is "" if there are no arguments.
    """
    # Triton starts a stub as `triton_python_backend_stub MODEL/VERSION/model.py …`. The interpreter
    # in the stub has no sys.argv, so this reads the process's own command line.
    with open("/proc/self/cmdline", "rb") as stream:
        # The program and its arguments. A zero byte ends each of them.
        arguments = stream.read().split(b"\0")[:-1]
    if len(arguments) < 2:
        return ""
    script = os.path.abspath(os.fsdecode(arguments[1]))
    return os.path.dirname(os.path.dirname(script))


def _start() -> None:
    """Add the finder, with the names of the modules, after Python's own finders."""
    site_packages = os.path.dirname(os.path.abspath(__file__))
    description = os.path.join(site_packages, "_vllm_env_parts.json")
    with open(description, encoding="utf-8") as stream:
        names = json.load(stream)["modules"]
    sys.meta_path.append(PartsFinder(frozenset(names)))


_start()
