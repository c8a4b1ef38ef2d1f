"""Run vLLM: in come jobs, out go their outputs, each handed to `put`, the last one finished or an exception.

It owns the event loop and its thread; it knows nothing of Triton, of tensors or of how an answer is sent.
"""
