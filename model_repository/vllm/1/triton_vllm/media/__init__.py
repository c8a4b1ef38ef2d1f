"""Pictures, audio and video: turn the base64 strings of a request into checked and decoded items.

Sizes are read from the headers first. This room touches no file and fetches nothing; vLLM's
decoders run in the caller's thread.
"""
