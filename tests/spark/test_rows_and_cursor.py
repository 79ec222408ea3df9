"""Rows and cursors, without Spark: against plain dicts."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statekit as sk
from statekit.spark.cursor import Page, State, Timers, check_states, declare, make_cursor, set_key
from statekit.spark.rows import Grouped, Rows, count_nulls, drop_nulls, split_late

KEYS = st.sampled_from(["a", "b", "c", "ä", ""])
NUMBERS = st.integers(-(2**40), 2**40)


@given(st.lists(st.tuples(KEYS, st.sampled_from([0, 1, -5]), NUMBERS), max_size=60))
def test_each_key_has_its_rows_in_the_order_in_which_they_came(rows: list[Any]) -> None:
    for key in (("k",), ("k", "n"), ("n", "k", "v")):
        at = {"k": 0, "n": 1, "v": 2}
        oracle: dict[Any, list[Any]] = {}
        for row in rows:
            whole = tuple(row[at[name]] for name in key)
            oracle.setdefault(whole if len(key) > 1 else whole[0], []).append(row)
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        types = (pa.string(), pa.int64(), pa.int64())
        arrays = [pa.chunked_array([pa.array(c, t)]) for c, t in zip(columns, types, strict=True)]
        grouped = Grouped(pa.table(arrays, names=["k", "n", "v"]), key)
        keys, bounds = grouped.keys(), grouped.bounds
        assert keys == list(oracle)
        for i, one in enumerate(keys):
            found = Rows(grouped.columns, bounds[i], bounds[i + 1])
            assert len(found) == len(oracle[one])
            assert list(found) == oracle[one]
            assert found["v"] == [row[2] for row in oracle[one]]
            assert found[-1].v == oracle[one][-1][2]
            assert found.to_arrow().column("k").to_pylist() == [row[0] for row in oracle[one]]


def test_rows_say_which_columns_there_are() -> None:
    grouped = Grouped(pa.table({"k": ["a"], "v": [1]}), ("k",))
    with pytest.raises(sk.errors.ArgumentError, match=r"no column 'x'. They have k, v"):
        Rows(grouped.columns, 0, 1)["x"]


def test_nulls_are_found_in_any_part_of_a_key() -> None:
    table = pa.table({"a": ["x", None, "y", None], "b": [1, 2, None, None], "c": [1, 2, 3, 4]})
    assert count_nulls(table, ("a",)) == 2
    assert count_nulls(table, ("a", "b")) == 3
    assert drop_nulls(table, ("a", "b")).column("c").to_pylist() == [1]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_rows_at_or_before_the_watermark_are_late(unit: str, zone: str | None) -> None:
    times = [datetime.fromtimestamp(s, UTC).replace(tzinfo=None) for s in (9, 10, 11)]
    column = pa.array([*times, None], pa.timestamp(unit))
    if zone:
        column = column.cast(pa.timestamp(unit, zone))
    in_time, late = split_late(pa.table({"t": column}), "t", 10_000)
    assert (in_time.to_pylist(), late) == ([False, False, True, True], 2)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "set", "clear", "get", "text", "untext", "append", "put", "drop"]),
        st.integers(0, 5),
        st.integers(-100, 100),
    ),
    max_size=40,
)
STATES = {
    "count": int,
    "mean": State(float, default=1.5),
    "text": str,
    "items": list[int],
    "by_name": dict[str, int],
}


@settings(max_examples=150)
@given(st.lists(STEPS, min_size=1, max_size=4))
def test_a_cursor_changes_states_as_plain_values_change(pages: list[Any]) -> None:
    states = check_states(STATES)
    kv = sk.open("memory:", key_groups=8, subgroups=1)
    declare(kv, states, "s")
    cursor = make_cursor(kv, states, 5, 1)
    oracle: dict[str, dict[str, Any]] = {name: {} for name in STATES}
    for steps in pages:
        keys = [f"k{i}" for i in range(6)]
        cursor._turn(Page(pa.array(keys)))
        for i, key in enumerate(keys):  # key by key, as a task does
            set_key(cursor, key)
            for cell in cursor._cells:
                cell._at = i
            for what, at, number in steps:
                if at == i:
                    _step(cursor, oracle, key, what, number)
        cursor._flush()
    for name in STATES:
        stored = {key: _plain(value) for key, value in kv[name].items()}
        assert stored == oracle[name]
    kv.close()


def _plain(value: Any) -> Any:
    return value.copy() if hasattr(value, "copy") and not isinstance(value, dict | list) else value


def _step(st: Any, oracle: Any, key: str, what: str, number: int) -> None:
    counts, texts = oracle["count"], oracle["text"]
    if what == "add":
        counts[key] = counts.get(key, 0) + number
        assert st.count.add(number) == counts[key]
        mean = oracle["mean"]
        mean[key] = mean.get(key, 1.5) + number
        assert st.mean.add(number) == mean[key]
    elif what == "set":
        st.count.set(number)
        counts[key] = number
    elif what == "clear":
        st.count.clear()
        counts.pop(key, None)
    elif what == "get":
        assert st.count.get() == counts.get(key)
        assert st.count.get(-1) == counts.get(key, -1)
        assert st.mean.get() == oracle["mean"].get(key, 1.5)
        assert st.text.get() == texts.get(key)
        assert st.text.exists() == (key in texts)
        assert list(st["items"]) == oracle["items"].get(key, [])
        assert st.key == key
    elif what == "text":
        st.text.value = f"t{number}"
        texts[key] = f"t{number}"
        assert st.text.value == f"t{number}"
    elif what == "untext":
        st.text.clear()
        texts.pop(key, None)
        with pytest.raises(KeyError, match=key):
            _ = st.text.value
    elif what == "append":
        st["items"].append(number)
        oracle["items"].setdefault(key, []).append(number)
    elif what == "put":
        st.by_name[str(number)] = number
        oracle["by_name"].setdefault(key, {})[str(number)] = number
    else:
        st.by_name.clear()
        if key in oracle["by_name"]:
            oracle["by_name"][key] = {}  # a view that is cleared stays, and is empty


def make(**states: Any) -> tuple[Any, Any]:
    kv = sk.open("memory:", key_groups=8, subgroups=1)
    found = check_states(states)
    declare(kv, found, "s")
    cursor = make_cursor(kv, found, None, 0)
    cursor._turn(Page(pa.array(["alice", "bob"])))
    set_key(cursor, "alice")
    return kv, cursor


def test_a_wrong_value_is_reported_where_it_is_set_with_its_key() -> None:
    _, cursor = make(count=int, text=str)
    with pytest.raises(sk.errors.BadValueError, match=r"'x'.*not int.*'count'.*'alice'"):
        cursor.count.set("x")
    with pytest.raises(sk.errors.BadValueError, match=r"1\.5.*'count'.*'alice'"):
        cursor.count.add(1.5)
    with pytest.raises(sk.errors.BadValueError, match=r"5.*'text'.*'alice'"):
        cursor.text.set(5)


def test_a_sum_that_does_not_fit_into_64_bits_is_refused() -> None:
    kv, cursor = make(count=int)
    cursor.count.set(2**63 - 1)
    cursor.count.add(1)
    with pytest.raises(sk.errors.StateKitError, match="64 bits"):
        cursor._flush()
    assert dict(kv["count"].items()) == {}


def test_what_get_gives_is_a_copy() -> None:
    kv, cursor = make(pair=State(tuple[int, list[int]]))
    given = (1, [2])
    cursor.pair.set(given)
    given[1].append(3)
    cursor.pair.get()[1].append(4)
    assert cursor.pair.get() == (1, [2])
    cursor._flush()
    assert kv["pair"]["alice"] == (1, [2])


def test_a_state_cannot_be_assigned_to_and_an_unknown_one_is_named() -> None:
    _, cursor = make(count=int)
    with pytest.raises(AttributeError, match=r"st\.count\.set"):
        cursor.count = 5
    with pytest.raises(AttributeError, match=r"no state 'counts'. Declared are: count"):
        _ = cursor.counts


@pytest.mark.parametrize("name", ["key", "watermark", "batch_id", "not a name", 5])
def test_names_that_a_function_could_not_use_are_refused(name: Any) -> None:
    with pytest.raises(sk.errors.ArgumentError, match="cannot be the name of a state"):
        check_states({name: int})


def test_timers_of_the_current_key() -> None:
    kv, cursor = make(expiry=Timers, count=int)
    cursor.expiry.set(5)
    set_key(cursor, "bob")
    cursor.expiry.move(7)
    assert cursor.expiry.get() == (7,)
    assert kv["expiry"].pop_due(9) == [(5, "alice"), (7, "bob")]


def test_a_value_that_lives_longer_when_read_is_read_only_for_keys_that_ask() -> None:
    life = sk.TTL(0.010, time="event", refresh="read")  # ten units of event time
    kv = sk.open("memory:", key_groups=8, subgroups=1)
    states = check_states({"seen": State(int, ttl=life)})
    declare(kv, states, "s")
    kv.advance_watermark(100)
    kv["seen"].put_many(["alice", "bob"], [1, 2])
    kv.advance_watermark(106)
    cursor = make_cursor(kv, states, 106, 0)
    cursor._turn(Page(pa.array(["alice", "bob"])))
    set_key(cursor, "alice")
    assert cursor.seen.get() == 1
    kv.advance_watermark(112)
    assert dict(kv["seen"].items()) == {"alice": 1}
