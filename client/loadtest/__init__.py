"""A load tester for Triton and for what vLLM serves: it sends requests and measures the answers.

What comes in is a list of requests and a shape of load; what goes out are records of answers, and
figures with the definitions and names of ``vllm bench serve``. The modules, each of which imports
only from those before it:

- ``record``: a request, and the record of what happened to it
- ``arrivals``, ``loops``: when a request is due, and the loops that send
- ``samples``, ``measures``, ``overhead``: from records to figures; the load that the client is
- ``prompts``, ``random_prompts``: requests from a text file, from JSONL, or made up
- ``answers``, ``report``, ``progress``: what a run writes and shows
- ``options``: the command line
- ``triton``, ``triton_errors``: the requests over Triton's gRPC
- ``run``: a whole run

``client/client.py`` and ``benchmarks/`` use it. The first three lines need only NumPy. The package
opens sockets in ``triton`` and writes files in ``answers`` and ``report``; it starts no processes.
"""
