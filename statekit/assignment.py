"""Which worker has which key-groups.

>>> assign(128, 3)
[range(0, 42), range(42, 85), range(85, 128)]
>>> group_ranges([5, 1, 2, 3, range(8, 10)])
(range(1, 4), range(5, 6), range(8, 10))
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

from statekit.errors import ArgumentError, shorten

KeyGroups: TypeAlias = range | Iterable[int | range]


def assign(key_groups: int, workers: int) -> list[range]:
    """Contiguous shares: worker i of P has key-groups [i*G//P, (i+1)*G//P)."""
    if not isinstance(workers, int) or not 1 <= workers <= key_groups:
        raise ArgumentError(
            f"{key_groups} key-groups cannot be shared by {shorten(workers)} workers. "
            f"Use 1 to {key_groups} workers."
        )
    bounds = [worker * key_groups // workers for worker in range(workers + 1)]
    return [range(bounds[worker], bounds[worker + 1]) for worker in range(workers)]


def group_ranges(groups: KeyGroups, key_groups: int | None = None) -> tuple[range, ...]:
    """Key-groups as ascending ranges with gaps between them; each may be given once.

    key_groups: how many there are; ArgumentError for one beyond.
    """
    numbers: list[int] = []
    try:
        for part in [groups] if isinstance(groups, range) else groups:
            numbers.extend(part if isinstance(part, range) else [part.__index__()])
    except (TypeError, AttributeError):
        raise ArgumentError(
            f"{shorten(groups)} are no key-groups. Pass a range, or a list of ints and ranges."
        ) from None
    numbers.sort()
    found: list[list[int]] = []
    for number in numbers:
        if number < 0 or (key_groups is not None and number >= key_groups):
            raise ArgumentError(
                f"there is no key-group {number}. They are counted from 0 to "
                f"{'' if key_groups is None else key_groups - 1}."
            )
        if found and number < found[-1][1]:
            raise ArgumentError(f"key-group {number} is given twice. Give each once.")
        if found and number == found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return tuple(range(start, stop) for start, stop in found)


def subtract(ranges: tuple[range, ...], gone: tuple[range, ...]) -> tuple[range, ...]:
    """The key-groups of `ranges` that are not in `gone`."""
    taken = {group for part in gone for group in part}
    return group_ranges([group for part in ranges for group in part if group not in taken])


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
