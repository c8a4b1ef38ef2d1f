"""Turn an operator's request (sleep, wake up, load an adapter) into calls of the engine and a result.

Reading a request has no effects. Only ``run`` calls the engine.
"""
