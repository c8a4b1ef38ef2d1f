"""Run several instances of a model over one engine: each gets a client of that engine.

The instances meet in a private folder below the temporary folder. This room writes nowhere else.
"""
