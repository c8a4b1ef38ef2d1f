"""A plan, a packed or an unpacked environment comes in; notes go out, or the error that Triton would meet later.

It unpacks and starts what it checks below the cache, and changes nothing of it.
"""
