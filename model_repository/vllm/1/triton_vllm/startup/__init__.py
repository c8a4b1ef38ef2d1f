"""What `initialize` does: it turns Triton's arguments and the model's files into a model that can take requests.

This room may read files, set environment variables, start processes and import vLLM. No other room
does all of that.
"""
