"""What all rooms share: errors, limits, values of JSON, Triton's objects. Nothing comes in from another room.

`triton` alone calls Triton. No module here starts a process, opens a socket or knows what a request is for.
"""
