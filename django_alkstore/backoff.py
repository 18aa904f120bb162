"""The one owner of the retry curve."""

import math


def backoff(base: float, attempt: int, cap: float) -> float:
    """Seconds to wait after the failure of the `attempt`-th attempt: `base * 2 ** (attempt - 1)`, at most `cap`.

    The cap is applied to the exponent's result and not to its input, and an overflow *is* the cap, so no
    number of attempts can raise or go back.
    """
    try:
        return min(math.ldexp(base, attempt - 1), cap)
    except OverflowError:
        return cap
