"""Code that all rooms share: errors, limits, JSON values, Triton's objects.

It imports no other room. Only ``triton`` calls Triton. No module here starts a process, opens a
socket or knows the purpose of a request.
"""
