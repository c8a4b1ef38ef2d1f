"""What every room needs: the workspace (cache, network), reports, errors, programs, files and locks.

Nothing here knows of vLLM, Triton or a stage; ``process`` alone starts programs and ``network`` alone reaches a network.
"""
