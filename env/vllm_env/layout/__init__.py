"""A finished prefix comes in; what a model's folder holds of it goes out, the same bytes for the same prefix.

A layout packs a prefix into the cache, opens it again as a server does, and places it in a folder that it is given. It
touches neither the network nor, by itself, a model repository. A new layout is a module with a ``LAYOUT``, and its name here.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import Layout

NAMES = ("parts", "archive", "directory")
"""The command line checks them before the tool's libraries are there, so that nothing is imported here."""


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
"""The layouts by their names; each is imported when it is asked for."""


@cache
def files() -> tuple[str, ...]:
    """Return the names of all that any layout places in a model's folder, in the order of renaming."""
    return tuple(dict.fromkeys(file for layout in LAYOUTS.values() for file in layout.files))
