"""A load tester for Triton and for what vLLM serves: it sends requests and measures the answers.

It takes requests and a shape of load. It returns a record of each answer, and figures with the
definitions and names of ``vllm bench serve``. These are its modules. Each imports only from those
before it:

- ``errors``, ``record``: a request, and the record of what happened to it
- ``arrivals``, ``loops``: when a request is due, and the loops that send
- ``samples``, ``measures``, ``difference``: from records to figures, and how much two runs differ
- ``prompts``, ``random_prompts``: requests from a text file, from JSONL, or made up
- ``option_values``, ``option_conflicts``, ``options``: the command line
- ``endpoint``: the model to ask, and what each client for it can do
- ``triton``, ``openai``, ``backends``: the requests over Triton's gRPC, and to vLLM's own server
- ``shape``, ``versus``: the load of the command line for one server, and for two in turns
- ``answers``, ``plot``, ``report``, ``progress``: what a run writes and shows
- ``overhead``: how much the client itself took part
- ``run``: a whole run

``client/client.py`` and ``benchmarks/`` use it. The first three lines need only NumPy. The package
opens sockets in ``triton`` and ``openai``, and writes files in ``answers`` and ``report``.
"""
