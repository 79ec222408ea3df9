"""The edges of every size and number: matrix row 26 of the reliability specification.

Each test compares with a plain Python object, and checks that what is refused changes nothing.
"""

import gc
import math
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from test_flooding import key_with_hash

from statekit import Store, key_hash, leaf_of
from statekit.errors import (
    ArgumentError,
    BadValueError,
    ColumnError,
    KeyTypeError,
    OverflowStateError,
    StateKitError,
)
from statekit.native.block import Block

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
I64_MIN, I64_MAX = -(2**63), 2**63 - 1
pack, unpack = msgpack.packb, msgpack.unpackb


def new_store() -> Store:
    return Store(4, 4)


def copy_of(store: Store) -> Store:
    """Another store, made from encoded leaves."""
    other = Store(store.key_groups, store.subgroups)
    for leaf in range(store.leaves):
        blocks = store.encode_leaf(leaf)
        for block in Block.each(blocks):
            block.check()
        other.decode_leaf(leaf, blocks)
    return other


# ---- Keys

KEY_SIZES = [0, 1, 17, 18, 19, 31, 32, 33, 254, 255, 256, 64 * KIB - 1, 64 * KIB]


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("key_type", [str, bytes])
def test_keys_of_every_length_up_to_64_kib(key_type: Any, batch: bool) -> None:
    store = new_store()
    state = store.state("k", "i64", key_type)
    # two of each length that differ in their last byte only
    texts = ["k" * size for size in KEY_SIZES] + ["k" * (size - 1) + "l" for size in KEY_SIZES[1:]]
    keys = texts if key_type is str else [text.encode() for text in texts]
    model = {key: number for number, key in enumerate(keys)}
    if batch:
        state.put_many(list(model), list(model.values()))
        assert state.get_many(list(model)).to_list() == list(model.values())
    for key, value in model.items():
        if not batch:
            state.put(key, value)
        assert state.get(key) == value
    assert store.stats().entries == len(model)
    copy = copy_of(store).state("k", "i64", key_type)
    assert {key: copy.get(key) for key in model} == model
    assert all(state.delete(key) for key in model)
    assert store.stats().entries == 0


@pytest.mark.parametrize("key_type", [str, bytes, tuple[bytes, int]])
def test_a_key_of_64_kib_and_one_byte_is_refused(key_type: Any) -> None:
    store = new_store()
    state = store.state("k", "i64", key_type)
    text: Any = "k" * (64 * KIB + 1)
    if key_type is bytes:
        text = text.encode()
    elif key_type is not str:
        text = (text.encode(), 1)
    for call in (
        lambda: state.put(text, 1),
        lambda: state.get(text),
        lambda: state.add(text),
        lambda: state.delete(text),
        lambda: state.install(text, bytes(8)),
        lambda: state.put_many([text], [1]),
        lambda: state.get_many([text]),
        lambda: key_hash(key_type, text),
    ):
        with pytest.raises(KeyTypeError):
            call()
    assert store.stats().entries == 0
    assert store.bytes_used == 0


def test_a_tuple_key_is_measured_with_its_lengths() -> None:
    state = new_store().state("k", "i64", tuple[bytes, int])
    fits = (b"k" * (64 * KIB - 4 - 8), 1)
    state.put(fits, 7)
    assert state.get(fits) == 7
    state.put_many([fits], [8])
    assert state.get(fits) == 8
    with pytest.raises(KeyTypeError):
        state.put((fits[0] + b"k", 1), 7)


def test_a_batch_with_a_key_too_long_says_which() -> None:
    store = new_store()
    state = store.state("k", "i64", bytes)
    with pytest.raises(KeyTypeError) as caught:
        state.put_many([b"a", b"k" * (64 * KIB + 1), b"b"], [1, 2, 3])
    assert caught.value.record == 1


# ---- Values

SIZES = [0, 1, 7, 8, 254, 255, 256, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 16 * MIB]


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_every_size(size: int) -> None:
    store = new_store()
    state = store.state("b", "bytes")
    value = (bytes(range(251)) * (size // 251 + 1))[:size]
    state.put("a", value)
    state.put_many(["b", "c"], [value, b"short"])
    assert state.get("a") == value
    assert state.get_many(["a", "c", "b", "none"]).to_list() == [value, b"short", value, None]
    assert copy_of(store).state("b", "bytes").get("a") == value
    state.put("a", b"short")  # smaller, then as large again
    assert state.get("a") == b"short"
    state.put("a", value)
    assert state.get("a") == value
    store.clear(state)
    assert store.bytes_used == 0


@pytest.mark.parametrize("kind", ["list", "nested"])
@pytest.mark.parametrize("size", SIZES)
def test_elements_of_every_size(size: int, kind: Any) -> None:
    store = new_store()
    state = store.state("c", kind)
    element = b"e" * size
    state.put("a", pack([element, 1]))
    assert state.append("a", pack(element))
    assert unpack(state.get("a")) == [element, 1, element]
    assert unpack(state.pop("a", 0)) == element
    assert unpack(state.get("a", (-1,))) == element
    assert copy_of(store).state("c", kind).get("a") == pack([1, element])


def memory_available() -> int:
    with open("/proc/meminfo") as lines:
        found = next(line for line in lines if line.startswith("MemAvailable"))
    return int(found.split()[1]) * KIB


def test_a_value_of_1_gib_is_kept_and_one_byte_more_is_refused() -> None:
    if memory_available() < 6 * GIB:
        pytest.skip("needs 6 GiB of free memory")
    store = new_store()
    state = store.state("b", "bytes")
    value = bytearray(GIB + 1)
    value[0], value[-2], value[-1] = 1, 2, 3
    with pytest.raises(BadValueError, match="1073741824"):
        state.put_encoded("a", value)  # type: ignore[arg-type]
    assert store.bytes_used == 0
    del value[-1]
    state.put_encoded("a", value)  # type: ignore[arg-type]
    assert GIB <= store.bytes_used < GIB + MIB
    got = state.get("a")
    assert got is not None
    assert got == value
    del got, value
    gc.collect()
    assert state.delete("a")
    assert store.bytes_used < MIB


# ---- Geometries


@pytest.mark.parametrize(("groups", "subgroups"), [(1, 1), (1, 2), (2**16, 16), (2**20, 1)])
def test_the_smallest_and_the_largest_store(groups: int, subgroups: int) -> None:
    store = Store(groups, subgroups)
    state = store.state("s", "i64", int)
    keys = list(range(5000))
    state.put_many(keys, keys)
    assert state.get_many(keys).to_list() == keys
    assert store.stats().entries == len(keys)
    for key in keys[::500]:
        leaf = leaf_of(int, key, groups, subgroups)
        assert store.stats(state, leaf, leaf + 1).entries >= 1
        found = {k for block in Block.each(store.encode_leaf(leaf)) for k, _ in block}
        assert key.to_bytes(8, "little", signed=True) in found
    with store.snapshot() as snapshot:
        state.put_many(keys, [0] * len(keys))
        read = {k: v for _, blocks in snapshot for block in Block.each(blocks) for k, v in block}
    assert read == {key.to_bytes(8, "little", signed=True): key for key in keys}
    other = Store(groups, subgroups)
    other.attach(store.detach(0, store.leaves))
    assert other.state("s", "i64", int).get(7) == 0
    assert store.bytes_used == 0


@pytest.mark.parametrize(
    ("groups", "subgroups"),
    [
        *[(0, 1), (1, 0), (3, 1), (1, 12), (2**16 + 1, 1), (2**17, 16), (2**21, 1)],
        *[(2**31, 2**31), (2**32, 1), (-1, 1), (2**64, 1)],
    ],
)
def test_other_geometries_are_refused(groups: int, subgroups: int) -> None:
    with pytest.raises(ArgumentError):
        Store(groups, subgroups)


# ---- Numbers

EDGES = sorted(
    {
        sign * 2**power + off
        for power in (31, 32, 63)
        for sign in (1, -1)
        for off in (-1, 0, 1)
        if I64_MIN <= sign * 2**power + off <= I64_MAX
    }
)


@pytest.mark.parametrize("value", EDGES)
def test_ints_at_every_edge(value: int) -> None:
    store = new_store()
    state = store.state("i", "i64", int)
    state.put(value, value)
    assert state.get(value) == value
    state.put_many([value + 0], [value])
    assert state.get_many([value]).to_list() == [value]
    assert copy_of(store).state("i", "i64", int).get(value) == value
    for amount in {1, -1, value, -value, I64_MAX, I64_MIN} - {2**63}:
        for batch in (False, True):
            state.put(value, value)
            total = value + amount
            if I64_MIN <= total <= I64_MAX:
                assert add(state, value, amount, batch) == total
            else:
                with pytest.raises(OverflowStateError):
                    add(state, value, amount, batch)
                assert state.get(value) == value


def add(state: Any, key: int, amount: int, batch: bool) -> int:
    if not batch:
        return state.add(key, amount)
    return state.add_many([key], [amount], returning=True)[0]


def test_an_overflow_in_a_batch_leaves_the_value_at_the_last_sum_that_fits() -> None:
    state = new_store().state("i", "i64")
    state.put("a", I64_MAX - 2)
    with pytest.raises(OverflowStateError) as caught:
        state.add_many(["a"] * 5, 1)
    assert caught.value.record == 2
    assert state.get("a") == I64_MAX
    with pytest.raises(OverflowStateError):
        state.add_many(["new"], -1, initial=I64_MIN)
    assert state.get("new") is None


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**64, 10**30])
def test_ints_outside_64_bits_are_refused(value: int) -> None:
    store = new_store()
    state, keyed = store.state("i", "i64"), store.state("k", "i64", int)
    for call in (
        lambda: state.put("a", value),
        lambda: state.add("a", value),
        lambda: state.min("a", value),
        lambda: state.compare_and_set("a", None, value),
        lambda: state.add_many(["a"], value),
    ):
        with pytest.raises(OverflowStateError):
            call()
    for call in (
        lambda: state.put_many(["a"], [value]),
        lambda: keyed.put_many([value], [1]),
        lambda: keyed.get_many([value]),
    ):
        with pytest.raises(ColumnError, match="64 bits"):
            call()
    with pytest.raises(KeyTypeError, match="64 bits"):
        keyed.put(value, 1)
    assert store.stats().entries == 0


FLOATS = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, -5e-324, 1.7976931348623157e308]


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@pytest.mark.parametrize("value", FLOATS, ids=repr)
def test_floats_keep_their_bits(value: float) -> None:
    store = new_store()
    state = store.state("f", "f64")
    state.put("a", value)
    state.put_many(["b"], np.array([value]))
    for got in (state.get("a"), state.get("b"), *state.get_many(["a", "b"]).to_list()):
        assert bits(got) == bits(value)
    assert state.get_encoded("a") == bits(value)
    assert bits(copy_of(store).state("f", "f64").get("a")) == bits(value)  # type: ignore[arg-type]
    assert state.compare_and_set("a", value, 1.0)  # bit for bit: a NaN equals itself


def test_floats_fold_as_python_does() -> None:
    state = new_store().state("f", "f64")
    for now in FLOATS:
        for operand in FLOATS:
            for op, expected in (
                ("add", now + operand),
                ("min", operand if operand < now else now),
                ("max", operand if operand > now else now),
            ):
                state.put("a", now)
                got = getattr(state, op)("a", operand)
                assert (math.isnan(got) and math.isnan(expected)) or bits(got) == bits(expected)
                state.delete("a")
    assert not state.compare_and_set("a", 0.0, 1.0)
    state.put("a", 0.0)
    assert not state.compare_and_set("a", -0.0, 1.0)
    state.put("a", 1.7976931348623157e308)
    assert state.add("a", 1e308) == math.inf


# ---- Containers

COUNTS = [0, 1, 14, 15, 16, 17, 63, 64, 65, 66, 65534, 65535, 65536, 65537]


@pytest.mark.parametrize("count", COUNTS)
def test_lists_of_every_size(count: int) -> None:
    store = new_store()
    state = store.state("l", "list")
    model = list(range(count))
    state.put("whole", pack(model))
    state.extend("extended", pack(model))
    state.append_many(["appended"] * count, model)
    names = ["whole", "extended", *(["appended"] if count else [])]
    for name in names:
        assert state.get(name) == pack(model)
        assert state.length(name) == count
    flat = [x for page in state.pages("whole", elements_max=1000) for x in unpack(page)]
    assert flat == model
    for name in names:  # across the edge and back
        assert state.append(name, pack("x"))
        assert state.get(name) == pack([*model, "x"])
        assert unpack(state.pop(name)) == "x"
        assert state.insert(name, 0, pack("y"))
        assert unpack(state.pop(name, 0)) == "y"
        if count:
            assert unpack(state.pop(name)) == model[-1]
            assert state.get(name) == pack(model[:-1])
            assert state.append(name, pack(model[-1]))
        assert state.get(name) == pack(model)
    assert copy_of(store).state("l", "list").get("whole") == pack(model)
    assert state.clear("whole")
    assert state.get("whole") == pack([])


@pytest.mark.parametrize("count", COUNTS)
def test_maps_of_every_size(count: int) -> None:
    store = new_store()
    state = store.state("m", "map")
    model: dict[Any, int] = {f"key{i}": i for i in range(count)}
    state.put("whole", pack(model))
    state.update("updated", pack(model))
    state.map_put_many(["filled"] * count, list(model), list(model.values()))
    names = ["whole", "updated", *(["filled"] if count else [])]
    for name in names:
        assert state.get(name) == pack(model)
        assert state.length(name) == count
        assert state.set(name, ("new",), pack("x"))
        assert state.get(name) == pack({**model, "new": "x"})
        assert unpack(state.take(name, pack("new"))) == "x"
        assert state.get(name) == pack(model)
        if count:
            last = f"key{count - 1}"
            assert unpack(state.take(name, pack(last))) == count - 1
            assert state.length(name) == count - 1
            assert state.set(name, (last,), pack(count - 1))
            assert state.get(name) == pack(model)
    copy = copy_of(store).state("m", "map")
    assert copy.get("whole") == pack(model)
    assert unpack(copy.keys("whole")) == list(model)
    assert state.clear("whole")
    assert state.get("whole") == pack({})


def test_empty_containers_are_there_and_empty() -> None:
    store = new_store()
    lists, maps, nested = (store.state(kind, kind) for kind in ("list", "map", "nested"))
    for state, empty in ((lists, []), (maps, {}), (nested, []), (nested, {})):
        state.put("a", pack(empty))
        assert state.contains("a")
        assert state.length("a") == 0
        assert state.get("a") == pack(empty)
        assert list(state.pages("a")) == []
        assert copy_of(store).state(state.name, state.kind).get("a") == pack(empty)
    assert lists.pop("a") is None
    assert lists.get("a", (0,)) is None
    assert lists.slice("a") == pack([])
    assert maps.take("a", pack(1)) is None
    assert maps.keys("a") == pack([])


def nest(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"k": value}
    return value


@pytest.mark.parametrize("kind", ["list", "map"])
def test_depth_32_is_kept_and_33_is_refused_however_it_is_reached(kind: str) -> None:
    store = new_store()
    state = store.state("n", "nested")
    step: Any = 0 if kind == "list" else "k"
    state.put("a", pack(nest(32, kind)))
    assert state.get("a", (step,) * 32) == pack(1)
    assert copy_of(store).state("n", "nested").get("a") == pack(nest(32, kind))
    refused = [
        lambda: state.put("b", pack(nest(33, kind))),
        lambda: state.put_many(["b"], [pack(nest(33, kind))]),
        lambda: state.set("a", (step,) * 32, pack([])),
        lambda: state.set("a", (step,) * 31, pack(nest(2, kind))),
        lambda: state.set("a", (step,), pack(nest(32, kind))),
        lambda: state.set("b", ("k",) * 33, pack(1), shape="m" * 33),
        lambda: state.append("b", pack(1), ("k",) * 32, shape="m" * 32 + "l"),
        lambda: state.append("b", pack(nest(32, kind)), shape="l"),
        lambda: state.update("b", pack({"k": nest(32, kind)}), shape="m"),
        lambda: state.get("a", (step,) * 33),
    ]
    for call in refused:
        with pytest.raises(StateKitError) as caught:
            call()
        assert isinstance(caught.value, BadValueError), caught.value
    assert state.get("a") == pack(nest(32, kind))
    assert not state.contains("b")
    assert state.set("b", ("k",) * 32, pack(1), shape="m" * 32)
    assert state.get("b") == pack(nest(32, "map"))


# ---- Equal hashes


def test_keys_whose_hashes_agree_in_all_but_the_lowest_24_bits() -> None:
    """One leaf of the largest store and one place in its table: these depend on 40 bits only."""
    store = Store(2**16, 16)
    state = store.state("s", "i64", int)
    keys = [key_with_hash(0xABCDEF0123 << 24 | n * 8191 % 2**24) for n in range(2000)]
    assert len({key_hash(int, key) >> 24 for key in keys}) == 1
    for value, key in enumerate(keys):
        state.put(key, value)
    assert state.get_many(keys).to_list() == list(range(2000))
    leaf = leaf_of(int, keys[0], 2**16, 16)
    assert store.stats(state, leaf, leaf + 1).entries == 2000
    other = Store(2**16, 16)
    other.decode_leaf(leaf, store.encode_leaf(leaf))
    assert other.state("s", "i64", int).get_many(keys).to_list() == list(range(2000))
    assert all(state.delete(key) for key in keys)
    assert store.stats().entries == 0


def test_keys_of_one_hash_are_told_apart_by_their_bytes() -> None:
    """Tuples fold their parts: the hash of the first part is the seed of the second. So another
    first part, with a second part made to fit, gives the same 64 bits."""
    one = (1, 100)
    target = key_hash(tuple[int, int], one)
    two = (2, key_with_hash(target, seed=key_hash(int, 2)))
    assert key_hash(tuple[int, int], two) == target
    store = new_store()
    state = store.state("t", "i64", tuple[int, int])
    state.put(one, 1)
    assert state.get(two) is None
    state.put_many([two, one], [2, 3])
    assert (state.get(one), state.get(two)) == (3, 2)
    leaf = leaf_of(tuple[int, int], one, 4, 4)
    (block,) = Block.each(store.encode_leaf(leaf))
    block.check()
    assert block.hashes.tolist() == [target, target]
    assert (block.find(one), block.find(two)) == (3, 2)
    copy = copy_of(store).state("t", "i64", tuple[int, int])
    assert (copy.get(one), copy.get(two)) == (3, 2)
    assert state.delete(one)
    assert state.get(two) == 2
