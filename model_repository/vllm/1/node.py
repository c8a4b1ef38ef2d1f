"""Run this machine's part of an engine that several machines share.

    /opt/vllm_env/bin/python model_repository/vllm/1/node.py --rank 1

Machine 0 is Triton's. docs/several_machines.md has the whole story.
"""

import sys
from pathlib import Path

# Bytecode next to model.py would change the model's folder.
sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
# With PYTHONSAFEPATH, Python leaves this folder out.
sys.path[:0] = [] if str(HERE) in sys.path else [str(HERE)]

from triton_vllm.startup.node import main  # noqa: E402 - it is found now

if __name__ == "__main__":
    sys.exit(main(HERE))
