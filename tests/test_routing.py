"""RoutingTable against a plain list of owners."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statekit.errors import ArgumentError
from statekit.protocol.routing import Move, RoutingTable

OWNERS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=24)


@given(OWNERS)
def test_a_table_says_what_the_list_says(owners: list[str]) -> None:
    table = RoutingTable.of(3, owners)
    assert table.version == 3
    assert table.leaves == len(owners)
    assert table.owners() == tuple(owners)
    assert [table.owner_of(leaf) for leaf in range(len(owners))] == owners
    for name in "abc":
        mine = [leaf for part in table.leaves_of(name) for leaf in part]
        assert mine == [leaf for leaf, owner in enumerate(owners) if owner == name]


@given(OWNERS)
def test_ranges_are_as_long_as_possible(owners: list[str]) -> None:
    names = [name for _, name in RoutingTable.of(1, owners).parts()]
    assert all(one != other for one, other in itertools.pairwise(names))


@given(OWNERS, st.data())
def test_moved_leaves_have_their_new_owner_and_no_others(
    owners: list[str], data: st.DataObject
) -> None:
    leaves = data.draw(st.sets(st.integers(0, len(owners) - 1)))
    old = RoutingTable.of(1, owners)
    new = old.moved(leaves, "z")
    assert new.version == 2
    assert new.owners() == tuple(
        "z" if leaf in leaves else owner for leaf, owner in enumerate(owners)
    )


@given(OWNERS, st.data())
def test_the_difference_of_two_tables_turns_one_into_the_other(
    owners: list[str], data: st.DataObject
) -> None:
    names = st.sampled_from(["a", "b", "c"])
    later = data.draw(st.lists(names, min_size=len(owners), max_size=len(owners)))
    old, new = RoutingTable.of(1, owners), RoutingTable.of(2, later)
    moves = new.diff(old)
    found = list(owners)
    for move in moves:
        assert set(found[move.start : move.stop]) == {move.old}
        found[move.start : move.stop] = [move.new] * (move.stop - move.start)
    assert found == later
    for one, other in itertools.pairwise(moves):
        assert one.stop < other.start or one[2:] != other[2:]
    assert old.diff(old) == ()


def test_key_groups_are_assigned_as_ranges_of_leaves() -> None:
    table = RoutingTable.assigned(1, {"a": [range(1), range(2, 3)], "b": [range(1, 2)]}, 2)
    assert table.owners() == ("a", "a", "b", "b", "a", "a")
    moved = table.moved([2, 3], "a")
    assert moved.parts() == [(range(6), "a")]
    assert moved.diff(table) == (Move(2, 4, "b", "a"),)


def test_each_key_group_is_assigned_to_one_owner() -> None:
    with pytest.raises(ArgumentError, match="key-group 1 is assigned to nobody"):
        RoutingTable.assigned(1, {"a": [range(1)], "b": [range(2, 3)]}, 4)
    with pytest.raises(ArgumentError, match="key-group 1 is assigned to more than one"):
        RoutingTable.assigned(1, {"a": [range(2)], "b": [range(1, 3)]}, 4)


def test_leaves_and_tables_that_do_not_exist_are_refused() -> None:
    table = RoutingTable.of(1, ["a", "b"])
    for leaf in (-1, 2):
        with pytest.raises(ArgumentError, match=f"there is no leaf {leaf}. They are 0 to 1"):
            table.owner_of(leaf)
    with pytest.raises(ArgumentError, match="there is no leaf 5"):
        table.moved([5], "a")
    with pytest.raises(ArgumentError, match="tables of 3 and 2 leaves do not compare"):
        table.diff(RoutingTable.of(1, ["a", "a", "a"]))
