"""`triton_vllm.base.triton` imports what only tritonserver's stub has; here a stand-in takes its place."""

from __future__ import annotations

import queue
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from support import fake_triton
from support.engine_parts import PACE, STEP, DeadError, FailureError, Llm, Log, PassingError, Prompter, RefusalError
from triton_vllm.base.limits import USUAL
from triton_vllm.engine.engine import Engine
from triton_vllm.instances.source import Sole

_MODULE = fake_triton.install()


@pytest.fixture
def triton():
    """The stand-in for `triton_python_backend_utils`, with an empty log and nothing unloaded."""
    fake_triton.Logger.lines.clear()
    _MODULE.unloaded.clear()
    return _MODULE


@pytest.fixture
def started():
    """Engines to stop at the end."""
    Llm.started, Llm.fail_starts = [], 0
    engines = []

    def start(*, restart=True, limits=USUAL, store=None, **pace):
        vllm: Any = SimpleNamespace(
            AsyncEngineArgs=lambda **_: None,
            AsyncLLM=Llm,
            UsageContext=SimpleNamespace(API_SERVER=None),
            EngineDeadError=DeadError,
            refusals=(RefusalError,),
            client_errors=(RefusalError, ValueError, TypeError),
            busy_errors=(),
            failures=(FailureError,),
            passing_failures=(PassingError,),
            enable_envs_cache=None,
            disable_envs_cache=None,
            step_timeout_s=STEP,
        )
        got: queue.Queue[Any] = queue.Queue()
        paced = replace(PACE, restart=restart, **pace)
        prompter: Any = Prompter()
        engine = Engine(vllm, Sole(vllm, {}), prompter, store, log=Log(), limits=limits, pace=paced)
        engine.start()
        engine.got = got  # type: ignore[attr-defined]  # where a test's requests put what they get
        engines.append(engine)
        return engine, got

    yield start
    for engine in engines:
        engine.stop(0)
