"""When the requests of an open loop are due."""

from __future__ import annotations

from array import array

import numpy as np


def arrival_times(*, count: int, rate: float, seed: int, burstiness: float = 1.0) -> array[float]:
    """Return the times at which requests are due, in seconds from the start, in their order.

    The same seed gives the same times. The gaps have the gamma distribution, as those of
    ``vllm bench serve``: a burstiness of 1 is a Poisson process, less comes in bursts, more is more
    even. An infinite burstiness gives equal gaps.

    Args:
        count: number of requests.
        rate: requests per second.
        seed: seed of the random numbers.
        burstiness: the shape of the gamma distribution.
    """
    window = count / rate
    # There is one gap more than requests, because the window does not end with an arrival.
    if np.isinf(burstiness):
        gaps = np.ones(count + 1)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, size=count + 1)
    times = np.cumsum(gaps)
    # Scale the sum of the gaps to the window: otherwise each seed would have another mean rate. For
    # a given number of arrivals of a Poisson process this is their exact distribution.
    times *= window / times[-1]
    # Eight bytes for each, where a list would need 32.
    return array("d", times[:-1].tobytes())
