"""What a participant knows of leaves: one record for each. Leaves that are alike share a record.

There may be 2^20 leaves, and most are alike. A record is never changed, only replaced, so one
record can stand for all leaves of which the same is known. A hand-over of a million leaves is
therefore begun and accepted in a few steps: one for each run of leaves that are alike.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from statekit.protocol.messages import Leases, runs_of

#: States of a leaf; docs/protocol.md says what each means.
NONE, OWNED, PARTIAL, EXPECTED = "none", "owned", "partial", "expected"
OFFERED, RETURNED = "offered", "returned"

_SHARED_MAX = 4096  # records that are remembered in order to be shared


class Known(NamedTuple):
    """What is known of a leaf. It is kept when the leaf has gone, to recognize late messages."""

    state: str
    epoch: int  # the greatest that was ever valid here; OFFERED: the target's
    covered: int  # the last checkpoint that the leaf is in
    peer: str = ""  # EXPECTED, PARTIAL: the source; OFFERED: the target; NONE: who has it
    migration: str = ""  # the last one that it was part of
    version: int = 0  # of the table that brought it here
    is_closed: bool = True  # OWNED: nobody else holds a copy that could become the leaf again
    is_sent: bool = False  # OFFERED: something of it was sent, so the target may own it


class KnownLeaves:
    """The records, by leaf. Iterating gives the leaves of which something is known."""

    def __init__(self) -> None:
        self._records: list[Known | None] = []  # by leaf
        self._shared: dict[Known, Known] = {}

    def get(self, leaf: int) -> Known | None:
        """None if the leaf was never heard of."""
        return self._records[leaf] if leaf < len(self._records) else None

    def __getitem__(self, leaf: int) -> Known:
        known = self._records[leaf]
        assert known is not None, f"leaf {leaf} was never heard of"
        return known

    def __iter__(self) -> Iterator[int]:
        return (leaf for leaf, _ in self.items())

    def items(self) -> Iterator[tuple[int, Known]]:
        return ((leaf, known) for leaf, known in enumerate(self._records) if known is not None)

    def alike(
        self, leaves: Sequence[int] | None = None
    ) -> list[tuple[Known | None, Sequence[int]]]:
        """Leaves (all if none are given) in runs, each with the one record of all its leaves.

        The record is None for leaves that were never heard of.
        """
        runs = [range(len(self._records))] if leaves is None else _runs(leaves)
        parts: list[tuple[Known | None, Sequence[int]]] = []
        for run in runs:
            records = self._records[run.start : run.stop]
            if not records:
                parts.append((None, run))  # beyond all leaves that were ever heard of
            elif len(records) == len(run) == records.count(records[0]):
                parts.append((records[0], run))
            else:
                records += [None] * (len(run) - len(records))
                at = run.start
                for known, same in groupby(records):
                    stop = at + sum(1 for _ in same)
                    parts.append((known, range(at, stop)))
                    at = stop
        if leaves is None:
            return [part for part in parts if part[0] is not None]
        return parts

    def put(self, leaves: Sequence[int], known: Known) -> None:
        """This is known of these leaves from now on."""
        if len(self._shared) >= _SHARED_MAX:
            self._shared.clear()
        known = self._shared.setdefault(known, known)
        for run in _runs(leaves):
            if run.stop > len(self._records):
                self._records += [None] * (run.stop - len(self._records))
            self._records[run.start : run.stop] = [known] * len(run)

    def leases(self, leaves: Sequence[int]) -> Leases:
        """The epochs of those leaves that were ever heard of."""
        return [
            (run, known.epoch)
            for known, some in self.alike(leaves)
            if known is not None
            for run in _runs(some)
        ]

    def clear(self) -> None:
        self._records.clear()


def _runs(leaves: Sequence[int]) -> list[range]:
    """The same leaves as ranges, ascending."""
    if len(leaves) == 1:
        return [range(leaves[0], leaves[0] + 1)]
    if isinstance(leaves, range):
        return [leaves] if leaves else []
    return runs_of(sorted(leaves))
