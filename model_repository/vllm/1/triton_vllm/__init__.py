"""Serve vLLM's AsyncLLM from Triton's Python backend.

    model.py ─► service ─► startup                      once: files, devices, vLLM, engine
                       └─► request ─► engine ─► reply   for each request:
            Triton's request ─► Job ─► outputs ─► responses

``call`` is a request's content and ``job`` its state. Each feature has its own room: ``chat``,
``operator``, ``constraints``, ``instances``, ``lora``, ``media``, ``metrics``, ``pooling``.
``vllm_api`` contains everything that depends on vLLM's version. Only ``base.triton`` calls Triton.
A room imports only from the rooms below it; import-linter checks that, see pyproject.toml.

Importing a module never imports vLLM. ``startup`` imports it through ``vllm_api`` when the engine
starts. The server also loads ``model.py`` in a process that only completes the configuration, and
importing vLLM takes 10 to 18 seconds.
"""
