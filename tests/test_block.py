"""Encoded blocks: read in place, and refused when damaged; and the checksums of csrc."""

import struct
import subprocess
import sys
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statekit import Store, leaf_of
from statekit.errors import CorruptBlockError, SchemaError
from statekit.native.block import Block, seal
from statekit.native.digest import crc32c, xxh64

GROUPS, SUBGROUPS = 8, 4
pack = msgpack.packb


@pytest.fixture
def store() -> Store:
    return Store(key_groups=GROUPS, subgroups=SUBGROUPS)


def leaf(key: Any, key_type: Any = str) -> int:
    return leaf_of(key_type, key, GROUPS, SUBGROUPS)


def fill(store: Store) -> None:
    keys = [f"key-{i}" for i in range(500)]
    store.state("visits", "i64").put_many(keys, list(range(500)))


values = {
    "i64": st.integers(-(2**63), 2**63 - 1),
    "f64": st.floats(allow_nan=False),
    "bytes": st.binary(max_size=40),
    "list": st.lists(st.integers(-1000, 1000), max_size=5).map(pack),
    "map": st.dictionaries(st.text(max_size=5), st.booleans(), max_size=5).map(pack),
}
key_types: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=30),
    int: st.integers(-(2**63), 2**63 - 1),
    tuple[bytes, int]: st.tuples(st.binary(max_size=10), st.integers(-5, 5)),
}


@given(st.data())
def test_a_block_reads_as_the_entries_it_was_made_of(data: st.DataObject) -> None:
    kind: Any = data.draw(st.sampled_from(sorted(values)))
    key_type = data.draw(st.sampled_from(list(key_types)))
    model = data.draw(st.dictionaries(key_types[key_type], values[kind], max_size=30))
    store = Store(1, 1)
    state = store.state("näme", kind, key_type)
    for key, value in model.items():
        state.put(key, value)
    encoded = store.encode_leaf(0)
    blocks = list(Block.each(encoded))
    assert len(blocks) == (1 if model else 0)
    for block in blocks:
        block.check()
        assert (block.name, block.kind, block.codec.text) == ("näme", kind, state.codec.text)
        assert (block.leaf, block.leaves, len(block)) == (0, 1, len(model))
        assert block.size == len(encoded)
        assert {state.codec.decode(key): value for key, value in block} == model
        assert list(block.hashes) == sorted(block.hashes)
        assert block.marks is None
        for key, value in model.items():
            assert block.find(key) == value


def test_find_tells_missing_from_there(store: Store) -> None:
    fill(store)
    (block,) = Block.each(store.encode_leaf(leaf("key-1")))
    assert block.find("key-1") == 1
    assert block.find("no such key", missing="nothing") == "nothing"


def test_a_sealed_block_verifies_with_its_seed_only_and_notices_damage(store: Store) -> None:
    fill(store)
    data = bytearray(store.encode_leaf(leaf("key-1")))
    seal(data, seed=7)
    Block(bytes(data)).verify(seed=7)
    with pytest.raises(CorruptBlockError):
        Block(bytes(data)).verify(seed=8)
    data[-9] ^= 1
    with pytest.raises(CorruptBlockError):
        Block(bytes(data)).verify(seed=7)


def test_columns_of_a_block_are_views_of_its_bytes(store: Store) -> None:
    state = store.state("n", "i64", int)
    state.put(5, 50)
    data = bytearray(store.encode_leaf(leaf(5, int)))
    block = Block(data)
    assert (block.key_column.tolist(), block.value_column.tolist()) == ([5], [50])
    at = data.index(struct.pack("<q", 50))
    data[at] = 51
    assert block.value_column.tolist() == [51]
    assert block.key_offsets is None
    assert block.value_offsets is None


@given(st.binary(max_size=200))
def test_bytes_that_are_no_block_are_refused(data: bytes) -> None:
    store = Store(1, 1)
    with pytest.raises(CorruptBlockError):
        Block(data)
    if data:
        with pytest.raises(CorruptBlockError):
            store.decode_leaf(0, data)


@given(st.data())
def test_a_damaged_block_is_refused_or_decodes_to_something_checked(data: st.DataObject) -> None:
    store = Store(1, 1)
    store.state("l", "list").put_many(["a", "bc", "d"], [pack([1, "x"]), pack([]), pack([[2]])])
    block = bytearray(store.encode_leaf(0))
    at = data.draw(st.integers(0, len(block) - 1))
    block[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(block)))
    other = Store(1, 1)
    for damaged in (bytes(block), bytes(block[:cut])):
        try:
            other.decode_leaf(0, damaged)
        except (CorruptBlockError, SchemaError):
            continue
        for one in Block.each(other.encode_leaf(0)):
            one.check()


def test_a_block_of_another_leaf_is_refused(store: Store) -> None:
    fill(store)
    data = store.encode_leaf(1)
    with pytest.raises(CorruptBlockError, match="leaf"):
        store.decode_leaf(2, data)


# ---- Checksums


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_xxh64_is_xxh64(data: bytes, seed: int) -> None:
    xxhash = pytest.importorskip("xxhash")
    assert xxh64(data, seed) == xxhash.xxh64_intdigest(data, seed)


@given(st.binary(max_size=300))
def test_crc32c_is_that_of_the_polynomial(data: bytes) -> None:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc ^ 0xFFFFFFFF
    assert crc32c(memoryview(data)[3:], crc32c(data[:3])) == crc32c(data)


def test_a_block_is_a_mapping_to_dict() -> None:
    store = Store(key_groups=1, subgroups=1)
    store.state("n", "i64", int).put_many([1, 2], [10, 20])
    (block,) = Block.each(store.encode_leaf(0))
    assert dict(block) == {(1).to_bytes(8, "little"): 10, (2).to_bytes(8, "little"): 20}


def test_blocks_and_views_may_be_in_cycles_that_are_collected() -> None:
    """CPython before 3.12.7 crashes on cycles of memoryviews that are exported (gh-77894)."""
    code = """
import gc, statekit
from array import array
from statekit.native.block import Block
from statekit.native.buffers import readable
store = statekit.Store(key_groups=1, subgroups=1)
state = store.state("v", "i64", int)
state.put_many([1, 2, 3], [4, 5, 6])
with store.snapshot() as snapshot:
    data = b"".join(bytes(blocks) for _, blocks in snapshot)
for turned in False, True:
    cycle = [*Block.each(data)]
    assert [entry for block in cycle for entry in block]
    cycle.append(cycle)
    if turned:
        cycle.reverse()
    del cycle
    gc.collect()
def fail(view):
    native = readable(view)
    try:
        raise ValueError
    except ValueError as error:
        kept = error  # the error has the frame, which has the error
    return bytes(native)
for of in data, bytearray(data), array("q", range(9)), b"":
    view = memoryview(of)
    assert fail(view) == view.tobytes()
    assert fail(view[1:-1]) == view[1:-1].tobytes()
    state.put_many(memoryview(array("q", [7, 8, 9]))[1:], [1, 2])
    assert gc.collect() >= 0
print([state.get(key) for key in (1, 2, 3, 7, 8, 9)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "[4, 5, 6, None, 1, 2]"
