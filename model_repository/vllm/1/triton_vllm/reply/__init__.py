"""Answer requests: turn the outputs of jobs into responses.

Each request gets exactly one final response. This room owns the sender threads and the watch for
cancelled requests. Only ``reply.Reply`` may use Triton's response sender.
"""
