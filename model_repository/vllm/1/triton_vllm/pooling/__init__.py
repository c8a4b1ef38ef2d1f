"""Embeddings, classes and scores: in comes JSON, out go the parts that vLLM is asked, and an answer's texts.

It touches no file, starts no thread and makes no tensor.
"""
