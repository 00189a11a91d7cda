"""How far two computations of one number may part, whatever instruction set and shape their sums were made with."""

UNIT = 2.0**-24  # float32 rounds a number of size 1 by at most this


def rounding(terms: int, size: float = 1.0) -> float:
    """What two orders of a float32 sum may differ by: each of its additions rounds, and the errors add up like a random
    walk. Four standard deviations of it.

    Args:
        terms: of a sum, or of all sums on the longest path through layers that keep their numbers' size.
        size: of the result.
    """
    return 4 * terms**0.5 * UNIT * size
