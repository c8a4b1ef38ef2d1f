"""Metrics: in come vLLM's Prometheus families, out go the same samples on Triton's metrics endpoint.

It runs one thread, and holds one lock file that says which process publishes a model's metrics.
"""
