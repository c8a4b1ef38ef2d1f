"""What the adapter counts on in vLLM: stated (`needs`, `adapter`), read in a vLLM's sources (`describe`), judged and compared.

A vLLM comes in as a folder of its sources (`fetch`, `sources`) and is only read with `ast`, never imported, so that one machine
can look at every version. `tools/vllm_contract.py` is the command.
"""
