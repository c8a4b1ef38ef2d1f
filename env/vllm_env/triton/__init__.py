"""Room triton."""
