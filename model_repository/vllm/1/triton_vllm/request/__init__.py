"""Turn a Triton request into a ``Call`` of the engine, or refuse it.

``parse`` reads tensors and parameters. Each kind of request (``generate``, ``embedding``, and the
operator's in ``kinds``) then checks itself against the model. This room touches no file, starts no
thread and never waits.
"""
