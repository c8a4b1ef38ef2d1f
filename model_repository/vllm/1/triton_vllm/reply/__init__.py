"""Answer requests: turn the outputs of jobs into responses, exactly one of them final for each request.

This room owns the sender threads and the watch for cancelled requests.
Only `answer.Reply` may use Triton's response sender.
"""
