"""Programs and modules that run in the interpreter of a packed environment, not in the packager.

Each is copied into the environment, or given to its interpreter, as a file. They use only the
standard library and each other. Two exceptions: the trainer of the stand-in model needs torch and
transformers, and the probes import what they are asked to.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
