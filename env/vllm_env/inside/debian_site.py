"""Makes Debian's ``site`` search for packages where CPython's does.

It adds ``lib/pythonX.Y/site-packages`` with its ``.pth`` files, and takes its own folder off
``sys.path`` again. ``vllm_env_site.pth`` next to it runs it at the interpreter's start.
"""
# The import of pathlib would take 10 ms at each start.
# ruff: noqa: PTH112, PTH118, PTH120

from __future__ import annotations

import os
import site
import sys


def getsitepackages(prefixes: list[str] | None = None) -> list[str]:
    """Return the ``site-packages`` of each prefix, as CPython does."""
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if prefixes is None:
        prefixes = site.PREFIXES
    places = dict.fromkeys(prefix for prefix in prefixes if prefix)
    return [os.path.join(prefix, "lib", python, "site-packages") for prefix in places]


site.getsitepackages = getsitepackages  # type: ignore[assignment]
sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
for place in getsitepackages():
    if os.path.isdir(place):
        site.addsitedir(place)
