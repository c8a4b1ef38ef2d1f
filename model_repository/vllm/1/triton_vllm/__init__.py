"""Serve vLLM's AsyncLLM from Triton's Python backend.

    model.py ─► service ─► loading                          once: files, devices, vLLM, engine
                       └─► admission ─► inference ─► delivery   each request: Triton request ─► Job ─► outputs ─► responses

The rooms hand on what `request` (what was asked) and `job` (its state) define. `compat` finds the
parts of vLLM, `transport` alone calls Triton; `protocols` has the types of what they hand over.

No module imports vLLM when it is imported: `loading` does that through `compat` when the engine starts, because the server
also loads `model.py` in a process that only completes the configuration.
"""
