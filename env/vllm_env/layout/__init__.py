"""Store a finished prefix in the form that a model's folder holds.

A layout packs a prefix into the cache, opens it again as a server does, and places it in a given
folder. What it opens may stay unpacked where the user's servers look for it. The same prefix gives
the same bytes. A layout does not use the network, and it writes to no model repository by itself. A
new layout is a module with a ``LAYOUT``, and its name here.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import Layout

NAMES = ("parts", "archive", "directory")
"""The names of the layouts."""


# The command line checks the names before the packages are installed, so nothing is imported above.
class _Layouts(Mapping[str, "Layout"]):
    def __getitem__(self, name: str) -> "Layout":
        if name not in NAMES:
            raise KeyError(name)
        layout: Layout = import_module(f"{__name__}.{name}").LAYOUT
        return layout

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


LAYOUTS = _Layouts()
"""The layouts by name; each is imported at its first use."""


@cache
def files() -> tuple[str, ...]:
    """Return the names that layouts place in a model's folder, in the order of renaming."""
    return tuple(dict.fromkeys(file for layout in LAYOUTS.values() for file in layout.files))
