"""A model's folder and a Triton root come in; the answers of the smoke run, or the caches of ``--warm``, go out.

It starts stock tritonserver on 127.0.0.1 and leaves no process, shared memory or extracted environment behind.
"""
