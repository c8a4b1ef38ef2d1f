"""Make a lock of exact wheels and conda packages from a spec file and the command line's changes.

This room asks the registries, fetches or builds the pinned vLLM into the cache, and writes
``pylock.toml`` files.
"""
