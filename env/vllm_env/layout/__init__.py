"""A finished prefix comes in; what a model's folder holds of it goes out, the same bytes for the same prefix.

A layout packs a prefix into the cache, opens it again as a server does, and places it in a folder that it is given. It
touches neither the network nor, by itself, a model repository. A new layout is a class and a row in ``LAYOUTS``.
"""

from .archive import Archive
from .directory import Directory
from .layout import Layout
from .parts import Parts

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Parts(), Archive(), Directory())}
"""The layouts by their names."""

FILES = tuple(dict.fromkeys(file for layout in LAYOUTS.values() for file in layout.files))
"""All that any layout places in a model's folder, in the order of renaming."""
