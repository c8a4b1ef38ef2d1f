"""Publish a built and verified set into the model's folder of a repository, which is complete at every moment.

This room writes to the user's model repository. ``--warm`` (``serve/warm.py``) does so, too, with this room's exchange.
"""
