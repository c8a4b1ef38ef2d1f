"""``python -m vllm_env``: what gen_vllm_env.sh runs."""

import signal
import sys

from vllm_env.cli.main import main

try:
    status = main()
    # The work is done: a signal during the interpreter's exit must not change the status.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
except KeyboardInterrupt:
    status = 130
sys.exit(status)
