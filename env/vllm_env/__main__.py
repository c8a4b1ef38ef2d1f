"""``python -m vllm_env``: what gen_vllm_env.sh runs."""

import signal
import sys

from vllm_env.cli.main import main

try:
    status = main()
    for number in (signal.SIGINT, signal.SIGTERM):  # the work is done; the interpreter's end would let them kill it
        signal.signal(number, signal.SIG_IGN)
except KeyboardInterrupt:
    status = 130
sys.exit(status)
