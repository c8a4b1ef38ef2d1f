"""LoRA adapters: in come names and folders, out go vLLM's `LoRARequest`s for what these folders hold.

It keeps private copies of adapters in a temporary folder; it writes nowhere else.
"""
