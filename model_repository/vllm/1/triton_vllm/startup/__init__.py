"""What ``initialize`` does: it loads a model, from Triton's arguments and the model's files.

This room may read files, set environment variables, start processes and import vLLM. No other room
does all of that.
"""
