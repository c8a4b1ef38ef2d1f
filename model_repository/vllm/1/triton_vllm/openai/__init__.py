"""Serve vLLM's own OpenAI application over the engine that Triton serves.

    client ─► connection ─► middleware ─► vLLM's application ─► checked_engine ─► the engine

``connection`` bounds what a client may send before its request is known. ``acceptor`` bounds the
connections. ``middleware`` reads a request and refuses it, or passes it on (``fields``, ``body``,
``contents``, ``conversation`` and ``items`` say what passes). ``checked_engine`` is the engine as
the application sees it: each request passes the same checks as Triton's, and has its place in the
same ledger.
``delivery`` ends requests. ``server`` ties them to the engine's life.
``arguments`` and ``port`` are for the load, before the engine starts.

This room opens a socket. If OPENAI_PORT is not set, nothing of it is imported.
"""
