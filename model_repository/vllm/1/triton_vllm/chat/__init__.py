"""Chats: make a prompt's parts of messages and tools, and read the parts of the answer.

This room uses the checks of ``media`` and ``constraints``. It touches no file and starts no thread.
"""
