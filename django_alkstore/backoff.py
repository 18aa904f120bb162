"""The wait before the next attempt: the retry curve, and the random extra on top of it."""

import math
import random

rng = random.Random()
"""The source of the random extra. Tests replace or seed it."""


def backoff(base: float, attempt: int, cap: float, extra: float = 0.0) -> float:
    """Seconds to wait after the `attempt`-th attempt failed: `base * 2 ** (attempt - 1)`, at most `cap`.

    `extra` is a share of that wait that is added to it, 0 or more. Without one, jobs that failed together (a server
    was down) would come back together.
    """
    try:
        wait = min(math.ldexp(base, attempt - 1), cap)
    except OverflowError:
        wait = cap
    return wait + wait * extra
