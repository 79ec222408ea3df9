"""Leaves that are shut or expected, picked entries and heat: against a dict of what was written."""

import random
import struct
from array import array
from collections import Counter
from itertools import product
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statekit import Store, leaf_of
from statekit.errors import (
    ArgumentError,
    ColumnError,
    CorruptBlockError,
    NotOwnedError,
    SchemaError,
    UnknownEntryError,
)
from statekit.native import frames
from statekit.native.block import Block
from statekit.native.kinds import RESIDENCIES
from statekit.native.states import State

LEAVES = 4
TTL = 50
KINDS = ("i64", "f64", "bytes", "list", "map", "nested", "timers")
NAMES = (*KINDS, "x")  # x: a timed i64
KEYS = ["", "a", "k" * 10, "k" * 11, "m" * 18, "m" * 19, "n" * 255, "é" * 30]
KEYS += [f"key-{i}" for i in range(24)]

Entry = tuple[bytes, int]  # encoded value, stamp


def encoded(name: str, number: int) -> bytes:
    if name in ("i64", "x", "timers"):
        return struct.pack("<q", number)
    if name == "f64":
        return struct.pack("<d", number)
    if name == "bytes":
        return b"%d" % number
    shapes: dict[str, Any] = {"list": [number] * (number % 40), "map": {number: "v"}}
    packed: bytes = msgpack.packb(shapes.get(name, {"deep": [number]}))
    return packed


def open_store(now: int = 0) -> tuple[Store, dict[str, Any]]:
    store = Store(key_groups=LEAVES, subgroups=1)
    states: dict[str, Any] = {kind: store.state(kind, kind) for kind in KINDS}  # type: ignore[call-overload]
    states["x"] = store.state("x", "i64", timed=True)
    states["x"].ttl(TTL, clock="event")
    store.set_time("event", now)
    return store, states


FATES = ("expected", "absent", "partial", "whole", "shut", "away")


def waiting_store(now: int, fates: list[str], early: list[str]) -> tuple[Store, dict[str, Any]]:
    """A store whose leaves have these fates. Whole and partial leaves have some entries already."""
    store, states = open_store(now)
    for leaf, fate in enumerate(fates):
        if fate != "whole":
            store.mark(leaf, leaf + 1, "partial" if fate == "partial" else "absent")
    for key in early:
        if fates[leaf_by_key(key)] in ("whole", "partial"):
            for kind in KINDS:
                states[kind].put_encoded(key, encoded(kind, 77))
    for leaf, fate in enumerate(fates):
        if fate == "away":
            store.mark(leaf, leaf + 1, "away")
        elif fate == "shut":
            store.set_gate(leaf, leaf + 1, "shut")
        elif fate == "expected":
            store.set_gate(leaf, leaf + 1, "expected")
    return store, states


def leaf_by_key(key: str) -> int:
    return leaf_of(str, key, key_groups=LEAVES, subgroups=1)


def in_blocks(blocks: bytes) -> dict[tuple[str, str], bytes]:
    """All entries of some blocks, deletions aside."""
    found = {}
    for block in Block.each(blocks):
        block.check()
        for key, value in block:
            if value is not None:
                raw = value
                if block.kind in ("i64", "f64"):
                    raw = struct.pack("<d" if block.kind == "f64" else "<q", value)
                found[block.name, key.decode()] = raw
    return found


class Model:
    """What was written: (state, key) to (encoded value, stamp), and the watermark."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Entry] = {}
        self.now = 0

    def copy(self) -> "Model":
        other = Model()
        other.entries, other.now = dict(self.entries), self.now
        return other

    def leaf(self, leaf: int) -> dict[tuple[str, str], bytes]:
        return {
            (name, key): value
            for (name, key), (value, stamp) in self.entries.items()
            if leaf_by_key(key) == leaf and (name != "x" or stamp + TTL > self.now)
        }


class Gates(RuleBasedStateMachine):
    @initialize(write_back=st.booleans())
    def start(self, write_back: bool) -> None:
        self.store, self.states = open_store()
        self.store.write_back(write_back)
        self.model = Model()
        self.gates = ["open"] * LEAVES
        self.frozen: dict[int, Model] = {}
        self.base: tuple[int, list[bytes]] | None = None
        self.snapshots: list[tuple[Any, Model, list[str]]] = []

    def refused(self, key: str) -> bool:
        return self.gates[leaf_by_key(key)] == "shut"

    @rule(name=st.sampled_from(NAMES), key=st.sampled_from(KEYS), number=st.integers(0, 99))
    def put(self, name: str, key: str, number: int) -> None:
        value = encoded(name, number)
        if self.refused(key):
            with pytest.raises(NotOwnedError, match="route the key to its new owner"):
                self.states[name].put_encoded(key, value)
            return
        self.states[name].put_encoded(key, value)
        self.model.entries[name, key] = value, self.model.now

    @rule(name=st.sampled_from(NAMES), key=st.sampled_from(KEYS), blind=st.booleans())
    def delete(self, name: str, key: str, blind: bool) -> None:
        if self.refused(key):
            with pytest.raises(NotOwnedError):
                self.states[name].delete(key, blind=blind)
            return
        was = self.model.leaf(leaf_by_key(key))
        assert self.states[name].delete(key, blind=blind) == ((name, key) in was)
        self.model.entries.pop((name, key), None)

    @rule(name=st.sampled_from(NAMES), key=st.sampled_from(KEYS))
    def get(self, name: str, key: str) -> None:
        if self.refused(key):
            with pytest.raises(NotOwnedError):
                self.states[name].get_encoded(key)
            return
        was = self.model.leaf(leaf_by_key(key))
        assert self.states[name].get_encoded(key) == was.get((name, key))

    @rule(
        name=st.sampled_from(("i64", "x")), keys=st.lists(st.sampled_from(KEYS), max_size=40),
    )  # fmt: skip
    def add_many(self, name: str, keys: list[str]) -> None:
        statuses = b"\0" * len(keys)
        if any(map(self.refused, keys)):
            with pytest.raises(NotOwnedError) as caught:
                self.states[name].add_many(keys, [1] * len(keys))
            statuses = bytes(caught.value.statuses)
            assert caught.value.record is not None
            assert self.refused(keys[caught.value.record])
        else:
            self.states[name].add_many(keys, [1] * len(keys))
        for key, status in zip(keys, statuses, strict=True):
            if status == 0:
                assert not self.refused(key)
                was = self.model.leaf(leaf_by_key(key)).get((name, key), b"\0" * 8)
                value = struct.pack("<q", struct.unpack("<q", was)[0] + 1)
                self.model.entries[name, key] = value, self.model.now

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=10), name=st.sampled_from(NAMES))
    def delete_many(self, keys: list[str], name: str) -> None:
        keys = [key for key in keys if not self.refused(key)]
        self.states[name].delete_many(keys)
        for key in keys:
            self.model.entries.pop((name, key), None)

    @rule(name=st.sampled_from(NAMES))
    def clear(self, name: str) -> None:
        self.store.clear(self.states[name])
        for held, key in list(self.model.entries):
            if held == name and not self.refused(key):
                del self.model.entries[held, key]

    @rule(ms=st.integers(0, 30))
    def pass_time(self, ms: int) -> None:
        self.model.now += ms
        self.store.set_time("event", self.model.now)
        self.store.sweep(1000)

    @rule(watermark=st.integers(0, 99))
    def fire(self, watermark: int) -> None:
        fired = self.states["timers"].due(watermark)
        assert not any(self.refused(key) for _, key in fired)
        due = [
            (struct.unpack("<q", value)[0], key)
            for (name, key), (value, _) in self.model.entries.items()
            if name == "timers" and not self.refused(key)
        ]
        expected = sorted((at, key.encode()) for at, key in due if at <= watermark)
        assert [(at, key.encode()) for at, key in fired] == expected
        for _, key in fired:
            del self.model.entries["timers", key]
        rest = [at for at, _ in due if at > watermark]
        assert self.states["timers"].next_due == min(rest, default=None)

    @rule(leaf=st.integers(0, LEAVES - 1), written=st.booleans())
    def write_home(self, leaf: int, written: bool) -> None:
        if self.store.dirty_take(leaf):
            assert self.gates[leaf] in ("open", "shut")
            self.store.dirty_done(leaf, False)

    @rule(start=st.integers(0, LEAVES - 1), count=st.integers(1, LEAVES))
    def shut(self, start: int, count: int) -> None:
        stop = min(start + count, LEAVES)
        self.store.set_gate(start, stop, "shut")
        self.gates[start:stop] = ["shut"] * (stop - start)

    @rule(start=st.integers(0, LEAVES - 1), count=st.integers(1, LEAVES))
    def open(self, start: int, count: int) -> None:
        stop = min(start + count, LEAVES)
        self.store.set_gate(start, stop, "open")
        self.gates[start:stop] = ["open"] * (stop - start)

    @rule(leaf=st.integers(0, LEAVES - 1), wanted=st.lists(st.sampled_from(KEYS)), data=st.data())
    def hand_over_and_back(self, leaf: int, wanted: list[str], data: Any) -> None:
        self.store.set_gate(leaf, leaf + 1, "shut")
        there, states = open_store(self.model.now)
        there.mark(leaf, leaf + 1, "absent")
        there.set_gate(leaf, leaf + 1, "expected")
        for key in KEYS:
            if leaf_by_key(key) == leaf:
                with pytest.raises(UnknownEntryError):
                    states["bytes"].put(key, b"early")
        expected = self.model.leaf(leaf)
        wanted = [key for key in wanted if leaf_by_key(key) == leaf]
        some = data.draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
        picked = [
            self.store.pick(leaf, self.states[name], [key.encode() for key in wanted])
            for name in some
        ]
        there.decode_leaf(leaf, b"".join(picked), "under")
        assert there.gate(leaf) == "open"
        for name in NAMES:
            for key in filter(lambda key: leaf_by_key(key) == leaf, KEYS):
                if name in some and key in wanted:
                    assert states[name].get_encoded(key) == expected.get((name, key))
                else:
                    with pytest.raises(UnknownEntryError):
                        states[name].get_encoded(key)
        there.decode_leaf(leaf, self.store.encode_leaf(leaf), "under_all")
        assert there.residency(leaf) == "whole"
        assert in_blocks(there.encode_leaf(leaf)) == expected
        self.store.mark(leaf, leaf + 1, "absent")
        assert self.store.gate(leaf) == "open"
        self.store.set_gate(leaf, leaf + 1, "expected")
        there.set_gate(leaf, leaf + 1, "shut")
        self.store.decode_leaf(leaf, there.encode_leaf(leaf), "replace")
        self.gates[leaf] = "open"

    @rule(
        wanted=st.lists(st.sampled_from(KEYS)),
        some=st.lists(st.sampled_from(NAMES), max_size=3, unique=True),
        fates=st.lists(st.sampled_from(FATES), min_size=LEAVES, max_size=LEAVES),
        early=st.lists(st.sampled_from(KEYS), max_size=8),
    )
    def spread_elsewhere(
        self, wanted: list[str], some: list[str], fates: list[str], early: list[str]
    ) -> None:
        keys = [key.encode() for key in wanted]
        blocks = b"".join(self.store.pick_many(self.states[name], keys) for name in some)
        there, states = waiting_store(self.model.now, fates, early)
        takes = [leaf for leaf in range(LEAVES) if fates[leaf] in ("expected", "partial", "absent")]
        touched, error = there.spread(blocks)
        assert error is None
        assert touched == [leaf for leaf in takes if some and leaf in set(map(leaf_by_key, wanted))]
        for leaf in range(LEAVES):
            expected = self.model.leaf(leaf)
            for name, key in product(NAMES, filter(lambda key: leaf_by_key(key) == leaf, KEYS)):
                if fates[leaf] in ("away", "shut"):
                    with pytest.raises(NotOwnedError):
                        states[name].get_encoded(key)
                elif fates[leaf] in ("whole", "partial") and name != "x" and key in early:
                    assert states[name].get_encoded(key) == encoded(name, 77)  # newer, so it stays
                elif fates[leaf] == "whole":
                    assert states[name].get_encoded(key) is None
                elif name in some and key in wanted:
                    assert states[name].get_encoded(key) == expected.get((name, key))
                else:
                    with pytest.raises(UnknownEntryError):
                        states[name].get_encoded(key)
        # The same, leaf by leaf.
        single, _ = waiting_store(self.model.now, fates, early)
        for leaf in touched:
            mine = [key.encode() for key in wanted if leaf_by_key(key) == leaf]
            picked = [self.store.pick(leaf, self.states[name], mine) for name in some]
            single.decode_leaf(leaf, b"".join(picked), "under")
        for leaf in range(LEAVES):
            assert there.encode_leaf(leaf) == single.encode_leaf(leaf)
            assert there.residency(leaf) == single.residency(leaf)
            assert there.gate(leaf) == single.gate(leaf)

    @rule()
    def begin_deltas(self) -> None:
        blocks = [self.store.encode_leaf(leaf) for leaf in range(LEAVES)]
        self.base = self.store.advance_epoch(), blocks
        self.store.track(self.base[0])

    @precondition(lambda self: self.base)
    @rule()
    def deltas_lead_from_the_base_to_now(self) -> None:
        assert self.base is not None
        epoch, blocks = self.base
        there, _ = open_store(self.model.now)
        for leaf in range(LEAVES):
            there.decode_leaf(leaf, blocks[leaf])
            there.decode_leaf(leaf, self.store.encode_leaf(leaf, since=epoch), "over")
            assert in_blocks(there.encode_leaf(leaf)) == self.model.leaf(leaf)

    @precondition(lambda self: len(self.snapshots) < 3)
    @rule()
    def take_snapshot(self) -> None:
        self.snapshots.append((self.store.snapshot(), self.model.copy(), list(self.gates)))

    @precondition(lambda self: self.snapshots)
    @rule()
    def snapshot_has_what_was_open_as_it_was(self) -> None:
        snapshot, model, gates = self.snapshots.pop(0)
        with snapshot:
            found = dict(snapshot)
            for leaf, gate in enumerate(gates):
                assert snapshot.residency(leaf) == ("away" if gate == "shut" else "whole")
                expected = {} if gate == "shut" else model.leaf(leaf)
                assert in_blocks(found.get(leaf, b"")) == expected

    @invariant()
    def leaves_hold_what_was_written(self) -> None:
        for leaf in range(LEAVES):
            assert self.store.gate(leaf) == self.gates[leaf]
            assert self.store.residency(leaf) == "whole"
            assert in_blocks(self.store.encode_leaf(leaf)) == self.model.leaf(leaf)
        stats = self.store.stats()
        assert stats.away == self.gates.count("shut")
        assert stats.bytes == self.store.bytes_used
        by_leaf = [self.store.stats(start=leaf, stop=leaf + 1).bytes for leaf in range(LEAVES)]
        assert sum(by_leaf) == stats.bytes

    def teardown(self) -> None:
        for snapshot, _, _ in getattr(self, "snapshots", ()):
            snapshot.close()


TestGates = Gates.TestCase
TestGates.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# ---- Expected leaves


def every_write(states: dict[str, Any], key: str) -> list[Any]:
    one = msgpack.packb(1)
    return [
        *(lambda name=name: states[name].put_encoded(key, encoded(name, 1)) for name in NAMES),
        *(lambda name=name: states[name].delete(key, blind=True) for name in NAMES),
        *(lambda name=name: states[name].delete_many([key], blind=True) for name in NAMES),
        lambda: states["i64"].add(key, 1),
        lambda: states["i64"].put_many([key], [1]),
        lambda: states["x"].put_many([key], [1]),
        lambda: states["f64"].add_many([key], [1.0]),
        lambda: states["bytes"].put_many([key], [b"v"]),
        lambda: states["list"].append(key, one),
        lambda: states["list"].append_many([key], [1]),
        lambda: states["map"].map_put_many([key], [1], [1]),
        lambda: states["timers"].set(key, 1),
    ]


def test_an_expected_leaf_takes_no_write_and_gives_no_answer() -> None:
    store, states = open_store()
    store.mark(0, LEAVES, "absent")
    store.set_gate(0, LEAVES, "expected")
    for write in every_write(states, "a"):
        with pytest.raises(UnknownEntryError):
            write()
    for name in NAMES:
        with pytest.raises(UnknownEntryError):
            states[name].get_encoded("a")
        with pytest.raises(UnknownEntryError):
            states[name].contains_many(["a"])
        with pytest.raises(UnknownEntryError):
            store.clear(states[name], blind=True)
    with pytest.raises(UnknownEntryError):
        states["bytes"].get_many(["a", "b"])
    assert states["timers"].due(100) == []
    assert store.stats().bytes == 0
    with store.snapshot() as snapshot:
        assert [snapshot.residency(leaf) for leaf in range(LEAVES)] == ["absent"] * LEAVES
        assert list(snapshot) == []
    states["i64"].install("a", None)  # its home says: no such key
    assert store.gate(leaf_by_key("a")) == "open"
    assert states["i64"].get("a") is None
    states["bytes"].put("a", b"v")


def test_a_shut_leaf_takes_no_write() -> None:
    store, states = open_store()
    store.set_gate(0, LEAVES, "shut")
    for write in every_write(states, "a"):
        with pytest.raises(NotOwnedError, match="handed over to another process"):
            write()
    with pytest.raises(NotOwnedError):
        states["i64"].install("a", None)


# ---- Picked entries


def test_picked_entries_have_their_stamps() -> None:
    store, states = open_store(now=1000)
    states["x"].put("a", 7)
    store.set_time("event", 1000 + TTL - 1)
    leaf = leaf_by_key("a")
    (block,) = Block.each(store.pick(leaf, states["x"], [b"a"]))
    assert block.is_delta
    assert block.stamps is not None
    assert block.stamps.tolist() == [1000]
    store.set_time("event", 1000 + TTL)
    (block,) = Block.each(store.pick(leaf, states["x"], [b"a", b"a"]))
    assert list(block) == [(b"a", None)]


@pytest.mark.parametrize("key_type", [str, bytes, int, tuple[str, int]])
def test_keys_of_every_type_are_picked(key_type: Any) -> None:
    keys: list[Any] = {
        str: ["a", "b", "c" * 300], bytes: [b"", b"b", b"c" * 300], int: [0, -1, 2**62],
    }.get(key_type, [("a", 1), ("b" * 30, -5), ("", 0)])  # fmt: skip
    store, there = Store(1, 1), Store(1, 1)
    state, copy = (each.state("n", "i64", key_type) for each in (store, there))
    state.put_many(keys[:2], [1, 2])
    there.mark(0, 1, "absent")
    there.decode_leaf(0, store.pick(0, state, [state.codec.encode(key) for key in keys]), "under")
    assert copy.get_many(keys).to_list() == [1, 2, None]


def test_pick_says_what_it_cannot_do() -> None:
    store, states = open_store()
    leaf, other = leaf_by_key("a"), (leaf_by_key("a") + 1) % LEAVES
    assert store.pick(leaf, states["i64"], []) == b""
    with pytest.raises(ArgumentError, match="of leaf"):
        store.pick(other, states["i64"], [b"a"])
    with pytest.raises(ColumnError):
        store.pick(leaf, states["i64"], ["a"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError):
        store.pick(LEAVES, states["i64"], [b"a"])
    store.mark(leaf, leaf + 1, "partial")
    with pytest.raises(UnknownEntryError, match="not whole"):
        store.pick(leaf, states["i64"], [b"a"])
    store.mark(leaf, leaf + 1, "away")
    with pytest.raises(NotOwnedError):
        store.pick(leaf, states["i64"], [b"a"])


def test_many_residencies_are_those_of_each() -> None:
    store, _ = open_store()
    store.mark(0, 1, "partial")
    store.mark(1, 2, "away")
    store.mark(2, 3, "absent")
    store.set_gate(2, 3, "expected")
    store.set_gate(3, 4, "shut")
    asked = [3, 0, 1, 2, 2, 0]
    found = [RESIDENCIES[number] for number in store.residencies(array("I", asked))]
    assert found == [store.residency(leaf) for leaf in asked]
    assert set(found) == {"whole", "partial", "away", "absent"}
    assert store.residencies(array("I")) == b""
    with pytest.raises(ArgumentError, match="leaves"):
        store.residencies(array("I", [0, LEAVES]))


# ---- Picked entries of many leaves


@pytest.mark.parametrize("key_type", [str, bytes, int, tuple[str, int]])
def test_keys_of_every_type_are_spread_over_many_leaves(key_type: Any) -> None:
    numbers = range(-300, 300)
    by_type: dict[Any, list[Any]] = {
        str: [f"{i}" * (1 + i % 9) for i in numbers],
        bytes: [b"%d" % i * (1 + i % 9) for i in numbers],
        int: list(numbers),
        tuple[str, int]: [(f"{i}", i) for i in numbers],
    }
    keys = by_type[key_type]
    store, there = Store(16, 4), Store(16, 4)
    state, copy = (each.state("n", "i64", key_type) for each in (store, there))
    state.put_many(keys[::2], list(numbers)[::2])
    there.mark(0, there.leaves, "absent")
    there.set_gate(0, there.leaves, "expected")
    block = store.pick_many(state, [state.codec.encode(key) for key in keys])
    assert there.spread(block) == (list(range(there.leaves)), None)
    expected = [None if at % 2 else number for at, number in enumerate(numbers)]
    assert copy.get_many(keys).to_list() == expected


def test_leaves_that_are_not_whole_are_left_out_by_pick_many() -> None:
    store, states = open_store()
    for key in KEYS:
        states["bytes"].put(key, key.encode())
    store.mark(0, 1, "partial")
    store.mark(1, 2, "away")
    store.set_gate(2, 3, "shut")
    asked = [key.encode() for key in KEYS * 2] + [b"not there"]
    (block,) = Block.each(store.pick_many(states["bytes"], asked))
    block.check()
    found = dict(block)
    assert found.pop(b"not there", None) is None
    assert found == {key.encode(): key.encode() for key in KEYS if leaf_by_key(key) in (2, 3)}
    (block,) = Block.each(store.pick_many(states["bytes"], asked, bytearray((0, 1, 0, 1))))
    assert {leaf_by_key(key.decode()) for key, _ in block} <= {1, 3}
    assert {key.decode() for key, value in block if value is not None} == {
        key for key in KEYS if leaf_by_key(key) == 3
    }
    assert store.pick_many(states["bytes"], asked, bytearray(LEAVES)) == b""
    store.mark(0, LEAVES, "away")
    assert store.pick_many(states["bytes"], asked) == b""
    assert store.pick_many(states["bytes"], []) == b""
    assert store.spread(b"") == ([], None)
    with pytest.raises(ColumnError):
        store.pick_many(states["bytes"], ["a"])  # type: ignore[list-item]


def test_blocks_of_many_leaves_are_sealed_and_are_of_no_leaf() -> None:
    store, states = open_store()
    states["i64"].put("a", 1)
    block = bytearray(store.pick_many(states["i64"], [key.encode() for key in KEYS]))
    frames.seal(block)
    frames.bind(block, b"p" * 16, 64)
    assert frames.verify(block, b"p" * 16, 64) is None
    assert frames.verify(block, b"p" * 16, 72) == 0
    there, _ = open_store()
    there.mark(0, LEAVES, "absent")
    for leaf in range(LEAVES):
        with pytest.raises(CorruptBlockError, match=f"where leaf {leaf} of"):
            there.decode_leaf(leaf, bytes(block), "under")
    assert there.spread(block) == (list(range(LEAVES)), None)  # any buffer will do


@pytest.mark.parametrize("name", NAMES)
def test_damaged_blocks_are_spread_wholly_or_not_at_all(name: str) -> None:
    store, states = open_store()
    for number, key in enumerate(KEYS[::2]):
        states[name].put_encoded(key, encoded(name, number))
    good = store.pick_many(states[name], [key.encode() for key in KEYS])
    rng = random.Random(name)
    refused = 0
    for _ in range(200):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.1:
            del bad[rng.randrange(len(bad)) :]
        there, _ = open_store()
        there.mark(0, LEAVES, "absent")
        there.set_gate(0, LEAVES, "expected")
        blocks = good + bad if rng.random() < 0.5 else bytes(bad)
        try:
            touched, _ = there.spread(blocks)
        except (CorruptBlockError, SchemaError):
            refused += 1
            assert there.stats().bytes == 0
            assert [there.gate(leaf) for leaf in range(LEAVES)] == ["expected"] * LEAVES
            continue
        stats = there.stats()
        entries = [len(block) for block in Block.each(blocks)]
        assert max(entries, default=0) <= stats.entries + stats.tombstones <= sum(entries)
        assert bool(touched) == bool(entries)
    assert refused > 100


# ---- Gates and heat


def test_gates_that_cannot_be_set_say_so() -> None:
    store, _ = open_store()
    with pytest.raises(ArgumentError, match="no gate"):
        store.set_gate(0, 1, "ajar")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="mark it absent"):
        store.set_gate(0, 1, "expected")
    store.mark(2, 3, "away")
    with pytest.raises(NotOwnedError):
        store.set_gate(0, LEAVES, "shut")
    assert [store.gate(leaf) for leaf in range(LEAVES)] == ["open"] * LEAVES
    with pytest.raises(ArgumentError):
        store.gate(LEAVES)
    store.set_gate(1, 2, "shut")
    with pytest.raises(NotOwnedError):
        store.detach(0, 2)
    with pytest.raises(NotOwnedError):
        store.mark(1, 2, "whole")


def test_heat_tells_leaves_that_are_used_from_those_that_are_not() -> None:
    store, states = open_store()
    assert store.heat().tolist() == [0] * LEAVES
    hot = [key for key in KEYS if leaf_by_key(key) == 1]
    used: Counter[int] = Counter()
    counts: State = states["i64"]
    for turn in range(300):
        keys = hot if turn % 10 else KEYS
        counts.add_many(keys, [1] * len(keys))  # type: ignore[attr-defined]
        used.update(map(leaf_by_key, keys))
    for key in KEYS:
        counts.contains(key)
        used[leaf_by_key(key)] += 1
    heat = store.heat()
    assert heat.typecode == "Q"
    assert max(range(LEAVES), key=heat.__getitem__) == 1
    assert sum(heat) == pytest.approx(used.total(), rel=0.05)
    assert heat[1] == pytest.approx(used[1], rel=0.2)
    assert store.stats().operations == used.total()
