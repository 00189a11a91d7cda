"""How far two computations of one number may part, whatever processor and shape their sums were made with."""

UNIT = 2.0**-24  # float32 rounds a number of size 1 by at most this
ROOM = 10  # another processor's rounding is a few times the estimate; a fault that matters is a thousand times larger


def rounding(terms: int = 1, size: float = 1.0) -> float:
    """Ten times four standard deviations of what two orders of a float32 sum differ by: each of its additions rounds,
    and the errors add up like a random walk.

    Args:
        terms: of a sum, or of all sums on the longest path through layers that keep their numbers' size.
        size: of the result.
    """
    return ROOM * 4 * terms**0.5 * UNIT * size
