"""Turn a Triton request into an ``Order`` of vLLM, or refuse it: tensors and parameters go in.

This room checks everything that can be checked without the engine. It touches no file, starts no
thread and never waits.
"""
