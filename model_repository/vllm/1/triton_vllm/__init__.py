"""Serves vLLM's AsyncLLM from Triton's Python backend.

Every module but `transport` imports without Triton, and every module imports without vLLM: vLLM is loaded by `compat`
when the engine starts, because the server also loads `model.py` in a process that only completes the configuration.
"""
