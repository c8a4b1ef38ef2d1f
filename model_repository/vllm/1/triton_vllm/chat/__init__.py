"""Chats: in come a request's messages and tools, out go what vLLM is asked, and the parts of its answer.

It uses the checks of `media` and `constraints`. It touches no file and starts no thread.
"""
