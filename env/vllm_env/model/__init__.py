"""Read a model's folder: the manifest of its built files, and the files that are the user's.

This room writes nothing.
"""
