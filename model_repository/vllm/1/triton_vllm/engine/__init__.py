"""Run vLLM: take orders, and pass each output to the job's delivery.

A job's last output is finished or an exception. This room owns the event loop and its thread, and
the one ledger of what vLLM works on. It knows nothing about Triton, tensors or how an answer is
sent.
"""
