"""LoRA adapters: turn names and folders into vLLM's `LoRARequest`s for the folders' current contents.

This room keeps private copies of adapters in a temporary folder. It writes nowhere else.
"""
