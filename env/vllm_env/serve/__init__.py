"""Start stock tritonserver on a model's folder, for the answers of the smoke run or the caches of ``--warm``.

The server listens on 127.0.0.1 and leaves no process, shared memory or extracted environment behind.
"""
