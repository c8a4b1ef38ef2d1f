"""LoRA adapters: turn a name into vLLM's ``LoRARequest`` for its folder's current contents.

This room keeps private copies of adapters in a temporary folder. It writes nowhere else.
"""
