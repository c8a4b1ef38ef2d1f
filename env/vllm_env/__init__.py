"""Turns "this vLLM, at exactly this version or commit" into a Triton model repository (docs/how_it_works.md)."""

__version__ = "0.1.0"
