"""Check a plan, or a packed or unpacked environment, and find the errors that Triton would meet later.

The results are notes for the user, or an error. Environments are unpacked and started below the cache; nothing in them
changes.
"""
