"""What `initialize` does: in come Triton's arguments and the model's files, out goes a model that can take requests.

It may read files, set environment variables, start processes and import vLLM; no other room does any of that.
"""
