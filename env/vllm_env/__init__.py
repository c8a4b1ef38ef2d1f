"""Build a Triton model repository for one exact version or commit of vLLM."""

__version__ = "0.1.0"
