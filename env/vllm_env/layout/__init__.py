"""A finished prefix comes in; what a model's folder holds of it goes out, the same bytes for the same prefix.

It reads the prefix and writes to the cache, and touches neither the network nor a model repository.
"""
