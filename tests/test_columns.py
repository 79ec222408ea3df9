"""Columns and batches: every source of keys and values, against plain dicts."""

import array
import re
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statekit import Store
from statekit._native import ffi
from statekit.errors import (
    BadValueError,
    ColumnError,
    KeyTypeError,
    KindError,
    OverflowStateError,
    UnknownEntryError,
)
from statekit.keys import key_codec
from statekit.native.arrow import arrow_column
from statekit.native.columns import column, key_column

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")

pack, unpack = msgpack.packb, msgpack.unpackb
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
INTS = [5, -1, INT_MIN, INT_MAX, 0]
TEXTS = ["alice", "", "ключ", "日本", "x" * 300]
BLOBS = [b"", b"\x00\xff", b"abc", b"y" * 300, b"z"]
FLOATS = [0.5, -0.0, 1e308, float("inf"), 3.0]


def items(source: Any, want: str) -> list[Any]:
    """What C would read from a column, as Python items."""
    found = column(source, want)
    codec = key_codec({"f": "b"}.get(found.letter, found.letter))
    raw = [found.encoded(record) for record in range(found.n)]
    if found.letter == "f":
        return [float(np.frombuffer(item, "<f8")[0]) for item in raw]
    return [codec.decode(item) for item in raw]


class Foreign:
    """An Arrow array of some other library: it has the interface and nothing else."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return self._values.__arrow_c_array__(requested_schema)


class ForeignStream:
    """A chunked column of some other library."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._values.__arrow_c_stream__(requested_schema)


class ForeignSeries:
    """A series that only knows NumPy."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def to_numpy(self) -> Any:
        return np.asarray(self._values)


def shown(value: object) -> str:
    """A name for a test: short, and the same in every process."""
    return re.sub(" at 0x[0-9a-f]*", "", str(value)[:30])


SOURCES: list[tuple[str, Any, list[Any]]] = [
    ("i", INTS, INTS),
    ("i", tuple(INTS), INTS),
    ("i", (x for x in INTS), INTS),
    ("i", dict.fromkeys(INTS).keys(), INTS),
    ("i", range(5), list(range(5))),
    ("i", array.array("q", INTS), INTS),
    ("i", array.array("i", [1, -2]), [1, -2]),
    ("i", memoryview(array.array("q", INTS)), INTS),
    ("i", memoryview(array.array("q", INTS))[::2], INTS[::2]),
    ("i", np.array(INTS), INTS),
    ("i", np.array(INTS)[::-2], INTS[::-2]),
    ("i", np.array([1, -2], ">i8"), [1, -2]),
    ("i", np.array([1, -2], "i2"), [1, -2]),
    ("i", np.array([1, 2], "u8"), [1, 2]),
    ("i", np.array([7, -7], object), [7, -7]),
    ("i", np.frombuffer(b"x" + np.array([3, 4]).tobytes(), "<i8", offset=1), [3, 4]),
    ("i", pa.array(INTS), INTS),
    ("i", pa.array(INTS)[1:4], INTS[1:4]),
    ("i", pa.array([1, -2], pa.int32()), [1, -2]),
    ("i", pa.array([1, 2], pa.uint64()), [1, 2]),
    ("i", pa.array([5, 5, 6]).dictionary_encode(), [5, 5, 6]),
    ("i", pa.chunked_array([[1, 2], [3], []]), [1, 2, 3]),
    ("i", pa.chunked_array([[1, 2]]), [1, 2]),
    ("i", Foreign(pa.array(INTS)[2:]), INTS[2:]),
    ("i", ForeignStream(pa.chunked_array([[1], [2]])), [1, 2]),
    ("i", ForeignSeries(INTS), INTS),
    ("f", FLOATS, FLOATS),
    ("f", INTS[:2], [5.0, -1.0]),
    ("f", array.array("d", FLOATS), FLOATS),
    ("f", np.array(FLOATS), FLOATS),
    ("f", np.array([0.5, 2], "f4"), [0.5, 2.0]),
    ("f", np.array([1, 2]), [1.0, 2.0]),
    ("f", pa.array(FLOATS)[1:], FLOATS[1:]),
    ("f", pa.array([0.5], pa.float32()), [0.5]),
    ("f", pa.array([1, 2]), [1.0, 2.0]),
    ("s", TEXTS, TEXTS),
    ("s", iter(TEXTS), TEXTS),
    ("s", np.array(TEXTS), TEXTS),
    ("s", np.array(TEXTS, object), TEXTS),
    ("s", pa.array(TEXTS), TEXTS),
    ("s", pa.array(TEXTS)[2:4], TEXTS[2:4]),
    ("s", pa.array(TEXTS, pa.large_string())[1:], TEXTS[1:]),
    ("s", pa.array(TEXTS).dictionary_encode(), TEXTS),
    ("s", pa.array(TEXTS, pa.string_view()), TEXTS),
    ("s", pa.chunked_array([TEXTS[:2], TEXTS[2:]]), TEXTS),
    ("s", Foreign(pa.array(TEXTS)), TEXTS),
    ("b", BLOBS, BLOBS),
    ("b", [bytearray(b"ab"), memoryview(b"cd")], [b"ab", b"cd"]),
    ("b", np.array([b"ab", b"c"]), [b"ab", b"c"]),
    ("b", pa.array(BLOBS)[1:], BLOBS[1:]),
    ("b", pa.array(BLOBS, pa.large_binary()), BLOBS),
    ("b", pa.array([b"ab", b"cd"], pa.binary(2)), [b"ab", b"cd"]),
    ("*", TEXTS, TEXTS),
    ("*", BLOBS, BLOBS),
    ("*", INTS, INTS),
    ("*", FLOATS, FLOATS),
    ("*", pa.array(TEXTS), TEXTS),
    *(("*", empty, []) for empty in ([], np.array([]), pa.array([], pa.string()))),
    *((want, [], []) for want in "sbif"),
    *(("s", pa.array([], kind), []) for kind in (pa.string(), pa.large_string())),
    ("s", pa.array(TEXTS)[5:], []),
    ("i", pa.chunked_array([], pa.int64()), []),
]


@pytest.mark.parametrize(("want", "source", "expected"), SOURCES, ids=shown)
def test_every_source_gives_its_items(want: str, source: Any, expected: list[Any]) -> None:
    assert items(source, want) == expected


@given(st.lists(st.text(max_size=10), max_size=40), st.data())
def test_any_slice_of_an_arrow_array_gives_its_items(texts: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(texts)))
    stop = data.draw(st.integers(start, len(texts)))
    kind = data.draw(st.sampled_from([pa.string(), pa.large_string()]))
    assert items(pa.array(texts, kind)[start:stop], "s") == texts[start:stop]
    lengths = pa.array([len(text) for text in texts], pa.int64())
    assert items(lengths[start:stop], "i") == [len(text) for text in texts[start:stop]]


@given(st.lists(st.booleans(), min_size=1, max_size=100), st.data())
def test_the_first_null_of_any_slice_is_named(valid: list[bool], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(valid)))
    values = pa.array([7 if there else None for there in valid], pa.int64())[start:]
    nulls = [at for at, there in enumerate(valid[start:]) if not there]
    for source in (values, pa.chunked_array([values, values[:0]])):
        if nulls:
            with pytest.raises(ColumnError, match=f"item {nulls[0]} is null"):
                column(source, "i")
        else:
            assert items(source, "i") == [7] * len(values)


def test_a_bitmap_without_nulls_is_no_obstacle() -> None:
    buffers = pa.array([1, 2, 3]).buffers()
    bitmap = pa.py_buffer(b"\xff")
    uncounted = pa.Array.from_buffers(pa.int64(), 3, [bitmap, buffers[1]], null_count=-1)
    assert items(uncounted, "i") == [1, 2, 3]


def test_buffers_that_are_not_aligned_are_copied() -> None:
    raw = pa.py_buffer(b"x" + np.array([3, 4], "<i8").tobytes()).slice(1)
    odd = pa.Array.from_buffers(pa.int64(), 2, [None, raw])
    assert items(odd, "i") == [3, 4]
    offsets = pa.py_buffer(b"x" + np.array([0, 2, 3], "<i4").tobytes()).slice(1)
    texts = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"abc")])
    assert items(texts, "s") == ["ab", "c"]


def test_arrow_and_numpy_columns_are_not_copied() -> None:
    for source, address in (
        (values := np.arange(10), values.ctypes.data),
        (texts := pa.array(TEXTS), texts.buffers()[2].address),
        (ints := pa.array(INTS)[2:], ints.buffers()[1].address + 16),
    ):
        found = column(source, "*")
        assert int(ffi.cast("uintptr_t", found.data)) == address


@pytest.mark.parametrize(
    ("want", "source", "says"),
    [
        ("i", [1, None, 3], "item 1 is null"),
        ("s", ["a", None], "item 1 is null"),
        ("b", [None], "item 0 is null"),
        ("f", [0.5, None], "item 1 is null"),
        ("s", pa.array(["a", None]), "item 1 is null"),
        ("i", pa.nulls(2), "item 0 is null"),
        ("i", np.ma.masked_array([1, 2], mask=[False, True]), "item 1 is null"),
        ("s", np.array(["a", None], object), "item 1 is null"),
        ("i", [1, "2"], "item 1 is '2'"),
        ("i", [1, 2.0], "item 1 is 2.0"),
        ("i", [1, 2**63], "item 1, 9223372036854775808, does not fit into 64 bits"),
        ("i", np.array([1, 2**63], "u8"), "item 1, 9223372036854775808, does not fit"),
        ("i", pa.array([1, 2**63], pa.uint64()), "does not fit int64"),
        ("i", np.array([0.5]), "it holds float. Pass int items"),
        ("i", pa.array([0.5]), "it holds float"),
        ("i", np.array([True]), "dtype is bool"),
        ("i", pa.array([True]), "Arrow type bool"),
        ("i", np.array(["2026-01-01"], "M8[D]"), "dtype is datetime64"),
        ("s", pa.array(INTS), "it holds int. Pass str items"),
        ("s", pa.array(BLOBS), "it holds bytes. Pass str items"),
        ("s", ["a", b"b"], "item 1 is b'b'"),
        ("s", ["a", "\ud800"], "item 1, '.ud800', has no UTF-8 form"),
        ("b", TEXTS, "item 0 is 'alice'"),
        ("b", pa.array(TEXTS), "it holds str. Pass bytes items"),
        ("s", "alice", "is one item, not a column"),
        ("b", b"alice", "is one item, not a column"),
        ("s", 5, "of type int is no column"),
        ("s", None, "of type NoneType is no column"),
        ("i", np.zeros((2, 2), "i8"), "2 dimensions"),
        ("i", np.array(5), "0 dimensions"),
        ("*", [True], "bool is not supported"),
        ("*", [{}], "item 0 is {}"),
        ("*", [1, "mixed"], "item 1 is 'mixed'"),
        ("s", pa.array([["a"]]), "Arrow type list"),
        ("s", pa.record_batch([pa.array(["a"])], ["x"]), "Arrow type struct"),
    ],
    ids=shown,
)
def test_what_does_not_fit_is_refused_with_its_position(want: str, source: Any, says: str) -> None:
    with pytest.raises(ColumnError, match=says) as caught:
        column(source, want, "the keys of state 'visits'")
    assert str(caught.value).startswith("the keys of state 'visits'")
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)


def test_pandas_series_are_columns() -> None:
    pandas = pytest.importorskip("pandas")
    assert items(pandas.Series(INTS), "i") == INTS
    assert items(pandas.Series(TEXTS), "s") == TEXTS


def test_a_column_outlives_what_it_was_made_of() -> None:
    def make() -> Any:
        return column(pa.array(["abc"] * 1000)[500:], "s")

    found = make()
    assert {found.encoded(record) for record in range(found.n)} == {b"abc"}
    letter, *_ = arrow_column(Foreign(pa.array([1])))
    assert letter == "i"


# ---- Tuple keys


TUPLE = key_codec(tuple[str, int])
ROWS = [("a", 1), ("", -1), ("ключ", INT_MAX), ("a", 1)]


@pytest.mark.parametrize(
    "source",
    [
        ROWS,
        iter(ROWS),
        (["a", "", "ключ", "a"], [1, -1, INT_MAX, 1]),
        (["a", "", "ключ", "a"], np.array([1, -1, INT_MAX, 1])),
        (pa.array(["x", "a", "", "ключ", "a"])[1:], pa.array([1, -1, INT_MAX, 1])),
    ],
)
def test_tuple_keys_come_as_rows_or_as_columns(source: Any) -> None:
    found = key_column(source, TUPLE)
    assert [found.encoded(record) for record in range(found.n)] == [TUPLE.encode(r) for r in ROWS]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ((["a"],), "do not fit tuple"),
        ((["a"], [1], [2]), "do not fit tuple"),
        ([["a", "b"], [1, 2]], "do not fit tuple"),  # rows or columns?
        ([["a", 1], ["b", 2]], "do not fit tuple"),
        (None, "do not fit tuple"),
        (5, "do not fit tuple"),
        ("ab", "do not fit tuple"),
        ({("a", 1): 1}, "do not fit tuple"),
        ([("a", 1), ("b",)], "do not fit tuple"),
        ((["a", "b"], [1]), "2, 1 items"),
        ((["a"], ["b"]), "part 1 of the keys: item 0"),
        ((["a", None], [1, 2]), "part 0 of the keys: item 1 is null"),
    ],
)
def test_tuple_keys_that_do_not_fit_are_refused(source: Any, says: str) -> None:
    with pytest.raises(ColumnError, match=says):
        key_column(source, TUPLE)


def test_no_tuple_keys_are_no_keys() -> None:
    assert key_column([], TUPLE).n == 0
    assert key_column(([], []), TUPLE).n == 0


# ---- Batches


@pytest.fixture
def store() -> Store:
    return Store(key_groups=8, subgroups=4)


def as_list(source: list[Any]) -> Any:
    return source


KEY_FORMS = [
    (str, as_list, lambda i: f"key-{i}"),
    (str, pa.array, lambda i: f"key-{i}"),
    (str, lambda keys: pa.array(keys, pa.large_string()), lambda i: f"key-{i}" * (i % 9)),
    (bytes, pa.array, lambda i: f"key-{i}".encode()),
    (int, np.array, lambda i: i * 7919 - 5000),
    (int, pa.array, lambda i: i * 7919 - 5000),
    (tuple[str, int], as_list, lambda i: (f"key-{i % 7}", i)),
]


@pytest.mark.parametrize(("key_type", "form", "make"), KEY_FORMS)
def test_batches_do_what_a_loop_over_a_dict_does(
    store: Store, key_type: Any, form: Any, make: Any
) -> None:
    state = store.state("n", "i64", key_type)
    keys = [make(i * i % 300) for i in range(2000)]  # with duplicates
    amounts = [i - 700 for i in range(2000)]
    model: dict[Any, int] = {}
    running = []
    for key, amount in zip(keys, amounts, strict=True):
        model[key] = model.get(key, 0) + amount
        running.append(model[key])
    new = state.add_many(form(keys), np.array(amounts), returning=True)
    assert new is not None
    assert new.tolist() == running
    assert state.add_many(form(keys)) is None
    for key in keys:
        model[key] += 1
    asked = [*keys[:50], make(10_000), make(10_001)]
    got = state.get_many(form(asked))
    assert got.to_list() == [model.get(key) for key in asked]
    assert state.contains_many(form(asked)).tolist() == [key in model for key in asked]
    first = [key in model for key in asked]
    seen: set[Any] = set()
    for at, key in enumerate(asked):
        first[at] = first[at] and key not in seen
        seen.add(key)
    assert state.delete_many(form(asked)).tolist() == first
    for key in asked:
        model.pop(key, None)
    assert {state.codec.decode(key): value for key, value in store.scan(state)} == model
    state.put_many(form(keys), amounts)
    assert state.get_many(form(keys)).to_list() == [
        dict(zip(keys, amounts, strict=True))[key] for key in keys
    ]


def test_results_are_typed_views(store: Store) -> None:
    ints, floats = store.state("i", "i64"), store.state("f", "f64")
    ints.put("a", 7)
    floats.put("a", 0.5)
    values, found = ints.get_many(["a", "b"])
    assert (values.format, values.tolist(), found.format, found.tolist()) == (
        "q", [7, 0], "B", [1, 0],
    )  # fmt: skip
    assert floats.get_many(["a"]).values.format == "d"
    assert np.asarray(values).tolist() == [7, 0]
    sums = floats.add_many(["a", "b"], 0.25, initial=1.0, returning=True)
    assert sums is not None
    assert sums.tolist() == [0.75, 1.25]


@pytest.mark.parametrize("form", [as_list, pa.array, lambda v: pa.array(v, pa.large_binary())])
def test_bytes_batches_keep_every_value(store: Store, form: Any) -> None:
    state = store.state("b", "bytes")
    keys = [f"key-{i}" for i in range(300)]
    values = [bytes([i & 255]) * (i % 50) for i in range(300)]
    state.put_many(keys, form(values))
    got = state.get_many([*keys, "nobody"])
    assert got.to_list() == [*values, None]
    assert got.offsets[-1] == sum(map(len, values)) == len(got.data)
    data = got.data
    del got, state
    assert bytes(data[: len(values[1])]) == values[1]


def test_container_batches(store: Store) -> None:
    lists, maps = store.state("l", "list"), store.state("m", "map")
    keys = ["a", "b", "a"]
    lists.append_many(keys, [1, 2, 3])
    lists.append_many(keys, pa.array(["x", "y", "z"]))
    lists.append_many(keys, np.array([0.5, 1.5, 2.5]))
    lists.append_many(keys, [pack([1]), pack({}), pack(None)])
    lists.append_many(keys, [b"\x01", b"", b"\xff"], raw=True)
    expected = {
        b"a": [1, 3, "x", "z", 0.5, 2.5, [1], None, b"\x01", b"\xff"],
        b"b": [2, "y", 1.5, {}, b""],
    }
    assert {key: unpack(value) for key, value in store.scan(lists)} == expected
    maps.map_put_many(keys, ["k", "k", "l"], [1, 2, 3])
    maps.map_put_many(keys, [7, 7, 7], pa.array(["p", "q", "r"]))
    assert unpack(maps.get("a"), strict_map_key=False) == {"k": 1, "l": 3, 7: "r"}
    packed = [pack([i]) for i in range(3)]
    lists.put_many(["x", "y", "z"], packed)
    assert lists.get_many(["z", "x", "nobody"]).to_list() == [packed[2], packed[0], None]


def test_empty_batches_do_nothing(store: Store) -> None:
    numbers, blobs = store.state("i", "i64"), store.state("b", "bytes")
    assert numbers.get_many([]).to_list() == []
    assert numbers.add_many(pa.array([], pa.string()), returning=True) is not None
    assert blobs.get_many([]).to_list() == []
    numbers.put_many([], [])
    assert numbers.contains_many([]).tolist() == []
    assert store.stats().entries == 0


def test_columns_of_unequal_length_are_refused(store: Store) -> None:
    with pytest.raises(ColumnError, match="2 keys but 1 values"):
        store.state("i", "i64").put_many(["a", "b"], [1])
    with pytest.raises(ColumnError, match="1 keys but 2 map keys"):
        store.state("m", "map").map_put_many(["a"], ["k", "l"], [1])


def test_operations_that_the_kind_does_not_have_are_refused(store: Store) -> None:
    with pytest.raises(KindError, match="state 'm'"):
        store.state("m", "map").append_many(["a"], [1])
    with pytest.raises(KindError, match="state 'l'"):
        store.state("l", "list").map_put_many(["a"], ["k"], [1])


@pytest.mark.parametrize("amount", [2**63, 1.5])
def test_amounts_that_do_not_fit_are_refused(store: Store, amount: Any) -> None:
    state = store.state("i", "i64")
    with pytest.raises((OverflowStateError, BadValueError)):
        state.add_many(["a"], amount)
    with pytest.raises((OverflowStateError, BadValueError)):
        state.add_many(["a"], 1, initial=amount)
    assert not state.contains("a")
    state.add_many(["a"], np.int16(3))
    assert state.get("a") == 3


def test_a_failing_record_is_named_and_the_rest_of_the_key_is_not_done(store: Store) -> None:
    state = store.state("i", "i64")
    state.put("full", INT_MAX)
    with pytest.raises(OverflowStateError, match="key 'full', record 1") as caught:
        state.add_many(["a", "full", "full"])
    assert caught.value.record == 1
    assert caught.value.key == "full"
    assert state.get("full") == INT_MAX
    lists = store.state("l", "list")
    with pytest.raises(BadValueError, match="record 0"):
        lists.append_many(["a"], [b"\xc1"])


def test_keys_that_are_too_long_are_named(store: Store) -> None:
    state = store.state("i", "i64")
    with pytest.raises(KeyTypeError, match="record 1"):
        state.get_many(["a", "k" * 70_000])


def test_unknown_records_are_listed_and_all_others_are_done(store: Store) -> None:
    state = store.state("i", "i64", int)
    store.mark(0, store.leaves // 2, "absent")
    keys = list(range(100))
    with pytest.raises(UnknownEntryError, match="of 100 entries") as caught:
        state.add_many(keys)
    unknown = caught.value
    assert unknown.state == "i"
    assert 0 < len(unknown.records) < 100
    assert unknown.keys == tuple(unknown.records)
    assert [unknown.statuses[r] for r in range(100)] == [
        2 if r in unknown.records else 0 for r in range(100)
    ]
    for key in unknown.keys:
        state.install(key, None)
    state.add_many(list(unknown.keys))
    assert state.get_many(keys).to_list() == [1] * 100


def test_what_an_unknown_batch_could_read_comes_with_the_exception(store: Store) -> None:
    numbers, blobs = store.state("i", "i64", int), store.state("b", "bytes", int)
    store.mark(0, store.leaves // 2, "absent")
    keys = list(range(100))
    numbers.put_many(keys[::2], keys[::2])
    blobs.put_many(keys[::2], [b"%d" % key for key in keys[::2]])
    with pytest.raises(UnknownEntryError) as caught:
        numbers.get_many(keys)
    assert caught.value.result.to_list()[::2] == keys[::2]
    with pytest.raises(UnknownEntryError) as caught:
        blobs.get_many(keys)
    assert caught.value.result.to_list()[::2] == [b"%d" % key for key in keys[::2]]


class Liar(list[int]):
    def __len__(self) -> int:
        return 1000


def test_a_list_is_as_long_as_its_items_not_as_it_says() -> None:
    state = Store().state("n", "i64", int)
    state.add_many(Liar([1, 2]))
    assert sorted(key for key, _ in state_items(state)) == [1, 2]


def state_items(state: Any) -> list[tuple[int, int]]:
    return [(key, state.get(key)) for key in range(1000) if state.contains(key)]


def test_a_misaligned_view_is_copied() -> None:
    data = bytearray(1 + 16)
    data[1:] = (7).to_bytes(8, "little") + (8).to_bytes(8, "little")
    state = Store().state("n", "i64", int)
    state.add_many(memoryview(data)[1:].cast("q"))
    assert (state.get(7), state.get(8)) == (1, 1)
