"""Start stock tritonserver on a model's folder, for the smoke run or the caches of ``--warm``.

The server listens on 127.0.0.1. It leaves no process, shared memory or extracted environment.
"""
# Triton and vLLM do not clean up after a crash or a kill: orphans of vLLM hold the GPU's memory,
# and an extracted environment has gigabytes. So this room notes what a server starts and writes.
