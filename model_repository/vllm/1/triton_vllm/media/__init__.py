"""Pictures, audio and video: in come base64 texts of a request, out go checked and decoded items.

Sizes are read from the headers first. It touches no file and fetches nothing; vLLM's decoders run in the caller's thread.
"""
