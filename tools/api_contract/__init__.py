"""What the adapter counts on in vLLM, and what a version lacks of it.

It is stated in `needs` and `adapter`, looked for in a vLLM's sources by `judge`, and compared by `describe`. A vLLM comes in as a
folder of its sources (`fetch`, `sources`) and is only read with `ast`, never imported, so that one machine can look at every
version. `tools/vllm_contract.py` is the command.

griffe's `find_breaking_changes` cannot do this: of 26 faults that `tests/contract/test_tool.py` plants it sees 8. It does not
look at what is awaited, at calls, at what is raised or at the defaults of msgspec's fields, and does not say what is new.
"""
