"""Operator requests: what an operator may ask of the engine itself, if config.pbtxt allows it.

``request`` reads them without the engine. ``run`` carries them out in the engine's event loop.
"""
