"""Shared by every room: the workspace (cache, network), reports, errors, programs, files and locks.

Nothing here knows vLLM, Triton or a stage. Only ``process`` starts programs.
Only ``network`` reaches a network.
"""
