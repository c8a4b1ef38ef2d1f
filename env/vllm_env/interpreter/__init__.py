"""Choose the exact conda packages of an interpreter for a Python version, and install them.

They come from conda-forge if it answers, else from an interpreter of this machine. This room writes
only to the cache and to the prefix that it is given.
"""
