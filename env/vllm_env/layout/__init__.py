"""Store a finished prefix in the form that a model's folder holds.

A layout packs a prefix into the cache, opens it again as a server does, and places it in a given
folder. What it opens may stay unpacked where the user's servers look for it. The same prefix gives
the same bytes. A layout does not use the network, and it writes to no model repository by itself. A
new layout is a class in a module of its own, an object in ``layouts.py``, and its name here.
"""

# The command line checks the names before the packages are installed, so nothing is imported here.
LAYOUT_NAMES = ("parts", "archive", "directory")
"""The names of the layouts."""
