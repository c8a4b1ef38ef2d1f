"""Turn a Triton request into a `Job`, or refuse it: in come tensors and parameters, out goes what vLLM is asked.

It checks everything that can be checked without the engine; it touches no file, starts no thread and waits for nothing.
"""
