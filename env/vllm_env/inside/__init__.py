"""Programs and modules that run inside the packed environment, in its interpreter; none of them imports this package.

They use the standard library only, but for the trainer of the stand-in model (torch and transformers) and what a probe is
asked to import. Each is copied into the environment, or given to its interpreter, as a file.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
