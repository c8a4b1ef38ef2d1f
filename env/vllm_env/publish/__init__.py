"""What was built and verified comes in; the model's folder in the repository goes out, whole at every moment.

This room alone writes to the user's model repository, and reads back the manifest that it placed there.
"""
