"""Requests of an operator (sleep, wake up, load an adapter): turn JSON into a call of the engine, and return its result.

Reading a request has no effects. Only `run` calls the engine.
"""
