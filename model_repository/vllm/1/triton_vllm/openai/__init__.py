"""Serve vLLM's own OpenAI application over the engine that Triton serves.

    client ─► connection ─► door ─► vLLM's application ─► seam ─► the engine

``connection`` bounds what a client may send before its request is known. ``door`` reads a request
and refuses it, or passes it on (``fields``, ``body`` and ``contents`` say what passes). ``seam`` is
the engine as the application sees it: each request passes the same gate as Triton's. ``server``
ties them to the engine's life. ``arguments`` and ``port`` are for the load, before the engine
starts.

This room opens a socket. If OPENAI_PORT is not set, nothing of it is imported.
"""
