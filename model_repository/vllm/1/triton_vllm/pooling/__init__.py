"""Embeddings, classes and scores: turn JSON into vLLM's inputs, and outputs into an answer.

This room touches no file, starts no thread and makes no tensor.
"""
