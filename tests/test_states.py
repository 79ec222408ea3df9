"""Handles of states, one key at a time: numbers, bytes, containers, and their errors."""

import math
import threading
from typing import Any

import msgpack
import pytest

from statekit import Store
from statekit.errors import (
    BadValueError,
    ChangedDuringIterationError,
    ClosedError,
    KeyTypeError,
    OverflowStateError,
    PathError,
    StateKitError,
)
from statekit.native.buffers import KEEP_BYTES_MAX

INT_MIN, INT_MAX = -(2**63), 2**63 - 1
pack, unpack = msgpack.packb, msgpack.unpackb


@pytest.fixture
def store() -> Store:
    return Store(key_groups=4, subgroups=2)


# ---- Numbers


def test_i64_single_key_operations(store: Store) -> None:
    visits = store.state("visits", "i64")
    assert visits.get("alice") is None
    assert visits.get("alice", 7) == 7
    visits.put("alice", 5)
    assert visits.get("alice") == 5
    assert visits.add("alice") == 6
    assert visits.add("alice", -10) == -4
    assert visits.add("bob", 1, initial=100) == 101
    assert visits.min("alice", -9) == -9
    assert visits.min("alice", 3) == -9
    assert visits.max("alice", 3) == 3
    assert visits.min("carol", 8) == 8
    assert visits.contains("alice")
    assert visits.delete("alice")
    assert not visits.delete("alice")
    assert not visits.contains("alice")


@pytest.mark.parametrize("number", [0, 1, -1, 2**31, -(2**31), 2**53 + 1, INT_MIN, INT_MAX])
def test_i64_keeps_every_bit(store: Store, number: int) -> None:
    state = store.state("n", "i64", int)
    state.put(number, number)
    assert state.get(number) == number


@pytest.mark.parametrize("number", [0.0, -0.0, 0.1, -1e308, 5e-324, math.inf, -math.inf, math.nan])
def test_f64_keeps_every_bit(store: Store, number: float) -> None:
    state = store.state("x", "f64")
    state.put("a", number)
    got = state.get("a")
    assert got is not None
    assert (got == number and math.copysign(1, got) == math.copysign(1, number)) or (
        math.isnan(got) and math.isnan(number)
    )


def test_f64_takes_ints_and_folds(store: Store) -> None:
    state = store.state("x", "f64")
    state.put("a", 2)
    assert state.add("a", 0.5) == 2.5
    assert state.max("a", 9) == 9.0
    assert state.min("a", 1.25) == 1.25


@pytest.mark.parametrize("kind", ["i64", "f64"])
def test_compare_and_set_takes_effect_only_on_the_expected_value(store: Store, kind: Any) -> None:
    state = store.state("n", kind)
    assert not state.compare_and_set("a", 1, 2)
    assert state.get("a") is None
    assert state.compare_and_set("a", None, 1)
    assert not state.compare_and_set("a", None, 5)
    assert not state.compare_and_set("a", 9, 5)
    assert state.compare_and_set("a", 1, 5)
    assert state.get("a") == 5


def test_a_sum_beyond_64_bits_is_refused_and_changes_nothing(store: Store) -> None:
    state = store.state("n", "i64")
    state.put("a", INT_MAX)
    with pytest.raises(OverflowStateError, match="state 'n', key 'a'") as caught:
        state.add("a", 1)
    assert isinstance(caught.value, OverflowError)
    assert state.get("a") == INT_MAX


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_a_number_beyond_64_bits_is_refused(store: Store, number: int) -> None:
    state = store.state("n", "i64")
    for call in (state.put, state.add, state.min, state.max):
        with pytest.raises(OverflowStateError, match="64 bits"):
            call("a", number)
    assert not state.contains("a")


@pytest.mark.parametrize("value", ["5", b"5", 1.5, None, [1]])
def test_what_is_no_int_is_refused_by_an_int_state(store: Store, value: Any) -> None:
    state = store.state("n", "i64")
    for call in (state.put, state.add, state.max):
        with pytest.raises(BadValueError, match="Pass an int") as caught:
            call("a", value)
        assert isinstance(caught.value, TypeError)
        assert caught.value.state == "n"
        assert caught.value.key == "a"
    assert not state.contains("a")


@pytest.mark.parametrize(("initial", "says"), [(0.5, "0.5 is of type float"), (2**63, "64 bits")])
def test_an_initial_value_that_does_not_fit_is_refused(
    store: Store, initial: Any, says: str
) -> None:
    state = store.state("n", "i64")
    with pytest.raises((BadValueError, OverflowStateError), match=says):
        state.add("a", 1, initial)
    assert not state.contains("a")


def test_a_float_that_numpy_calls_a_number_does_not_become_an_int(store: Store) -> None:
    numpy = pytest.importorskip("numpy")
    state = store.state("n", "i64")
    with pytest.raises(BadValueError):
        state.put("a", numpy.float32(1.5))
    state.put("a", numpy.int32(7))
    assert state.get("a") == 7


@pytest.mark.parametrize("value", ["1.5", b"1.5", None])
def test_what_is_no_float_is_refused_by_a_float_state(store: Store, value: Any) -> None:
    with pytest.raises(BadValueError, match="Pass a float"):
        store.state("x", "f64").put("a", value)


# ---- Keys


@pytest.mark.parametrize(
    ("key_type", "key", "wrong"),
    [
        (str, "alice", 5),
        (bytes, b"\x00\xff", "alice"),
        (int, -5, "alice"),
        (tuple[str, int], ("alice", -5), ("alice",)),
    ],
)
@pytest.mark.parametrize("kind", ["i64", "bytes", "list"])
def test_every_key_type_works_with_every_kind(
    store: Store, kind: Any, key_type: Any, key: Any, wrong: Any
) -> None:
    value: Any = {"i64": 1, "bytes": b"1", "list": pack([1])}[kind]
    state = store.state("s", kind, key_type)
    state.put(key, value)
    assert state.get(key) == value
    assert state.contains(key)
    for call in (state.get, state.contains, state.delete, state.probe_cost, state.get_encoded):
        with pytest.raises(KeyTypeError, match="state 's'"):
            call(wrong)
    with pytest.raises(KeyTypeError, match="state 's'"):
        state.put(wrong, value)


@pytest.mark.parametrize("length", [0, 1, 17, 18, 19, 255, 65536])
def test_keys_of_every_length_up_to_the_limit(store: Store, length: int) -> None:
    state = store.state("s", "i64", bytes)
    key = b"k" * length
    state.put(key, length)
    assert state.get(key) == length
    assert state.probe_cost(key) >= 1


def test_a_key_above_the_limit_is_refused(store: Store) -> None:
    state = store.state("s", "i64", bytes)
    with pytest.raises(KeyTypeError, match="65536") as caught:
        state.put(b"k" * 65537, 1)
    assert len(str(caught.value)) < 400


# ---- Bytes


@pytest.mark.parametrize("size", [0, 1, 7, 100, 4096, KEEP_BYTES_MAX - 1, 3 * KEEP_BYTES_MAX])
def test_bytes_of_any_size_come_back_as_they_were(store: Store, size: int) -> None:
    state = store.state("b", "bytes")
    value = bytes(i & 255 for i in range(251)) * (size // 251 + 1)
    state.put("a", value[:size])
    state.put("z", b"other")
    assert state.get("a") == value[:size]
    assert state.get("z") == b"other"
    state.put("a", b"short")
    assert state.get("a") == b"short"
    assert state.get("nobody") is None


def test_bytes_state_takes_any_buffer_and_nothing_else(store: Store) -> None:
    state = store.state("b", "bytes")
    state.put("a", bytearray(b"12"))
    assert state.get("a") == b"12"
    state.put("a", memoryview(b"x34x")[1:3])
    assert state.get("a") == b"34"
    for wrong in ("text", 5, None):
        with pytest.raises(BadValueError, match="Pass bytes"):
            state.put("a", wrong)  # type: ignore[arg-type]


def test_results_are_copies_that_later_calls_leave_alone(store: Store) -> None:
    state = store.state("b", "bytes")
    state.put("a", b"first")
    first = state.get("a")
    state.put("a", b"other")
    assert state.get("a") == b"other"
    assert first == b"first"


@pytest.mark.parametrize(("kind", "value"), [("i64", 7), ("f64", 0.5), ("bytes", b"x")])
def test_encoded_values_go_from_one_state_to_another(store: Store, kind: Any, value: Any) -> None:
    one, two = store.state("one", kind), store.state("two", kind)
    one.put("a", value)
    encoded = one.get_encoded("a")
    assert encoded is not None
    two.put_encoded("a", encoded)
    assert two.get("a") == value


# ---- Containers


def test_list_operations_at_the_root(store: Store) -> None:
    state = store.state("l", "list")
    assert state.get("a") is None
    assert state.length("a") is None
    assert state.pop("a") is None
    assert state.append("a", pack(1))
    assert state.extend("a", pack([2, 3, 4]))
    assert state.insert("a", 0, pack(0))
    assert state.insert("a", 99, pack("end"))
    assert state.length("a") == 6
    assert state.type_of("a") == "list"
    assert unpack(state.get("a")) == [0, 1, 2, 3, 4, "end"]
    assert unpack(state.get("a", (-1,))) == "end"
    assert state.get("a", (17,)) is None
    assert unpack(state.slice("a", 1, -1)) == [1, 2, 3, 4]
    assert unpack(state.slice("a", -2)) == [4, "end"]
    assert state.set("a", (1,), pack({"k": [1]}))
    assert unpack(state.get("a", (1, "k", 0))) == 1
    assert unpack(state.pop("a")) == "end"
    assert unpack(state.pop("a", 0)) == 0
    assert state.splice("a", 1, 3, pack(["x"]))
    assert unpack(state.get("a")) == [{"k": [1]}, "x", 4]
    assert state.delete_at("a", (0,))
    assert unpack(state.get("a")) == ["x", 4]
    assert state.clear("a")
    assert unpack(state.get("a")) == []
    assert state.contains("a")


def test_map_operations_at_the_root(store: Store) -> None:
    state = store.state("m", "map")
    assert not state.has("a", pack("k"))
    assert state.take("a", pack("k")) is None
    assert state.set("a", ("k",), pack(1))
    assert state.update("a", pack({"l": 2, 7: 3}))
    assert state.has("a", pack("k"))
    assert unpack(state.keys("a")) == ["k", "l", 7]
    assert unpack(state.get("a", (7,))) == 3
    assert state.get("a", ("nothing",)) is None
    assert unpack(state.take("a", pack("l"))) == 2
    assert state.length("a") == 2
    assert state.delete_at("a", ("k",))
    assert not state.delete_at("a", ("k",))
    assert unpack(state.get("a"), strict_map_key=False) == {7: 3}


STEPS = ["", "k", "k" * 31, "k" * 32, "ключ" * 8, b"b", 0, 127, 128, -1, -33, 2**63, 1.5, None]
STEPS += [True, ("pair", 1)]


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_every_kind_of_map_key_can_be_a_step(store: Store, step: Any) -> None:
    state = store.state("m", "map")
    assert state.set("a", (step,), pack("here"))
    assert unpack(state.get("a", (step,))) == "here"
    assert unpack(state.keys("a"), use_list=False) == (step,)


def test_nested_writes_create_only_what_shape_says(store: Store) -> None:
    state = store.state("n", "nested")
    assert not state.append("a", pack(1), ("x", "y"))
    assert not state.append("a", pack(1), ("x", "y"), shape="m")
    assert not state.contains("a")
    assert state.append("a", pack(1), ("x", "y"), shape="mml")
    assert unpack(state.get("a")) == {"x": {"y": [1]}}
    assert state.append("a", pack(2), ("x", "y"))
    assert unpack(state.get("a", ("x",))) == {"y": [1, 2]}
    state.put("b", pack("just a scalar"))
    assert state.type_of("b") == "scalar"


def test_pages_give_every_element_once(store: Store) -> None:
    lists, maps = store.state("l", "list"), store.state("m", "map")
    elements = list(range(1000))
    lists.put("a", pack(elements))
    maps.put("a", pack({str(i): i for i in elements}))
    pages = [unpack(page) for page in lists.pages("a", elements_max=64)]
    assert [element for page in pages for element in page] == elements
    flat = [x for page in maps.pages("a", elements_max=64) for x in unpack(page)]
    assert dict(zip(flat[::2], flat[1::2], strict=True)) == {str(i): i for i in elements}
    assert list(lists.pages("nobody")) == []


def test_a_list_that_changes_while_it_is_paged_says_so(store: Store) -> None:
    state = store.state("l", "list")
    state.put("a", pack(list(range(1000))))
    pages = state.pages("a", elements_max=10)
    next(pages)
    state.append("a", pack(1))
    with pytest.raises(ChangedDuringIterationError, match="state 'l', key 'a'"):
        next(pages)


@pytest.mark.parametrize("path", [("k", object()), 5, ([{}],)])
def test_what_is_no_path_is_refused(store: Store, path: Any) -> None:
    state = store.state("n", "nested")
    state.put("a", pack({"k": 1}))
    with pytest.raises(PathError):
        state.get("a", path)
    with pytest.raises(PathError):
        state.set("a", path, pack(1))


def test_a_step_that_does_not_fit_is_refused(store: Store) -> None:
    state = store.state("l", "list")
    state.put("a", pack([1]))
    with pytest.raises(PathError, match="state 'l', key 'a'"):
        state.get("a", ("not an index",))
    with pytest.raises(PathError):
        state.keys("a")


@pytest.mark.parametrize("packed", [b"", b"\xc1", pack(1) + pack(2), b"\xdc\xff\xff", pack("x")])
def test_values_that_are_no_array_are_refused_by_a_list_state(store: Store, packed: bytes) -> None:
    state = store.state("l", "list")
    with pytest.raises(BadValueError, match="state 'l', key 'a'"):
        state.put("a", packed)
    assert not state.contains("a")


def test_values_nested_too_deeply_are_refused(store: Store) -> None:
    state = store.state("n", "nested")
    deep: Any = 1
    for _ in range(32):
        deep = [deep]
    state.put("a", pack(deep))
    with pytest.raises(BadValueError, match="32"):
        state.put("b", pack([deep]))


# ---- All kinds


def test_handles_of_a_closed_store_raise_and_do_not_crash() -> None:
    store = Store(key_groups=4, subgroups=2)
    number, blob, nested = (
        store.state("i", "i64"),
        store.state("b", "bytes"),
        store.state("n", "nested"),
    )
    number.put("a", 1)
    store.close()
    store.close()
    calls: list[Any] = [
        lambda: number.get("a"),
        lambda: number.put("a", 1),
        lambda: number.add("a"),
        lambda: number.add_many(["a"]),
        lambda: blob.get("a"),
        lambda: blob.put("a", b""),
        lambda: blob.install("a", b""),
        lambda: nested.get("a", (1,)),
        lambda: nested.append("a", pack(1)),
        lambda: list(nested.pages("a")),
        lambda: store.state("i", "i64"),
        lambda: store.stats(),
        lambda: store.encode_leaf(0),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_a_store_may_be_closed_while_other_threads_use_it() -> None:
    store = Store(key_groups=4, subgroups=2)
    numbers, lists = store.state("i", "i64", int), store.state("l", "list", int)
    started = threading.Barrier(4)
    ends: list[type[BaseException]] = []

    def work() -> None:
        started.wait()
        try:
            for turn in range(10**9):
                numbers.put(turn % 100, turn)
                numbers.put_many([1, 2, 3], [1, 2, 3])
                lists.append(turn % 10, pack(turn))
        except BaseException as error:
            ends.append(type(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    store.close()
    for thread in threads:
        thread.join()
    assert ends == [ClosedError] * 3


def test_handles_keep_a_store_alive() -> None:
    state = Store(key_groups=4, subgroups=2).state("i", "i64")
    assert state.add("a") == 1


def test_repr_names_the_state_and_its_keys(store: Store) -> None:
    assert repr(store.state("visits", "i64", int)) == "<I64State 'visits', keys int>"


def test_every_error_is_a_statekit_error(store: Store) -> None:
    with pytest.raises(StateKitError):
        store.state("b", "bytes").get(5)


def test_threads_that_share_a_handle_get_their_own_results(store: Store) -> None:
    numbers, blobs = store.state("i", "i64", int), store.state("b", "bytes", int)
    for key in range(64):
        numbers.put(key, key * 1000)
        blobs.put(key, bytes([key]) * (key + 1))
    wrong: list[Any] = []

    def read(first: int) -> None:
        for turn in range(2000):
            key = (first + turn) % 64
            got = numbers.get(key), blobs.get(key)
            if got != (key * 1000, bytes([key]) * (key + 1)):
                wrong.append((key, got))

    threads = [threading.Thread(target=read, args=(16 * t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("value", [-(2.0**63), float("-inf"), 5e-324])
def test_a_float_that_looks_like_no_value_is_a_value(value: float) -> None:
    state = Store().state("f", "f64")
    state.put("a", value)
    assert state.get("missing") is None  # leaves a status behind
    assert state.get("a") == value
    assert state.add("a", 0.0) == value
