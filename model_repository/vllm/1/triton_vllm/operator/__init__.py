"""Requests of an operator (sleep, wake up, load an adapter): in comes JSON, out goes the result.

Reading a request is pure; only `run` calls the engine.
"""
