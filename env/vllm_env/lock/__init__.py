"""A spec file and the command line's changes come in; a lock of exact wheels and conda packages goes out.

It asks the registries, fetches or builds the pinned vLLM into the cache, and writes ``pylock.toml`` files.
"""
