"""Which worker has which key-groups.

>>> assign(128, 3)
[range(0, 42), range(42, 85), range(85, 128)]
>>> group_ranges([5, 1, 2, 3, range(8, 10)])
(range(1, 4), range(5, 6), range(8, 10))
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any, TypeAlias

from statekit.errors import ArgumentError, shorten

KeyGroups: TypeAlias = range | Iterable[int | range]


def assign(key_groups: int, workers: int) -> list[range]:
    """Contiguous shares: worker i of P has key-groups [i*G//P, (i+1)*G//P)."""
    if not isinstance(key_groups, int) or not isinstance(workers, int):
        raise ArgumentError(
            f"{shorten(key_groups)} key-groups for {shorten(workers)} workers cannot be assigned. "
            "Pass two ints, as in assign(128, 4)."
        )
    if not 1 <= workers <= key_groups:
        raise ArgumentError(
            f"{key_groups} key-groups cannot be shared by {shorten(workers)} workers. "
            f"Use 1 to {key_groups} workers."
        )
    bounds = [worker * key_groups // workers for worker in range(workers + 1)]
    return [range(bounds[worker], bounds[worker + 1]) for worker in range(workers)]


def group_ranges(groups: KeyGroups, key_groups: int | None = None) -> tuple[range, ...]:
    """Key-groups as ascending ranges with gaps between them; each may be given once.

    key_groups: how many key-groups there are; ArgumentError for one beyond them.
    """
    parts: list[range] = []
    try:
        if isinstance(groups, str | bytes | bytearray):  # bytes would pass for ints
            raise TypeError
        for part in [groups] if isinstance(groups, range) else groups:
            one = part if isinstance(part, range) else range(part.__index__(), part.__index__() + 1)
            parts += [one] if one.step == 1 else [range(at, at + 1) for at in one]
    except (TypeError, AttributeError):
        raise ArgumentError(
            f"{shorten(groups)} names no key-groups. Pass a range, such as range(0, 64), or a list "
            "of ints and ranges."
        ) from None
    found: list[range] = []
    for part in sorted(filter(None, parts), key=lambda part: part.start):
        if part.start < 0 or (key_groups is not None and part.stop > key_groups):
            wrong = part.start if part.start < 0 else max(part.start, key_groups or 0)
            raise ArgumentError(
                f"there is no key-group {wrong}. They are counted from 0 to "
                f"{'' if key_groups is None else key_groups - 1}."
            )
        if found and part.start < found[-1].stop:
            raise ArgumentError(f"key-group {part.start} is given twice. Give each once.")
        if found and part.start == found[-1].stop:
            found[-1] = range(found[-1].start, part.stop)
        else:
            found.append(part)
    return tuple(found)


def subtract(ranges: tuple[range, ...], gone: tuple[range, ...]) -> tuple[range, ...]:
    """The key-groups of `ranges` that are not in `gone`. `gone` may name a key-group twice."""
    holes = sorted(gone, key=lambda part: part.start)
    found = []
    at = 0
    for part in group_ranges(ranges):
        while at < len(holes) and holes[at].stop <= part.start:
            at += 1
        start = part.start
        for hole in islice(holes, at, None):
            if hole.start >= part.stop:
                break
            if hole.start > start:
                found.append(range(start, hole.start))
            start = max(start, hole.stop)
        if start < part.stop:
            found.append(range(start, part.stop))
    return group_ranges(found)


def common(a: tuple[range, ...], b: tuple[range, ...]) -> tuple[range, ...]:
    """The key-groups that are in both."""
    return subtract(a, subtract(a, b))


def leaf_ranges(ranges: Iterable[range], subgroups: int) -> tuple[range, ...]:
    """The leaves of key-groups."""
    return tuple(range(part.start * subgroups, part.stop * subgroups) for part in ranges)


def show_groups(ranges: Iterable[Any]) -> str:
    """Ranges in words: "0-63, 96"."""
    parts = [f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in ranges if len(r)]
    return ", ".join(parts) or "none"
