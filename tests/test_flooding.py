"""Hash flooding: keys crafted to collide in XXH64 stay near O(1) per operation.

XXH64 of 8 bytes is a bijection, so for int keys an attacker can choose the hash and compute the
key. The inverse is written here from the specification, not taken from csrc. Probes are counted,
nothing is timed.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash

from statekit import Store, key_hash, leaf_of
from statekit.native.block import Block, rewrite

MASK = 2**64 - 1
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
SEED = 42
COUNT = 20_000
GROUPS, SUBGROUPS = 8, 4
LEAF_BITS = 5
BOUNDS = (4, 64)  # groups visited plus keys compared, on average and at worst


def inverse(odd: int) -> int:
    return pow(odd, -1, 2**64)


def rotl(value: int, by: int) -> int:
    return (value << by | value >> (64 - by)) & MASK


def unshift(value: int, by: int) -> int:
    """The x of which value is x ^ (x >> by)."""
    x = value
    for _ in range(64 // by):
        x = value ^ (x >> by)
    return x


def key_with_hash(hash_: int, seed: int = SEED) -> int:
    """The int key whose routing hash this is."""
    h = unshift(hash_, 32) * inverse(P3) & MASK
    h = unshift(h, 29) * inverse(P2) & MASK
    h = unshift(h, 33)
    h = rotl((h - P4) * inverse(P1) & MASK, 64 - 27)
    lane = h ^ ((seed + P5 + 8) & MASK)
    lane = rotl(lane * inverse(P1) & MASK, 64 - 31) * inverse(P2) & MASK
    return lane - 2**64 if lane >> 63 else lane


@pytest.mark.parametrize("hash_", [0, 1, MASK, 0x0123456789ABCDEF, 2**63])
def test_the_inverse_is_one(hash_: int) -> None:
    key = key_with_hash(hash_)
    data = key.to_bytes(8, "little", signed=True)
    assert xxhash.xxh64_intdigest(data, seed=SEED) == hash_
    assert key_hash(int, key) == hash_


def hashes(kind: str) -> Iterator[int]:
    """COUNT distinct hashes that collide in some bits, in random order."""
    rng = random.Random(kind)
    leaf = 0x15 << (64 - LEAF_BITS)
    high = 0x0123456789 << 24 | leaf  # leaf and placement: the 37 bits from the top
    for n in rng.sample(range(2**15), COUNT):
        if kind == "high bits":  # one place; tags differ
            yield high & ~0xFFFFFF | n
        elif kind == "low byte":  # one tag; places differ
            yield rng.getrandbits(24) << 40 | n << 8 | 0x77
        elif kind == "high bits and low byte":
            yield high & ~0xFFFFFF | n << 8 | 0x77
        elif kind == "one leaf":  # nothing but the leaf in common
            yield leaf | rng.getrandbits(64 - LEAF_BITS) & ~0x7FFF | n
        else:  # one leaf and one tag
            yield leaf | rng.getrandbits(64 - LEAF_BITS) & ~0x7FFFFF | n << 8 | 0x77


KINDS = ["high bits", "low byte", "high bits and low byte", "one leaf", "one leaf, low byte"]
FLOODS = {"high bits", "high bits and low byte"}  # these must make the table secret
HONEST = {"one leaf"}  # these must not


def check_costs(state: Any, keys: list[int]) -> None:
    costs = [state.probe_cost(key) for key in keys]
    mean_max, cost_max = BOUNDS
    assert sum(costs) / len(costs) < mean_max
    assert max(costs) <= cost_max


def new_store() -> Store:
    return Store(GROUPS, SUBGROUPS)


@pytest.mark.parametrize("batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_crafted_keys_stay_cheap_and_correct(kind: str, batch: bool) -> None:
    keys = [key_with_hash(hash_) for hash_ in hashes(kind)]
    assert len(set(keys)) == COUNT
    store = new_store()
    state = store.state("crafted", "i64", int)
    if batch:
        state.put_many(keys, list(range(COUNT)))
    else:
        for value, key in enumerate(keys):
            state.put(key, value)
    model = dict(zip(keys, range(COUNT), strict=True))
    flooded = store.stats().flooded
    assert flooded == 1 if kind in FLOODS else flooded == 0 or kind not in HONEST
    check_costs(state, keys)
    absent = [key_with_hash(key_hash(int, key) ^ 1 << 23) for key in keys[:2000]]
    check_costs(state, [key for key in absent if key not in model])
    assert state.get_many(keys).to_list() == list(range(COUNT))
    assert all(state.get(key) == model[key] for key in keys[::97])

    # Blocks are in the order of the public hash, whatever places the entries in memory.
    other = new_store()
    found = {}
    for leaf in range(store.leaves):
        blocks = store.encode_leaf(leaf)
        for block in Block.each(blocks):
            block.check()
            ordered = block.hashes.tolist()
            assert ordered == sorted(ordered)
            found.update(iter(block))
            middle = block.key_column[len(block) // 2]
            assert block.find(middle) == model[middle]
        other.decode_leaf(leaf, blocks)
    assert {int.from_bytes(k, "little", signed=True): v for k, v in found.items()} == model

    copy = other.state("crafted", "i64", int)
    check_costs(copy, keys)
    assert copy.get_many(keys).to_list() == list(range(COUNT))
    assert other.encode_leaf(leaf_of(int, keys[0], GROUPS, SUBGROUPS)) == store.encode_leaf(
        leaf_of(int, keys[0], GROUPS, SUBGROUPS)
    )

    # Deleting half of them leaves no long chains behind. Deleting the rest frees the memory.
    assert sum(state.delete_many(keys[::2])) == COUNT // 2
    check_costs(state, keys)
    for key in keys[1::2]:
        assert state.delete(key)
    assert store.stats().entries == 0
    assert store.bytes_used <= store.leaves * 2200  # an empty table may keep four groups


def test_crafted_keys_that_arrive_in_blocks_stay_cheap() -> None:
    """A delta over what is here, and a home's answer under it, make a table secret as well."""
    keys = [key_with_hash(hash_) for hash_ in hashes("high bits")]
    leaf = leaf_of(int, keys[0], GROUPS, SUBGROUPS)
    half = new_store()
    half.state("crafted", "i64", int).put_many(keys[::2], keys[::2])
    blocks = half.encode_leaf(leaf)
    for mode in ("over", "under"):
        store = new_store()
        state = store.state("crafted", "i64", int)
        if mode == "under":
            store.mark(leaf, leaf + 1, "absent")
        state.put_many(keys[1::2], keys[1::2])
        if mode == "over":  # a full block replaces: make a delta of it
            blocks = rewrite(blocks, as_delta=True)
        store.decode_leaf(leaf, blocks, mode)  # type: ignore[arg-type]
        assert store.stats().flooded == 1
        assert state.get_many(keys).to_list() == keys
        check_costs(state, keys)


def test_map_keys_cannot_be_crafted_at_all() -> None:
    """Maps place their keys by a secret hash: keys that collide in XXH64 are like any others.

    Probes inside a map are not counted, so this only shows that nothing depends on the hash."""
    store = new_store()
    state = store.state("maps", "map")
    keys = [key_with_hash(hash_) for hash_ in hashes("high bits and low byte")]
    state.map_put_many(["one"] * COUNT, keys, list(range(COUNT)))
    assert state.length("one") == COUNT
    assert state.get("one", (keys[-1],)) is not None


def test_honest_keys_never_flood() -> None:
    store = new_store()
    state = store.state("honest", "i64", int)
    state.put_many(list(range(200_000)), list(range(200_000)))
    assert store.stats().flooded == 0
    check_costs(state, list(range(0, 200_000, 17)))
