"""Pack a conda prefix as the build does, and print the archive's SHA-256.

python -m vllm_env.layout PREFIX FILE.tar.gz
"""

import sys
from pathlib import Path

from .tar import contents_of, write_archive

print(write_archive(contents_of(Path(sys.argv[1])), Path(sys.argv[2])))  # noqa: T201 - the result
