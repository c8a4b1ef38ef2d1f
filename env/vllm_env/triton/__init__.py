"""A Triton root, or the wheel that carries one, comes in; its release, its rules and a stub that fits go out.

It may fetch the wheel and the stub's sources, and writes to the cache and to ``.triton/``.
"""
