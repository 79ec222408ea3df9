"""Waits: what callers waited for while key-groups were handed over, and how long.

The unit is seconds of callers: two threads that wait at the same time for half a second make one.
A prefetch counts as a caller, since records are parked for it. What the hand-over's own threads do
does not: nobody waits for them but those who are counted anyway.

    aligning  on_step, in which an engine changes its routes: the next step waits for it
    shut      the key-groups are neither there nor here, from the call that asks for them until
              they are here; whoever has a record of them waits as long
    queued    somebody else brings the leaf, or it has not had its turn in the stream
    wire      the answer to what the caller itself has asked for
    decode    what has come is being taken in
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple


class Waits(NamedTuple):
    """Seconds that callers waited, by what for."""

    aligning: float = 0.0
    shut: float = 0.0
    queued: float = 0.0
    wire: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


def total_of(some: Iterable[Waits]) -> Waits:
    """
    >>> total_of([Waits(shut=1.0), Waits(shut=0.5, wire=2.0)])
    Waits(aligning=0.0, shut=1.5, queued=0.0, wire=2.0, decode=0.0)
    """
    return Waits(*(sum(seconds) for seconds in zip(Waits(), *some, strict=True)))


class Waited:
    """Adds up what callers wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found = Waits()._asdict()
        self._ours: set[int] = set()  # threads of the hand-over itself

    @property
    def found(self) -> Waits:
        with self._lock:
            return Waits(**self._found)

    def add(self, **seconds: float) -> None:
        if threading.get_ident() not in self._ours:
            with self._lock:
                for what, more in seconds.items():
                    self._found[what] += more

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Counts how long it takes, also if it fails."""
        began = perf_counter()
        try:
            yield
        finally:
            self.add(**{what: perf_counter() - began})

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """What this thread does meanwhile is the hand-over's own work."""
        me = threading.get_ident()
        with self._lock:
            self._ours = self._ours | {me}
        try:
            yield
        finally:
            with self._lock:
                self._ours = self._ours - {me}
