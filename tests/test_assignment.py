"""Key-groups as ranges: joining and subtracting them, against sets of numbers."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statekit.assignment import group_ranges, subtract
from statekit.errors import ArgumentError

numbers = st.sets(st.integers(0, 40))


def as_parts(chosen: set[int], cuts: set[int]) -> list[Any]:
    """The same numbers as ints and ranges, cut at some places, in no order."""
    parts: list[Any] = []
    for number in sorted(chosen, key=lambda one: (one % 3, one)):
        parts.append(number if number in cuts else range(number, number + 1))
    runs = group_ranges(parts)
    return [*reversed(runs)] if len(cuts) % 2 else parts


@given(numbers, numbers)
def test_ranges_have_what_was_given_ascending_with_gaps_between(
    chosen: set[int], cuts: set[int]
) -> None:
    ranges = group_ranges(as_parts(chosen, cuts))
    assert [number for part in ranges for number in part] == sorted(chosen)
    for first, second in pairwise(ranges):
        assert first.stop < second.start
    assert all(len(part) and part.step == 1 for part in ranges)
    assert group_ranges(range(3, 20, 4)) == tuple(range(at, at + 1) for at in range(3, 20, 4))


@given(numbers, numbers, numbers)
def test_what_is_subtracted_is_out_and_nothing_else(
    chosen: set[int], gone: set[int], more: set[int]
) -> None:
    holes = (*group_ranges(gone), *group_ranges(more))  # which may overlap
    found = subtract(group_ranges(chosen), holes)
    assert found == group_ranges(chosen - gone - more)


@pytest.mark.parametrize(
    ("groups", "wrong"),
    [
        ([1, 1], "key-group 1 is given twice"),
        ([range(5), 4], "key-group 4 is given twice"),
        ([4, range(5)], "key-group 4 is given twice"),
        ([range(3), range(2, 4)], "key-group 2 is given twice"),
        ([-1], "no key-group -1"),
        ([8], "no key-group 8.*0 to 7"),
        (range(6, 10), "no key-group 8.*0 to 7"),
        ([range(20, 30)], "no key-group 20.*0 to 7"),
        (["a"], "names no key-groups"),
        (5, "names no key-groups"),
        ([1.5], "names no key-groups"),
    ],
    ids=str,
)
def test_what_cannot_be_is_named(groups: Any, wrong: str) -> None:
    with pytest.raises(ArgumentError, match=wrong):
        group_ranges(groups, 8)
