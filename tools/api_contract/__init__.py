"""The adapter's contract with vLLM: what it needs, and what a version lacks.

The contract is declared in ``needs`` and ``adapter``, checked against vLLM's sources by ``judge``, and compared by ``describe``. A vLLM
is a folder of sources (``fetch``, ``sources``). It is only parsed with ``ast``, never imported, so one machine can check every
version. ``tools/vllm_contract.py`` is the command.

griffe's ``find_breaking_changes`` is no substitute. Of 26 faults that ``tests/contract/test_tool.py`` plants, it finds 8. It does
not check awaited methods, calls, raised errors or the defaults of msgspec's fields. And it does not report new names.
"""
