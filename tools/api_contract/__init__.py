"""The adapter's contract with vLLM: what it needs, and what a version lacks.

The contract is declared in ``needs`` and ``adapter``. ``judge`` checks it against the sources of a
vLLM. ``tools/vllm_contract.py`` is the command.

A vLLM is a folder of sources (``fetch``, ``sources``). It is parsed with ``ast`` and never
imported, so one machine can check every version.

griffe's ``find_breaking_changes`` is no substitute. It finds 8 of the 26 faults that
``tests/contract/test_tool.py`` plants. It does not check awaited methods, calls, raised errors or
the defaults of msgspec's fields, and it does not report new names.
"""
