"""A vLLM without EngineCore, for an environment of `support.engineless`: its engine is `_engine`.

All other names are those of unit tests: `_names` is a copy of ``support/fake_vllm.py``.
"""

from __future__ import annotations

from types import SimpleNamespace

from vllm import _engine, _names

_names.install(
    {
        "vllm.engine.arg_utils": SimpleNamespace(AsyncEngineArgs=_engine.AsyncEngineArgs),
        "vllm.v1.engine.async_llm": SimpleNamespace(AsyncLLM=_engine.AsyncLLM),
        "vllm.v1.engine.core_client": SimpleNamespace(
            launch_core_engines=_engine.launch_core_engines, VLLM_ENGINE_READY_TIMEOUT_S=600
        ),
    }
)
