"""Chats: turn a request's messages and tools into a prompt's parts, and read the parts of the answer.

This room uses the checks of ``media`` and ``constraints``. It touches no file and starts no thread.
"""
