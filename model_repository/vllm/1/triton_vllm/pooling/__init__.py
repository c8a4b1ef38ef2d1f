"""Embeddings, classes and scores: turn JSON into the parts that vLLM gets, and outputs into an answer's texts.

This room touches no file, starts no thread and makes no tensor.
"""
