"""Read a Triton root, or make one from a wheel; find its release, its rules and a stub that fits.

This room may fetch the wheel and the stub's sources. It writes to the cache and to ``.triton/``.
"""
