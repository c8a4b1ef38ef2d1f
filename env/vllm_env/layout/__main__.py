"""``python -m vllm_env.layout PREFIX FILE.tar.gz``: pack a conda prefix as the build does; print the archive's SHA-256."""

import sys
from pathlib import Path

from .tar import plan_archive, write_archive

print(write_archive(plan_archive(Path(sys.argv[1])), Path(sys.argv[2])))  # noqa: T201 - the result
