"""``python -m vllm_env``: what gen_vllm_env.sh runs."""

import sys

from .cli import main

sys.exit(main())
