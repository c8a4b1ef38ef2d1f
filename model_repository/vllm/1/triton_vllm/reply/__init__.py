"""Answer requests: turn the outputs of jobs into responses, with one final response for each request.

This room owns the sender threads and the watch for cancelled requests.
Only ``answer.Reply`` may use Triton's response sender.
"""
