"""A finished prefix comes in; one ``vllm_env.tar.gz`` with its digest goes out, the same bytes for the same prefix.

It reads the prefix and writes to the cache, and touches neither the network nor a model repository.
"""
