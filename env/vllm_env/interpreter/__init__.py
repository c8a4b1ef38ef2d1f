"""A Python version comes in; the exact conda packages of the interpreter, or a prefix with them, go out.

They come from conda-forge where it answers, else from an interpreter of this machine; only the cache is written.
"""
