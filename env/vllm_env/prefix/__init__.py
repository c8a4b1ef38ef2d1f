"""A lock comes in; a conda prefix goes out, with its wheels installed, pruned, free of the build's paths, and compiled.

It writes to the cache only, and takes from the network what the lock names.
"""
