"""All layouts."""

from .archive import Archive
from .directory import Directory
from .layout import Layout
from .parts import Parts

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Parts(), Archive(), Directory())}
"""The layouts by name."""
LAYOUT_FILES = tuple(dict.fromkeys(file for layout in LAYOUTS.values() for file in layout.files))
"""The names that layouts place in a model's folder, in the order of renaming."""
