"""Run vLLM: take jobs, and pass each output to ``put``.

A job's last output is finished or an exception. This room owns the event loop and its thread. It
knows nothing about Triton, tensors or how an answer is sent.
"""
