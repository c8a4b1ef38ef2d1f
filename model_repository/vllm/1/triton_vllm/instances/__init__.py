"""Several instances of a model over one engine: in come Triton's arguments, out goes a client of it.

They meet in a private folder for temporary files, the only place that this room writes.
"""
