"""Run vLLM's workers on a machine other than the first one of their engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triton_vllm.vllm_api.names import Vllm


def run_node(vllm: Vllm, values: Mapping[str, Any]) -> None:
    """Start this machine's workers of vLLM's multi-node executor; return when one has ended.

    Args:
        vllm: the loaded vLLM.
        values: the engine arguments, with ``nnodes``, ``node_rank`` and ``master_addr``.
    """
    # This does the same as vLLM's `serve --headless` (entrypoints/cli/serve.py, run_headless), but
    # for the usage context of `engine.start`, on which some defaults depend. Otherwise
    # max_num_batched_tokens would differ, and all ranks must have the same.
    usage = vllm.UsageContext.API_SERVER
    config = vllm.AsyncEngineArgs(**values).create_engine_config(usage_context=usage, headless=True)
    module = importlib.import_module("vllm.v1.executor.multiproc_executor")
    executor = module.MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)
