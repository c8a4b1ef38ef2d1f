"""Serve vLLM's AsyncLLM from Triton's Python backend.

    model.py ─► service ─► startup                      once: files, devices, vLLM, engine
                       └─► request ─► engine ─► reply   each request: Triton request ─► Job ─► outputs ─► responses

`call` says what was asked and `job` how far it is. Each feature has a room of its own: `chat`, `operator`, `constraints`,
`instances`, `lora`, `media`, `metrics`, `pooling`. `vllm_api` has all that depends on vLLM's version, and `base.triton` alone
calls Triton. A room imports only from those below it (import-linter holds the floors, see pyproject.toml).

No module imports vLLM when it is imported: `startup` does that through `vllm_api` when the engine starts, because the server
also loads `model.py` in a process that only completes the configuration.
"""
