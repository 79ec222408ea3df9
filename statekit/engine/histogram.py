"""Histogram: how often a record took how long, in buckets that are a few percent wide.

Log-linear: from one power of two to the next there are SUB buckets of the same width. So the error
of a percentile is less than 1 / SUB, from a nanosecond to centuries, and a column of latencies is
counted in two steps of NumPy, some nanoseconds a record.
"""

from typing import Any

import numpy as np

SUB = 32
_POWERS = 64


class Histogram:
    """Of numbers that are not negative; what is less counts as 0."""

    def __init__(self) -> None:
        self.counts = np.zeros(_POWERS * SUB, np.int64)
        self.longest = 0.0

    def add(self, values: Any) -> None:
        if not len(values):
            return
        values = np.maximum(np.asarray(values, np.float64), 0.0)
        self.longest = max(self.longest, float(values.max()))
        # values + 1 is mantissa * 2**power with a mantissa from a half to one.
        mantissa, power = np.frexp(values + 1.0)
        at = (power - 1) * SUB + ((mantissa - 0.5) * (2 * SUB)).astype(np.int64)
        self.counts += np.bincount(np.minimum(at, len(self.counts) - 1), minlength=len(self.counts))

    def merge(self, other: "Histogram") -> None:
        self.counts += other.counts
        self.longest = max(self.longest, other.longest)

    @property
    def records(self) -> int:
        return int(self.counts.sum())

    def percentile(self, percent: float) -> float:
        """The upper end of the bucket that it is in; 0 if there are no records."""
        total = self.records
        if not total:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self.counts), max(total * percent / 100, 1)))
        power, sub = divmod(at, SUB)
        return min(float(2.0**power * (1 + (sub + 1) / SUB) - 1), self.longest)
