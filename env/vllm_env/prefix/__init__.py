"""Make a conda prefix from a lock: install its wheels, prune it, remove the build's paths, and compile bytecode.

This room writes only to the cache. From the network it takes only what the lock names.
"""
