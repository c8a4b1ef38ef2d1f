"""What was built and verified comes in; the model's folder in the repository goes out, whole at every moment.

It writes to the user's model repository. So does ``--warm`` (``serve/warm.py``), by the exchange of this room.
"""
