"""Makes Debian's ``site`` look for packages where CPython's does; ``vllm_env_site.pth`` beside it runs this at start.

The interpreter of an environment runs this file, not the packager. It adds ``lib/pythonX.Y/site-packages`` with its
``.pth`` files and takes its own folder off ``sys.path`` again.
"""

from __future__ import annotations

import os
import site
import sys


def getsitepackages(prefixes: list[str] | None = None) -> list[str]:
    """Return the ``site-packages`` of each prefix, as CPython does."""
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    places = dict.fromkeys(p for p in (site.PREFIXES if prefixes is None else prefixes) if p)
    return [os.path.join(prefix, "lib", python, "site-packages") for prefix in places]  # noqa: PTH118 - as site.py has it


site.getsitepackages = getsitepackages  # type: ignore[assignment]
sys.path[:] = [p for p in sys.path if p != os.path.dirname(__file__)]  # noqa: PTH120 - pathlib takes 10 ms to import
for place in getsitepackages():
    if os.path.isdir(place):  # noqa: PTH112
        site.addsitedir(place)
