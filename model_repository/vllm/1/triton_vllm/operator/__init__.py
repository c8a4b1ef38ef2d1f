"""Turn an operator's request, such as sleep or wake up, into a call of the engine and a result.

Reading a request has no effects. Only ``run`` calls the engine.
"""
