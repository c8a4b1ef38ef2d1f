"""Unpacks the parts of an environment when something of them is imported; a ``.pth`` file runs this in the small archive.

This file is copied into the archive's site-packages as ``_vllm_env_parts.py``. A model that names vLLM in no other place
than an ``import`` works so; this project's own asks before, to say in its log what it waits for. The stub that completes a
configuration imports nothing of the parts, and unpacks nothing.
"""

import importlib.machinery
import json
import os
import sys


class PartsFinder:
    """Finds the parts' modules after all other finders have found nothing; it goes when the parts are there."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where a module of the parts is now; ImportError says why they could not be unpacked."""
        if path is not None or name not in self._names:
            return None
        import _vllm_env_unpack  # its imports take 30 ms, which most interpreters do not need

        _vllm_env_unpack.use(_vllm_env_unpack.own_model())
        return importlib.machinery.PathFinder.find_spec(name, None)


def _start() -> None:
    with open(
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "_vllm_env_parts.json"),
        encoding="utf-8",
    ) as stream:
        names = json.load(stream)["modules"]
    sys.meta_path.append(PartsFinder(frozenset(names)))


_start()
