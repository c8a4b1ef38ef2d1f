"""Turn a Triton request into a ``Job``, or refuse it: tensors and parameters become a call of vLLM.

This room checks everything that can be checked without the engine. It touches no file, starts no
thread and never waits.
"""
