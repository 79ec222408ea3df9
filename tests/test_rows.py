"""Rows from the store: C makes the same rows of dirty entries as rows.py makes of their blocks."""

import random
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from statekit import Store
from statekit.errors import ArgumentError
from statekit.homes.rows import block_rows
from statekit.native.block import Block

LEAVES = 128
NUMBERS = {"i": 3, "f": 0, "b": 65535, "l": 256, "m": 1, "n": 2, "t": 4, "tb": 5, "tm": 6}
ALL = 1 << 62


def new_store() -> Store:
    store = Store(key_groups=32, subgroups=4)
    store.write_back()
    store.set_time("processing", 1_700_000_000_123)
    return store


def fill(store: Store, seed: int, keys: int = 400) -> None:
    """Entries of every kind, some of them deleted, under keys of all lengths."""
    rng = random.Random(seed)
    states: dict[str, Any] = {
        "i": store.state("i", "i64"),
        "f": store.state("f", "f64", tuple[str, int]),
        "b": store.state("b", "bytes", bytes),
        "l": store.state("l", "list", int),
        "m": store.state("m", "map"),
        "n": store.state("n", "nested"),
        "t": store.state("t", "timers"),
        "tb": store.state("tb", "bytes", timed=True),
        "tm": store.state("tm", "map", int, timed=True),
    }
    for at in range(keys):
        text = f"{at}" + "x" * rng.choice((0, 5, 12, 30, 300))
        states["i"].put(text, rng.choice((0, -1, 2**63 - 1, -(2**63), at)))
        states["f"].put((text, at), rng.choice((0.0, -0.5, float("inf"), 1e300)))
        states["b"].put(text.encode(), rng.randbytes(rng.choice((0, 1, 64, 250, 260, 70_000))))
        states["l"].put(at, msgpack.packb([rng.random() for _ in range(rng.choice((0, 3, 200)))]))
        states["m"].put(text, msgpack.packb({k: "v" * k for k in range(rng.choice((0, 3, 90)))}))
        states["n"].put(text, msgpack.packb(rng.choice((None, 7, [1, {"a": [2]}], {"k": "v"}))))
        for due in rng.sample(range(1000), 3):
            states["t"].set(text, due)
        states["tb"].put(text, rng.randbytes(20))
        states["tm"].put(at, msgpack.packb({"a": at}))
        if rng.random() < 0.2:
            for state, key in (("i", text), ("b", text.encode()), ("tm", at)):
                states[state].delete(key)


def rows_of_blocks(store: Store) -> dict[bytes, bytes | None]:
    """The rows of what is dirty, made from blocks. This writes nothing home."""
    rows: dict[bytes, bytes | None] = {}
    for leaf in range(store.leaves):
        for block in Block.each(store.dirty_take(leaf)):
            prefix = struct.pack(">IH", leaf, NUMBERS[block.name])
            keys = [prefix + key for key in block.key_list()]
            rows.update(zip(keys, block_rows(block), strict=True))
        store.dirty_done(leaf, written=False)
    return rows


def taken(store: Store, **options: Any) -> Iterator[tuple[list[Any], int, int, dict[str, int]]]:
    leaf = 0
    while leaf < store.leaves:
        start = leaf
        rows, leaf, counts, _ = store.rows_take(start, NUMBERS, **options)
        yield rows, start, leaf, counts


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_blocks(seed: int) -> None:
    store = new_store()
    fill(store, seed)
    expected = rows_of_blocks(store)
    rows, leaf, counts, _ = store.rows_take(0, NUMBERS, ALL, ALL)
    assert leaf == LEAVES
    assert len(rows) == 2 * len(expected)
    assert dict(zip(rows[::2], rows[1::2], strict=True)) == expected
    assert counts == {
        state.name: store.stats(state).dirty for state in store.states() if store.stats(state).dirty
    }
    store.rows_done(0, leaf, written=True)
    assert store.stats().dirty == 0
    assert store.rows_take(0, NUMBERS, ALL, ALL)[:3] == ([], LEAVES, {})


@pytest.mark.parametrize("limits", [(1, ALL), (ALL, 1), (50, 100_000), (0, 0)])
def test_takes_with_limits_add_up(limits: tuple[int, int]) -> None:
    store = new_store()
    fill(store, 7, keys=100)
    expected = rows_of_blocks(store)
    found: dict[Any, Any] = {}
    for rows, start, stop, counts in taken(store, rows_max=limits[0], bytes_max=limits[1]):
        assert rows
        assert sum(counts.values()) == len(rows) // 2
        assert all(start <= struct.unpack(">I", name[:4])[0] < stop for name in rows[::2])
        found.update(zip(rows[::2], rows[1::2], strict=True))
        store.rows_done(start, stop, written=True)
    assert found == expected
    assert store.stats().dirty == 0


def test_a_take_that_nobody_ended_is_as_if_it_had_not_been() -> None:
    store = new_store()
    fill(store, 3, keys=60)
    first = store.rows_take(0, NUMBERS, ALL, ALL)
    assert store.rows_take(0, NUMBERS, ALL, ALL) == first
    store.rows_done(0, LEAVES, written=False)
    assert store.rows_take(0, NUMBERS, ALL, ALL) == first


def test_cold_rows_are_those_not_used_since_the_hand_passed() -> None:
    store = new_store()
    visits = store.state("i", "i64")
    visits.put_many(["a", "b"], [1, 2])
    assert store.rows_take(0, NUMBERS, ALL, ALL, cold=True)[0] == []
    store.evict(1)  # the hand passes
    visits.get("a")
    ((name, row),) = [store.rows_take(0, NUMBERS, ALL, ALL, cold=True)[0]]
    assert name.endswith(b"b")  # type: ignore[union-attr]
    assert row == b"\xd3" + struct.pack(">q", 2)


def test_numbers_may_change_and_states_may_come() -> None:
    store = new_store()
    visits = store.state("i", "i64")
    for numbers in ({"i": 1}, {"i": 2}, {"i": 2, "later": 3}):
        visits.add("a")
        (name, _), leaf, _, _ = store.rows_take(0, numbers, ALL, ALL)
        assert name is not None
        assert struct.unpack(">H", name[4:6]) == (numbers["i"],)
        store.rows_done(0, leaf, written=True)
    store.state("later", "i64").put("a", 1)
    (name, _), leaf, counts, _ = store.rows_take(0, numbers, ALL, ALL)
    assert name is not None
    assert struct.unpack(">H", name[4:6]) == (3,)
    assert counts == {"later": 1}


def test_a_state_without_a_number_is_named() -> None:
    store = new_store()
    store.state("i", "i64").put("a", 1)
    for numbers in ({}, {"other": 1}, {"i": -1}, {"i": 65536}):
        with pytest.raises(ArgumentError, match="state 'i'"):
            store.rows_take(0, numbers, ALL, ALL)
    for bad in ({"i": "one"}, {"i": 2**31}):
        with pytest.raises(ArgumentError, match="numbers of states"):
            store.rows_take(0, bad, ALL, ALL)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        store.rows_take(LEAVES + 1, NUMBERS, ALL, ALL)
    rows, leaf, _, _ = store.rows_take(0, NUMBERS, ALL, ALL)
    assert len(rows) == 2
    store.rows_done(0, leaf, written=True)


def test_a_store_that_writes_nothing_home_has_no_rows() -> None:
    store = Store(key_groups=32, subgroups=4)
    store.state("i", "i64").put("a", 1)
    with pytest.raises(ArgumentError, match="write-back is off"):
        store.rows_take(0, NUMBERS, ALL, ALL)
    store.write_back()
    assert len(store.rows_take(0, NUMBERS, ALL, ALL)[0]) == 2


# ---- All at one moment


def test_a_moment_has_all_changes_or_none_if_they_are_too_many() -> None:
    store = new_store()
    fill(store, seed=7)
    expected = rows_of_blocks(store)
    assert store.rows_moment(NUMBERS, 100) is None
    taken = store.rows_moment(NUMBERS, ALL)
    assert taken is not None
    rows, _ = taken
    assert dict(zip(rows[::2], rows[1::2], strict=True)) == expected
    store.rows_done(0, LEAVES, written=True)
    assert store.rows_moment(NUMBERS, 0) == ([], {})


def test_a_moment_has_no_change_without_those_before_it() -> None:
    # A thread counts under one key after the other: no key may be ahead of the key before it.
    store = new_store()
    counts = store.state("i", "i64")
    keys = [f"k{i}" for i in range(40)]
    over = threading.Event()

    def count() -> None:
        while not over.is_set():
            for key in keys:
                counts.add(key, 1)

    thread = threading.Thread(target=count)
    thread.start()
    at_home: dict[bytes, int] = {}
    try:
        for _ in range(300):
            taken = store.rows_moment(NUMBERS, ALL)
            assert taken is not None
            rows = iter(taken[0])
            for name, row in zip(rows, rows, strict=True):
                assert name is not None
                assert row is not None
                at_home[name[6:]] = struct.unpack(">xq", row)[0]
            store.rows_done(0, LEAVES, written=True)
            seen = [at_home.get(key.encode(), 0) for key in keys]
            assert seen == sorted(seen, reverse=True)
            assert seen[0] - seen[-1] <= 1
    finally:
        over.set()
        thread.join()
