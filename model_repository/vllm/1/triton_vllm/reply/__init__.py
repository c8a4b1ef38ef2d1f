"""Answer requests: in come the outputs of jobs, out go responses, exactly one of them final for each request.

It owns the sender threads and the watch for cancelled requests.
Only `answer.Reply` may send to Triton's response sender or ask it.
"""
