"""Turns "this vLLM, at exactly this version or commit" into a Triton model repository (see DESIGN in the README)."""

__version__ = "0.1.0"
