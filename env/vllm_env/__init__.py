"""Build a Triton model repository for one exact version or commit of vLLM (docs/how_it_works.md)."""

__version__ = "0.1.0"
