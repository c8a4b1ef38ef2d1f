"""Metrics: publish vLLM's Prometheus families as the same samples on Triton's metrics endpoint.

This room runs one thread. It holds one lock file, which says which process publishes a model's
metrics.
"""
