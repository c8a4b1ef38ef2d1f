"""Make a conda prefix from a lock.

Install its wheels, prune it, remove the build's paths, and compile bytecode. This room writes only
to the cache. From the network it takes only the files that the lock names.
"""
