"""When timers are due next: so that a batch reads only those that fire.

The timers of a task's key-groups are in its leaves, and most of them are not due. So each version
says in its metadata, for each state of timers and each *slice* of the key-groups, a time before
which no timer of the slice is due. (A slice is a key-group; of more than 128 there are 128 slices
of several.) A task reads the timers of a slice iff that time is not after the watermark, or is not
known. Of other slices it brings those of the keys that the batch touches, like any other state.

    of a slice that was read     the time is that of its first timer, exactly
    of one that was not          the least of the time before, and of the timers that are here: so
                                 it may be too early, and then the slice is read once for nothing,
                                 but never too late

A timer that is missed would be a wrong answer. So the times are believed only in the very version
that they were written for, which is known by the names of its parts: an edit, a merge or a regroup
of a checkpoint keeps its metadata, but not these.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from statekit.checkpoint.reader import Checkpoint

SLICES_MAX = 128
UNKNOWN = -(2**63)
NEVER = 2**63 - 1

Times: TypeAlias = dict[str, list[int]]  # of each state of timers, by slice
Reported: TypeAlias = dict[str, list[tuple[int, int]]]  # the same of one task: slice and time


def slice_count(key_groups: int) -> int:
    return min(key_groups, SLICES_MAX)


def slice_groups(at: int, key_groups: int) -> range:
    """The key-groups of a slice."""
    width = key_groups // slice_count(key_groups)
    return range(at * width, (at + 1) * width)


def _mark(parts: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(sorted(parts)).encode()).hexdigest()[:32]


def noted(times: Times, parts: Iterable[str]) -> dict[str, Any]:
    """What the metadata of a version have. parts: the files of its parts."""
    return {"parts": _mark(parts), "times": times}


def times_of(base: Checkpoint | None, note: Mapping[str, Any] | None, key_groups: int) -> Times:
    """The times of a version; of states that are not in it, nothing is known."""
    found = None if base is None or note is None else note.get("due")
    if not isinstance(found, dict) or found.get("parts") != _mark(base.manifest.parts):  # type: ignore[union-attr]
        return {}
    count = slice_count(key_groups)
    return {
        name: times
        for name, times in found["times"].items()
        if len(times) == count and all(type(one) is int for one in times)
    }


def slices_to_read(
    known: Sequence[int] | None, groups: range, key_groups: int, watermark: int | None
) -> set[int]:
    """The slices of a task whose timers it must have. known: the times of a state, if any are."""
    if watermark is None:
        return set()  # nothing fires
    return {
        at
        for at in _slices(groups, key_groups)
        if (UNKNOWN if known is None else known[at]) <= watermark
    }


def _slices(groups: range, key_groups: int) -> range:
    """The slices that a range of key-groups has something of."""
    width = key_groups // slice_count(key_groups)
    return range(groups.start // width, -(-groups.stop // width))


def leaves_of(slices: Iterable[int], groups: range, key_groups: int, subgroups: int) -> list[int]:
    """The leaves of slices, as far as they are in a range of key-groups."""
    return [leaf for at in sorted(slices) for leaf in _leaves(at, groups, key_groups, subgroups)]


def _leaves(at: int, groups: range, key_groups: int, subgroups: int) -> range:
    mine = slice_groups(at, key_groups)
    start, stop = max(mine.start, groups.start), min(mine.stop, groups.stop)
    return range(start * subgroups, stop * subgroups)


def times_after(
    raw: Any,
    known: Sequence[int] | None,
    was_read: set[int],
    groups: range,
    key_groups: int,
    subgroups: int,
) -> list[tuple[int, int]]:
    """The times of a state after a task. raw: its native state."""
    found = []
    for at in _slices(groups, key_groups):
        leaves = _leaves(at, groups, key_groups, subgroups)
        first = raw.next_due_of(leaves.start, leaves.stop)
        time = NEVER if first is None else first
        if at not in was_read:
            time = min(time, UNKNOWN if known is None else known[at])
        found.append((at, time))
    return found


def merge(before: Times, reports: Iterable[Reported], key_groups: int) -> Times:
    """The times of a version: what its tasks say, and of states that its op has not, as before."""
    found: Times = {}
    for reported in reports:
        for name, times in reported.items():
            merged = found.setdefault(name, [NEVER] * slice_count(key_groups))
            for at, time in times:
                merged[at] = min(merged[at], time)
    return {**before, **found}
