"""Draws: random numbers of an event that depend on the seed and its number, and on nothing else.

So any process can make any event again, in whole columns: a source that goes on from a checkpoint,
another number of sources, and the oracle, which remakes all events.
"""

from typing import Any

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(numbers: Any) -> Any:
    """splitmix64's last step: a bijection of 64 bits that looks random."""
    with np.errstate(over="ignore"):
        x = np.asarray(numbers).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * _FIRST
        x = (x ^ (x >> np.uint64(27))) * _SECOND
        return x ^ (x >> np.uint64(31))


def uniform(seed: int, numbers: Any, draw: int) -> Any:
    """Draw number `draw` of each event: 0 <= x < 1."""
    with np.errstate(over="ignore"):
        state = np.uint64(seed) ^ (np.asarray(numbers).astype(np.uint64) * _STEP)
        return (mixed(state + np.uint64(draw + 1) * _STEP) >> np.uint64(11)) * 2.0**-53


def below(seed: int, numbers: Any, draw: int, n: Any) -> Any:
    """The same as a whole number: 0 <= x < n, where n may be a column."""
    return (uniform(seed, numbers, draw) * n).astype(np.int64)


class Ranks:
    """Ranks 0 .. n-1 by their shares: the more often, the lower. exponent 0: all alike."""

    def __init__(self, n: int, exponent: float, shift: float = 0.0) -> None:
        """Shares are 1 / (rank + 1 + shift) ** exponent: Zipf's law, and Mandelbrot's with a
        shift.
        """
        self.n = n
        self._sums: Any = None
        if exponent:
            sums = np.cumsum((np.arange(1, n + 1) + shift) ** -float(exponent))
            self._sums = sums / sums[-1]

    def of(self, seed: int, numbers: Any, draw: int) -> Any:
        if self._sums is None:
            return below(seed, numbers, draw, self.n)
        return np.searchsorted(self._sums, uniform(seed, numbers, draw), side="right")
