"""Check a lock, or an environment, for errors that Triton would meet only later.

The results are notes for the user, or an error. Environments are unpacked and started below the
cache, or where a user's servers look for them. Nothing in them changes. Checks run in threads.
"""
# Without these checks, such errors would show only at a server's start or at its first request, and
# often on another machine than the one that built.
