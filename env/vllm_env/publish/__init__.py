"""Publish a verified set of built files into the model's folder, which is complete at every moment.

This room writes to the user's model repository. ``--warm`` (``serve/warm.py``) writes there too,
with this room's exchange.
"""
# Every build publishes, and a server may poll the same repository at any time. So the rules of
# this room are: stage first, replace in one step, and leave the user's files as they are.
