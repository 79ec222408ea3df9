"""Random sequences of operations against plain Python objects (tests/model.py), step by step.

StoreMachine: everything a store whose leaves are whole can do. HomeMachine: leaves that are
absent or partial, with a home made of dicts. STATEKIT_HYPOTHESIS=nightly runs many more.
"""

import math
from array import array
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model import (
    CODECS,
    CONTAINERS,
    I64_MAX,
    I64_MIN,
    NUMBERS,
    SPECS,
    BadPath,
    BadValue,
    Edit,
    Image,
    Missing,
    Tree,
    apply_blocks,
    array_body,
    declare,
    encode_number,
    encode_tree,
    encode_value,
    entries_of,
    fits_kind,
    image_of_model,
    image_of_store,
    read_tree,
    tree_of,
    write_tree,
)

from statekit import Store, leaf_of
from statekit.errors import (
    BadValueError,
    ChangedDuringIterationError,
    NotOwnedError,
    OverflowStateError,
    PathError,
    UnknownEntryError,
)
from statekit.native.block import Block

GEOMETRIES = [(1, 1), (4, 4), (128, 16)]
SMALL = 16  # leaves of a store that is compared as a whole after each step
pack = msgpack.packb

# ---- Strategies. Few distinct keys, so that operations meet, and of every length that matters.

_STRS = ["", "a", "b", "c", "ключ", "k" * 17, "k" * 18, "k" * 19, "l" * 31, "m" * 32, "n" * 300]
_INTS = [0, 1, 2, 3, -1, I64_MIN, I64_MAX, *range(100, 108)]
_POOLS: dict[str, list[Any]] = {
    "s": _STRS,
    "b": [text.encode() for text in _STRS] + [b"\x00", b"\xff" * 9],
    "i": _INTS,
    "(si)": [(text, number) for text in ("", "a", "t" * 40) for number in (0, -1, 7)],
    "(ib)": [(number, blob) for number in (5, I64_MIN) for blob in (b"", b"x", b"y" * 30)],
}


def key_of(name: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(_POOLS[CODECS[name].text])


INTS = st.one_of(st.integers(-3, 3), st.sampled_from([I64_MIN, I64_MAX, 2**31, -(2**31)]))
FLOATS = st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e308, math.inf, -math.inf, math.nan])
BLOBS = st.one_of(st.binary(max_size=4), st.sampled_from([b"z" * 63, b"z" * 300]))

SCALARS = st.sampled_from(
    [
        *[None, True, False, 0, 1, -1, 127, 128, -33, 2**63, I64_MIN, 1.0, -0.0],
        *["", "a", "s" * 31, "s" * 40, "w" * 300, b"b", b"b" * 20],
    ]
)
MAP_KEYS = st.sampled_from([0, 1, 1.0, True, None, -1, 2**63, "a", "b", "k" * 40, b"a", ("p", 1)])
_SMALL_TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(MAP_KEYS, inner, max_size=3),
    max_leaves=6,
)
# Containers become indexed above 64 elements or 256 bytes.
_LONG_LISTS = st.sampled_from([15, 16, 64, 65, 90]).map(lambda n: list(range(n)))
_LONG_MAPS = st.sampled_from([15, 16, 64, 65]).map(lambda n: {f"m{i}": i for i in range(n)})
LISTS = st.lists(_SMALL_TREES, max_size=5) | _LONG_LISTS
MAPS = st.dictionaries(MAP_KEYS, _SMALL_TREES, max_size=4) | _LONG_MAPS
TREES = (_SMALL_TREES | LISTS | MAPS).map(tree_of)
POSITIONS = st.one_of(st.integers(-4, 6), st.sampled_from([14, 15, 63, 64, -65, I64_MAX, I64_MIN]))


def root_of(kind: str) -> st.SearchStrategy[Tree]:
    return {"list": LISTS.map(tree_of), "map": MAPS.map(tree_of), "nested": TREES}[kind]


def value_of(name: str) -> st.SearchStrategy[Any]:
    kind = SPECS[name][0]
    if kind in ("list", "map", "nested"):
        return root_of(kind)
    return {"i64": INTS, "f64": FLOATS, "bytes": BLOBS}[kind]


def draw_path(data: st.DataObject, tree: Tree | None, steps_max: int = 3) -> list[Any]:
    """Steps that mostly lead somewhere: the tree's own members, or a guess."""
    path: list[Any] = []
    for _ in range(data.draw(st.integers(0, steps_max), "path length")):
        guess = data.draw(st.integers(0, 4), "guess") == 0
        if isinstance(tree, list) and tree and not guess:
            at = data.draw(st.integers(-len(tree), len(tree) - 1), "position")
            tree = tree[at]
            path.append(at)
        elif isinstance(tree, dict) and tree and not guess:
            name = data.draw(st.sampled_from(list(tree)), "member")
            tree = tree[name]
            path.append(msgpack.unpackb(name, strict_map_key=False, use_list=False))
        else:
            tree = None
            path.append(data.draw(MAP_KEYS | POSITIONS, "step"))
    return path


def as_column(data: st.DataObject, letter: str, items: list[Any]) -> Any:
    """The items as a list, or as a NumPy or Arrow array of one of their types."""
    makers: dict[str, list[Callable[[list[Any]], Any]]] = {
        "s": [
            lambda x: np.array(x, object),
            lambda x: pa.array(x, pa.string()),
            lambda x: pa.array(["skip", *x, "skip"], pa.large_string())[1:-1],
        ],
        "b": [
            lambda x: np.array([*x, None], object)[:-1],
            lambda x: pa.array(x, pa.large_binary()),
            lambda x: pa.array([b"skip", *x], pa.binary())[1:],
        ],
        "i": [
            lambda x: np.array(x, np.int64),
            lambda x: array("q", x),
            lambda x: pa.array([0, *x], pa.int64())[1:],
        ],
        "f": [lambda x: np.array(x, np.float64), lambda x: pa.array(x, pa.float64())],
    }
    return data.draw(st.sampled_from([list, *makers[letter]]), "column")(items)


def as_keys(data: st.DataObject, name: str, keys: list[Any]) -> Any:
    codec = CODECS[name]
    if not codec.is_tuple:
        return as_column(data, codec.text, keys)
    if not keys or data.draw(st.booleans(), "list of tuples"):
        return keys
    parts = zip(codec.parts, zip(*keys, strict=True), strict=True)
    return tuple(as_column(data, part, list(items)) for part, items in parts)


def keys_of(name: str) -> st.SearchStrategy[list[Any]]:
    """The keys of a batch, many of them twice; sometimes hundreds of int keys."""
    few = st.lists(key_of(name), max_size=24)
    if CODECS[name].text != "i":
        return few
    return few | st.integers(1, 300).map(lambda n: list(range(n)))


def add(kind: str, value: Any, amount: Any) -> Any:
    """The sum; None if it does not fit into 64 bits."""
    total = value + amount
    return total if kind == "f64" or I64_MIN <= total <= I64_MAX else None


def same_number(kind: str, one: Any, other: Any) -> bool:
    return encode_number(kind, one) == encode_number(kind, other)


class StoreMachine(RuleBasedStateMachine):
    """A store whose leaves are whole."""

    store: Store

    @initialize(geometry=st.sampled_from(GEOMETRIES), tracks=st.booleans())
    def open(self, geometry: tuple[int, int], tracks: bool) -> None:
        self.geometry = geometry
        self.tracks = tracks  # whether deletions are remembered for deltas
        self.model: dict[str, dict[Any, Any]] = {name: {} for name in SPECS}
        self.snapshots: list[tuple[Any, Image, Image]] = []  # snapshot, read so far, expected
        self.replica: Store | None = None  # base and deltas applied
        self.replica_epoch = 0
        self.turn = 0
        self.use(self.new_store())

    def new_store(self) -> Store:
        return Store(*self.geometry)

    def use(self, store: Store) -> None:
        self.store = store
        self.states = declare(store)

    # ---- One key

    @rule(data=st.data(), name=st.sampled_from(list(SPECS)))
    def put(self, data: st.DataObject, name: str) -> None:
        key, value = data.draw(key_of(name), "key"), data.draw(value_of(name), "value")
        kind, state = SPECS[name][0], self.states[name]
        if kind in ("i64", "f64") and data.draw(st.booleans(), "plain"):
            state.put(key, value)
        else:
            state.put_encoded(key, encode_value(kind, value))
        self.model[name][key] = value

    @rule(data=st.data(), name=st.sampled_from(list(SPECS)))
    def get(self, data: st.DataObject, name: str) -> None:
        key = data.draw(key_of(name), "key")
        kind, state, entries = SPECS[name][0], self.states[name], self.model[name]
        got = state.get_encoded(key)
        assert state.contains(key) == (key in entries)
        if key not in entries:
            assert got is None
            assert state.get(key) is None
        elif kind in ("i64", "f64"):
            assert same_number(kind, state.get(key), entries[key])
        else:
            assert got == encode_value(kind, entries[key])

    @rule(data=st.data(), name=st.sampled_from(list(SPECS)), blind=st.booleans())
    def delete(self, data: st.DataObject, name: str, blind: bool) -> None:
        key = data.draw(key_of(name), "key")
        was = self.model[name].pop(key, None)
        assert self.states[name].delete(key, blind=blind) == (was is not None)

    @rule(data=st.data(), name=st.sampled_from(NUMBERS))
    def fold(self, data: st.DataObject, name: str) -> None:
        kind, state, entries = SPECS[name][0], self.states[name], self.model[name]
        key, value = data.draw(key_of(name), "key"), data.draw(value_of(name), "value")
        op = data.draw(st.sampled_from(["add", "min", "max"]), "op")
        now = entries.get(key, value)
        if op == "add":
            initial = data.draw(st.sampled_from([0, 5, -7]), "initial")
            new = add(kind, entries.get(key, initial), value)
            if new is None:
                try:
                    state.add(key, value, initial)
                except OverflowStateError:
                    return
                raise AssertionError("no overflow")
            got = state.add(key, value, initial)
        elif op == "min":
            new, got = value if value < now else now, state.min(key, value)
        else:
            new, got = value if value > now else now, state.max(key, value)
        assert same_number(kind, got, new)
        entries[key] = got

    @rule(data=st.data(), name=st.sampled_from(NUMBERS))
    def compare_and_set(self, data: st.DataObject, name: str) -> None:
        kind, entries = SPECS[name][0], self.model[name]
        key, desired = data.draw(key_of(name), "key"), data.draw(value_of(name), "desired")
        now = entries.get(key)
        expected = data.draw(st.sampled_from([None, now]) | value_of(name), "expected")
        fits = (
            now is None
            if expected is None
            else now is not None and same_number(kind, now, expected)
        )
        if kind == "f64" and now is not None and math.isnan(now):
            expected = fits = None  # NaNs differ in bits that the model does not have
        done = self.states[name].compare_and_set(key, expected, desired)
        assert done == bool(fits)
        if done:
            entries[key] = desired

    # ---- Containers

    @rule(data=st.data(), name=st.sampled_from(CONTAINERS))
    def read_container(self, data: st.DataObject, name: str) -> None:
        state, key = self.states[name], data.draw(key_of(name), "key")
        path = draw_path(data, self.model[name].get(key))
        try:
            tree = read_tree(self.model[name].get(key), [pack(step) for step in path])
        except Missing:
            tree = None
        except BadPath:
            expect_path_error(lambda: state.get(key, tuple(path)))
            return
        steps = tuple(path)
        map_key = pack(data.draw(MAP_KEYS, "map key"))
        start, stop = data.draw(POSITIONS, "start"), data.draw(st.none() | POSITIONS, "stop")
        if tree is None:
            assert state.get(key, steps) is None
            assert state.length(key, steps) is None
            assert state.type_of(key, steps) is None
            assert state.slice(key, start, stop, steps) is None
            assert not state.has(key, map_key, steps)
            assert state.keys(key, steps) is None
            assert list(state.pages(key, steps)) == []
            return
        assert state.get(key, steps) == encode_tree(tree)
        if isinstance(tree, list):
            assert state.type_of(key, steps) == "list"
            assert state.length(key, steps) == len(tree)
            assert state.slice(key, start, stop, steps) == encode_tree(tree[start:stop])
            expect_path_error(lambda: state.has(key, map_key, steps))
            expect_path_error(lambda: state.keys(key, steps))
        elif isinstance(tree, dict):
            assert state.type_of(key, steps) == "map"
            assert state.length(key, steps) == len(tree)
            assert state.has(key, map_key, steps) == (map_key in tree)
            assert state.keys(key, steps) == encode_tree(list(tree))
            expect_path_error(lambda: state.slice(key, start, stop, steps))
        else:
            assert state.type_of(key, steps) == "scalar"
            expect_path_error(lambda: state.length(key, steps))
            expect_path_error(lambda: list(state.pages(key, steps)))

    @rule(
        data=st.data(), name=st.sampled_from(CONTAINERS), page=st.sampled_from([1, 2, 7, 64, 999])
    )
    def read_pages(self, data: st.DataObject, name: str, page: int) -> None:
        """Every element once; or, if the container changes its size meanwhile, an error."""
        state, key = self.states[name], data.draw(key_of(name), "key")
        path = draw_path(data, self.model[name].get(key), 1)
        try:
            tree = read_tree(self.model[name].get(key), [pack(step) for step in path])
        except (Missing, BadPath):
            return
        if isinstance(tree, bytes):
            return
        width = 1 + isinstance(tree, dict)
        counts, bodies = [], []
        pages = state.pages(key, tuple(path), page)
        changes = data.draw(st.booleans(), "changes")
        for packed in pages:
            count, body = array_body(packed)
            counts.append(count)
            bodies.append(body)
            if changes and isinstance(tree, list):
                self.write(name, key, "append", path, None, b"\x00")
            elif changes:
                self.write(name, key, "set", [*path, f"new{len(counts)}"], None, b"\x00")
            if changes:
                break
        if changes and tree:
            try:
                assert next(pages, None) is None
            except ChangedDuringIterationError:
                assert 0 < sum(counts) <= len(tree) * width
                return
        assert sum(counts) == len(tree) * width
        whole = encode_tree(list(tree) if width == 1 else [x for kv in tree.items() for x in kv])
        assert b"".join(bodies) == array_body(whole)[1]

    def write(
        self, name: str, key: Any, op: str, path: list[Any], shape: str | None, arg: Tree = b"",
        i: int = 0, j: int = 0,
    ) -> None:  # fmt: skip
        """One write to the model and to the store, with equal outcome."""
        kind, state, entries = SPECS[name][0], self.states[name], self.model[name]
        default = {"list": "l", "map": "m", "nested": ""}[kind]
        takes_shape = op in ("set", "append", "extend", "insert", "update")
        levels = default if shape is None or not takes_shape else shape
        steps = tuple(path)
        edit = Edit(op, [pack(step) for step in path], levels, arg, i, j)
        packed = encode_tree(arg)
        call: dict[str, Callable[[], Any]] = {
            "set": lambda: state.set(key, steps, packed, shape),
            "delete": lambda: state.delete_at(key, steps),
            "append": lambda: state.append(key, packed, steps, shape),
            "extend": lambda: state.extend(key, packed, steps, shape),
            "insert": lambda: state.insert(key, i, packed, steps, shape),
            "pop": lambda: state.pop(key, i, steps),
            "splice": lambda: state.splice(key, i, j, packed, steps),
            "update": lambda: state.update(key, packed, steps, shape),
            "take": lambda: state.take(key, packed, steps),
            "clear": lambda: state.clear(key, steps),
        }
        refused: Any = None
        try:
            if op == "set" and not path:
                new = arg
                if not fits_kind(kind, new):
                    raise BadValue
            elif op == "delete" and not path:
                if key not in entries:
                    raise Missing
                new = None
            else:
                new = write_tree(kind, entries.get(key), edit)
        except Missing:
            assert not call[op]()
            return
        except BadPath:
            refused = PathError
        except BadValue:
            refused = BadValueError
        if refused is not None:
            try:
                got = call[op]()
            except refused:
                return
            raise AssertionError(f"{refused.__name__} expected, got {got!r}")
        got = call[op]()
        assert got == (edit.taken if op in ("pop", "take") else True)
        if new is None:
            del entries[key]
        else:
            entries[key] = new

    @rule(
        data=st.data(),
        name=st.sampled_from(CONTAINERS),
        op=st.sampled_from(
            [
                *["set", "delete", "append", "extend", "insert", "pop", "splice", "update"],
                *["take", "clear", "append", "extend", "update", "set"],
            ]
        ),
        shape=st.sampled_from([None, None, "", "l", "m", "ml", "mm", "mml", "mmm", "lm"]),
        i=POSITIONS,
        j=POSITIONS,
    )
    def write_container(
        self, data: st.DataObject, name: str, op: str, shape: str | None, i: int, j: int
    ) -> None:
        key = data.draw(key_of(name), "key")
        path = draw_path(data, self.model[name].get(key))
        args: dict[str, st.SearchStrategy[Tree]] = {
            "set": TREES,
            "append": TREES,
            "insert": TREES,
            "extend": LISTS.map(tree_of) | TREES,
            "splice": LISTS.map(tree_of) | TREES,
            "update": MAPS.map(tree_of) | TREES,
            "take": MAP_KEYS.map(pack),
        }
        arg = data.draw(args[op], "arg") if op in args else b""
        self.write(name, key, op, path, shape, arg, i, j)

    # ---- Batches

    @rule(data=st.data(), name=st.sampled_from(list(SPECS)))
    def get_many(self, data: st.DataObject, name: str) -> None:
        keys = data.draw(keys_of(name), "keys")
        kind, state, entries = SPECS[name][0], self.states[name], self.model[name]
        found = [key in entries for key in keys]
        assert list(map(bool, state.contains_many(as_keys(data, name, keys)))) == found
        got = state.get_many(as_keys(data, name, keys)).to_list()
        assert len(got) == len(keys)
        for key, value in zip(keys, got, strict=True):
            if value is None or key not in entries:
                assert value is None
                assert key not in entries
            elif kind in ("i64", "f64"):
                assert same_number(kind, value, entries[key])
            else:
                assert value == encode_value(kind, entries[key])

    @rule(data=st.data(), name=st.sampled_from(list(SPECS)))
    def put_many(self, data: st.DataObject, name: str) -> None:
        keys = data.draw(keys_of(name), "keys")
        kind, state, entries = SPECS[name][0], self.states[name], self.model[name]
        choice = data.draw(st.lists(value_of(name), min_size=1, max_size=4), "values")
        values = [choice[at % len(choice)] for at in range(len(keys))]
        if kind in ("i64", "f64"):
            column = as_column(data, kind[0], values)
        else:
            column = as_column(data, "b", [encode_value(kind, value) for value in values])
        state.put_many(as_keys(data, name, keys), column)
        entries.update(zip(keys, values, strict=True))

    @rule(data=st.data(), name=st.sampled_from(list(SPECS)))
    def delete_many(self, data: st.DataObject, name: str) -> None:
        keys, entries = data.draw(keys_of(name), "keys"), self.model[name]
        there = [entries.pop(key, None) is not None for key in keys]
        assert list(map(bool, self.states[name].delete_many(as_keys(data, name, keys)))) == there

    @rule(data=st.data(), name=st.sampled_from(NUMBERS), returning=st.booleans())
    def add_many(self, data: st.DataObject, name: str, returning: bool) -> None:
        kind, state, entries = SPECS[name][0], self.states[name], self.model[name]
        keys = data.draw(keys_of(name), "keys")
        small = st.integers(-5, 5) if kind == "i64" else FLOATS
        choice = data.draw(st.lists(small, min_size=1, max_size=4), "amounts")
        initial = data.draw(st.sampled_from([0, 0, 3]), "initial")
        amounts = [choice[at % len(choice)] for at in range(len(keys))]
        one = data.draw(st.booleans(), "one amount")
        if one:
            amounts = choice[:1] * len(keys)
        after, sums = dict(entries), []
        for key, amount in zip(keys, amounts, strict=True):
            total = add(kind, after.get(key, initial), amount)
            if total is None:
                return  # test_boundaries.py tests where a failing batch stops
            after[key] = total
            sums.append(total)
        source = amounts[0] if one and amounts else as_column(data, kind[0], amounts)
        got = state.add_many(
            as_keys(data, name, keys), source, initial=initial, returning=returning
        )
        assert (got is not None) == returning
        if got is not None:
            assert all(same_number(kind, a, b) for a, b in zip(got, sums, strict=True))
        entries.update(after)

    @rule(data=st.data(), raw=st.booleans())
    def append_many(self, data: st.DataObject, raw: bool) -> None:
        name = "list by str"
        entries, keys = self.model[name], data.draw(keys_of(name), "keys")
        letter = data.draw(st.sampled_from("sbif"), "letter")
        column, trees = self.elements(data, letter, raw, len(keys))
        self.states[name].append_many(as_keys(data, name, keys), column, raw=raw)
        for key, tree in zip(keys, trees, strict=True):
            entries[key] = [*entries.get(key, []), tree]

    @rule(data=st.data(), raw=st.booleans())
    def map_put_many(self, data: st.DataObject, raw: bool) -> None:
        name = "map by int"
        entries, keys = self.model[name], data.draw(keys_of(name), "keys")
        letters = data.draw(st.tuples(st.sampled_from("sif"), st.sampled_from("sbif")), "letters")
        map_keys, names = self.elements(data, letters[0], raw, len(keys))
        column, trees = self.elements(data, letters[1], raw, len(keys))
        self.states[name].map_put_many(as_keys(data, name, keys), map_keys, column, raw=raw)
        for key, member, tree in zip(keys, names, trees, strict=True):
            entries[key] = {**entries.get(key, {}), member: tree}

    def elements(
        self, data: st.DataObject, letter: str, raw: bool, count: int
    ) -> tuple[Any, list[Tree]]:
        """A column of elements of containers, and what they are."""
        choices: dict[str, st.SearchStrategy[Any]] = {
            "s": st.sampled_from(["", "a", "é", "s" * 31, "s" * 40, "w" * 300]),
            "b": BLOBS if raw else TREES,
            "i": INTS,
            "f": st.sampled_from([0.0, -2.5, math.inf]),
        }
        choice = data.draw(st.lists(choices[letter], min_size=1, max_size=3), "elements")
        items = [choice[at % len(choice)] for at in range(count)]
        if letter == "b" and not raw:
            return as_column(data, "b", [encode_tree(item) for item in items]), items
        return as_column(data, letter, items), [pack(item) for item in items]

    # ---- Leaves

    @rule(data=st.data(), name=st.sampled_from(list(SPECS)))
    def clear(self, data: st.DataObject, name: str) -> None:
        start, stop = self.draw_leaves(data)
        self.store.clear(self.states[name], start, stop)
        for key in [key for key in self.model[name] if start <= self.leaf(name, key) < stop]:
            del self.model[name][key]

    def draw_leaves(self, data: st.DataObject) -> tuple[int, int]:
        """All leaves, half of them, or a few."""
        leaves = self.store.leaves
        start = data.draw(st.sampled_from([0, 0, leaves // 2, leaves - 1]), "start")
        stop = data.draw(st.sampled_from([leaves, leaves, leaves // 2, start]), "stop")
        return start, max(start, stop)

    def leaf(self, name: str, key: Any) -> int:
        return leaf_of(SPECS[name][1], key, *self.geometry)

    @rule()
    def encode_and_decode_elsewhere(self) -> None:
        other = self.new_store()
        for leaf in range(self.store.leaves):
            blocks = self.store.encode_leaf(leaf)
            if blocks:
                other.decode_leaf(leaf, blocks)
                assert other.residency(leaf) == "whole"
        self.expect_equal_bytes(other)

    @rule(random=st.randoms(use_true_random=False))
    def same_content_gives_same_bytes(self, random: Any) -> None:
        """Whatever the order of insertion, and whatever was there before."""
        other = self.new_store()
        states = declare(other)
        entries = [(name, key) for name in SPECS for key in self.model[name]]
        random.shuffle(entries)
        for name in SPECS:  # entries that come and go leave no trace
            for key in _POOLS[CODECS[name].text]:
                if key not in self.model[name]:
                    states[name].put_encoded(key, self.encoded_default(name))
                    states[name].delete(key)
        for name, key in entries:
            value = self.model[name][key]
            states[name].put_encoded(key, encode_value(SPECS[name][0], value))
        self.expect_equal_bytes(other)

    def encoded_default(self, name: str) -> bytes:
        return {"list": b"\x90", "map": b"\x80", "nested": b"\xc0"}.get(SPECS[name][0], bytes(8))

    def expect_equal_bytes(self, other: Store) -> None:
        mine, theirs = blocks_by_state(self.store), blocks_by_state(other)
        if not any(math.isnan(value) for value in self.model["f64 by bytes"].values()):
            assert mine == theirs
        assert image_of_store(other) == image_of_model(self.model)

    @rule(data=st.data(), stay=st.booleans())
    def detach_and_attach(self, data: st.DataObject, stay: bool) -> None:
        """Leaves go to another store and back, or (all of them) stay there."""
        start, stop = self.draw_leaves(data)
        used = self.store.bytes_used
        leaves = self.store.detach(start, stop)
        assert len(leaves) == stop - start
        for name in SPECS:
            for key in self.model[name]:
                if start <= self.leaf(name, key) < stop:
                    with pytest.raises(NotOwnedError):
                        self.states[name].contains(key)
        other = self.new_store()
        other.attach(leaves)
        assert self.store.bytes_used + other.bytes_used == used
        mine, theirs = image_of_model(self.model), image_of_store(other)
        for name in SPECS:
            there = {
                key: mine[name][key]
                for key in mine[name]
                if start <= leaf_of(SPECS[name][1], CODECS[name].decode(key), *self.geometry) < stop
            }
            assert theirs[name] == there
        if stay and (start, stop) == (0, self.store.leaves):
            self.use(other)
            self.replica = None
        else:
            self.store.attach(other.detach(start, stop))
            assert self.store.bytes_used == used

    # ---- Snapshots

    @precondition(lambda self: len(self.snapshots) < 4)
    @rule()
    def open_snapshot(self) -> None:
        then = image_of_model(self.model)
        self.snapshots.append((self.store.snapshot(), {name: {} for name in SPECS}, then))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), leaves=st.sampled_from([0, 1, 2, 5, 10**9, 10**9]))
    def read_snapshot(self, data: st.DataObject, leaves: int) -> None:
        at = data.draw(st.integers(0, len(self.snapshots) - 1), "snapshot")
        snapshot, image, then = self.snapshots[at]
        for _ in range(leaves):
            page = next(snapshot, None)
            if page is None:
                assert image == then
                snapshot.close()
                del self.snapshots[at]
                return
            apply_blocks(image, page[1])

    @precondition(lambda self: self.snapshots)
    @rule()
    def drop_snapshot(self) -> None:
        self.snapshots.pop(0)[0].close()

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        """A base and the deltas over it give the store as it was when each snapshot was opened."""
        store, since = self.store, None
        if self.replica is None:
            self.replica = self.new_store()
        else:
            changed = store.changed_leaves(self.replica_epoch)
            since = data.draw(st.sampled_from(["all", "each"]), "since")
            epochs: Any = self.replica_epoch
            if since == "each":  # unchanged leaves need nothing; some leaves are taken whole
                epochs = [self.replica_epoch] * store.leaves
                epochs[0] = 0
        with store.snapshot(since=epochs if since else None) as snapshot:
            then = image_of_model(self.model)
            if self.tracks:
                store.track(snapshot.epoch)
            for _ in range(data.draw(st.integers(0, 2), "writes")):  # they must not be in it
                self.put(data, data.draw(st.sampled_from(list(SPECS)), "name"))
            if since == "each":
                self.replica.decode_leaf(0, b"", "replace")
            for leaf, blocks in snapshot:
                assert since != "all" or changed[leaf]
                self.replica.decode_leaf(leaf, blocks, "over" if since else "replace")
            self.replica_epoch = snapshot.epoch
        assert image_of_store(self.replica) == then
        assert self.replica.stats().tombstones == 0

    # ---- Always

    @invariant()
    def counts_agree(self) -> None:
        for name, state in self.states.items():
            assert self.store.stats(state).entries == len(self.model[name]), name
        stats = self.store.stats()
        assert stats.bytes == self.store.bytes_used
        assert stats.whole == self.store.leaves
        assert stats.dirty <= stats.entries + stats.tombstones
        if not self.tracks:
            assert stats.tombstones == 0

    @invariant()
    def contents_agree(self) -> None:
        self.turn += 1
        if self.store.leaves <= SMALL or self.turn % 10 == 0:
            assert image_of_store(self.store) == image_of_model(self.model)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.compare_at_the_end()
        finally:
            for snapshot, _, _ in self.snapshots:
                snapshot.close()

    def compare_at_the_end(self) -> None:
        for snapshot, image, then in self.snapshots:
            for _, blocks in snapshot:
                apply_blocks(image, blocks)
            assert image == then
            snapshot.close()
        assert image_of_store(self.store) == image_of_model(self.model)
        for name, state in self.states.items():
            entries = self.model[name]
            found = {state.codec.decode(key): value for key, value in self.store.scan(state)}
            assert found.keys() == entries.keys()
            self.store.clear(state)
            assert self.store.stats(state)[:3] == (0, 0, 0)
        self.store.mark(0, self.store.leaves, "absent")  # empty tables may have kept their slots
        assert self.store.bytes_used == 0


def blocks_by_state(store: Store) -> dict[tuple[int, str], bytes]:
    """Every block of a store; the order of states in a leaf is that of their declaration."""
    found = {}
    for leaf in range(store.leaves):
        blocks = store.encode_leaf(leaf)
        for block in Block.each(blocks):
            found[leaf, block.name] = bytes(block._data)
    return found


def expect_path_error(call: Callable[[], Any]) -> None:
    try:
        got = call()
    except PathError:
        return
    raise AssertionError(f"PathError expected, got {got!r}")


def is_unknown(call: Callable[[], Any]) -> bool:
    try:
        call()
    except UnknownEntryError:
        return True
    return False


TestStore = StoreMachine.TestCase
TestStore.settings = settings(stateful_step_count=80)


# ---- Homes


class HomeMachine(RuleBasedStateMachine):
    """Leaves that are absent or partial, and a home (dicts) that has what is not in memory.

    The machine plays the provider: if the store says "unknown", it asks the home, one key or the
    whole leaf at a time, and tries again. Changes go home by write-back, which may fail, even after
    the home has taken them. Clean entries are evicted. Memory over home must equal the model.
    """

    store: Store
    NAMES = ("i64 by str", "f64 by bytes", "bytes by tuple", "list by str", "map by int",
             "nested by bytes")  # fmt: skip

    @initialize(
        geometry=st.sampled_from([(1, 1), (1, 2), (4, 4)]),
        data=st.data(),
        start=st.sampled_from(["absent", "partial", "whole"]),
    )
    def open(self, geometry: tuple[int, int], data: st.DataObject, start: Any) -> None:
        self.geometry = geometry
        self.model: dict[str, dict[Any, Any]] = {name: {} for name in SPECS}
        self.home: Image = {name: {} for name in SPECS}
        self.late: list[tuple[int, bytes]] = []  # earlier answers of the home about a leaf
        self.writing: dict[int, bytes] = {}  # leaf -> delta blocks taken and not confirmed
        self.snapshots: list[tuple[Any, Image, Image]] = []  # snapshot, home then, model then
        for name in self.NAMES if start != "whole" else ():
            for key in data.draw(st.lists(key_of(name), max_size=8), "keys at home"):
                self.model[name][key] = data.draw(value_of(name), "value at home")
        self.home = image_of_model(self.model)
        self.use(Store(*geometry))
        self.store.mark(0, self.store.leaves, start)

    def use(self, store: Store) -> None:
        self.store = store
        self.states = declare(store)
        store.write_back()

    def leaf(self, name: str, key: Any) -> int:
        return leaf_of(SPECS[name][1], key, *self.geometry)

    # ---- What a provider does

    def home_blocks(self, leaf: int) -> bytes:
        """All that the home has of a leaf."""
        helper = Store(*self.geometry)
        states = declare(helper)
        for name, entries in self.home.items():
            for encoded, value in entries.items():
                key = CODECS[name].decode(encoded)
                if self.leaf(name, key) == leaf:
                    states[name].put_encoded(key, value)
        return helper.encode_leaf(leaf)

    def fetch(self, name: str, key: Any, how: str) -> None:
        """Asks the home for one key; how: that entry alone, or its whole leaf."""
        leaf = self.leaf(name, key)
        if how in ("under", "under_all"):
            self.store.decode_leaf(leaf, self.home_blocks(leaf), how)  # type: ignore[arg-type]
        if how != "under_all":
            encoded = CODECS[name].encode(key)
            self.states[name].install(key, self.home[name].get(encoded))

    def ask(self, data: st.DataObject, name: str, key: Any, call: Callable[[], Any]) -> Any:
        """Calls; if the answer is not here, asks the home and calls again."""
        try:
            return call()
        except UnknownEntryError as error:
            unknown = error
        assert unknown.keys == (key,)
        assert self.store.residency(self.leaf(name, key)) != "whole"
        how = data.draw(st.sampled_from(["install", "install", "under", "under_all"]), "fetch")
        self.fetch(name, key, how)
        return call()

    # ---- One key

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def get(self, data: st.DataObject, name: str) -> None:
        key, state = data.draw(key_of(name), "key"), self.states[name]
        kind, value = SPECS[name][0], self.model[name].get(key)
        got = self.ask(data, name, key, lambda: state.get_encoded(key))
        if kind == "f64" and got is not None:
            got = encode_number(kind, state.get(key))
        assert got == (None if value is None else encode_value(kind, value))
        assert state.contains(key) == (value is not None)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def put(self, data: st.DataObject, name: str) -> None:
        """Needs no home: what is put is newer."""
        key, value = data.draw(key_of(name), "key"), data.draw(value_of(name), "value")
        self.states[name].put_encoded(key, encode_value(SPECS[name][0], value))
        self.model[name][key] = value

    @rule(data=st.data(), name=st.sampled_from(NAMES), blind=st.booleans())
    def delete(self, data: st.DataObject, name: str, blind: bool) -> None:
        key, state = data.draw(key_of(name), "key"), self.states[name]
        was = self.model[name].pop(key, None) is not None
        if blind:
            state.delete(key, blind=True)
        else:
            assert self.ask(data, name, key, lambda: state.delete(key)) == was

    @rule(data=st.data(), name=st.sampled_from(["i64 by str", "f64 by bytes"]))
    def fold(self, data: st.DataObject, name: str) -> None:
        kind, state, entries = SPECS[name][0], self.states[name], self.model[name]
        key, value = data.draw(key_of(name), "key"), data.draw(value_of(name), "value")
        total = add(kind, entries.get(key, 0), value)
        expected = data.draw(st.none() | value_of(name), "expected")
        now = entries.get(key)
        if total is not None:
            got = self.ask(data, name, key, lambda: state.add(key, value))
            assert same_number(kind, got, total)
            entries[key] = got
        elif kind == "i64":
            done = self.ask(data, name, key, lambda: state.compare_and_set(key, expected, value))
            assert done == (now == expected)
            if done:
                entries[key] = value

    @rule(
        data=st.data(),
        name=st.sampled_from(["list by str", "map by int", "nested by bytes"]),
        op=st.sampled_from(["append", "pop", "set", "take", "clear", "length"]),
    )
    def edit(self, data: st.DataObject, name: str, op: str) -> None:
        kind, state, entries = SPECS[name][0], self.states[name], self.model[name]
        key, arg = data.draw(key_of(name), "key"), data.draw(TREES, "arg")
        steps = ("a",) if op == "set" else ()
        if op == "take":
            arg = pack("a")
        shape = {"list": "l", "map": "m", "nested": "m" if op == "set" else "l"}[kind]
        default = {"list": "l", "map": "m", "nested": ""}[kind]
        packed = encode_tree(arg)
        calls: dict[str, Callable[[], Any]] = {
            "append": lambda: state.append(key, packed, (), shape),
            "pop": lambda: state.pop(key),
            "set": lambda: state.set(key, steps, packed, shape),
            "take": lambda: state.take(key, packed),
            "clear": lambda: state.clear(key),
            "length": lambda: state.length(key),
        }
        tree = entries.get(key)
        if op == "length":
            if not isinstance(tree, bytes):
                got = self.ask(data, name, key, calls[op])
                assert got == (None if tree is None else len(tree))
            return
        edit = Edit(op, [pack(step) for step in steps],
                    shape if op in ("append", "set") else default, arg, -1)  # fmt: skip
        try:
            new = write_tree(kind, tree, edit)
        except Missing:
            assert not self.ask(data, name, key, calls[op])
        except (BadPath, BadValue):
            try:
                got = self.ask(data, name, key, calls[op])
            except (PathError, BadValueError):
                return
            raise AssertionError(f"an error expected, got {got!r}") from None
        else:
            assert self.ask(data, name, key, calls[op]) == (edit.taken or True)
            entries[key] = new

    # ---- Batches

    def redo(
        self, data: st.DataObject, name: str, keys: list[Any], call: Callable[[list[int]], Any]
    ) -> dict[int, Any]:
        """Runs a batch, asks the home for what is unknown, and runs that again. Results by record.

        call: takes the numbers of the records to run, gives one result for each."""
        results: dict[int, Any] = {}
        todo = list(range(len(keys)))
        for _ in range(2):
            try:
                got, unknown, names, statuses = call(todo), [], (), b""
            except UnknownEntryError as error:
                got, unknown = error.result, list(error.records)
                names, statuses = error.keys, error.statuses
            assert [keys[todo[record]] for record in unknown] == list(names)
            assert [record for record, status in enumerate(statuses) if status == 2] == unknown
            got = got.to_list() if hasattr(got, "to_list") else list(got or [None] * len(todo))
            skipped = set(unknown)
            results.update((todo[at], value) for at, value in enumerate(got) if at not in skipped)
            todo = [todo[record] for record in unknown]
            for key in {keys[record]: None for record in todo}:
                how = data.draw(st.sampled_from(["install", "under_all"]), "fetch")
                self.fetch(name, key, how)
        assert not todo
        return results

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def get_many(self, data: st.DataObject, name: str) -> None:
        kind, state, entries = SPECS[name][0], self.states[name], self.model[name]
        keys = data.draw(st.lists(key_of(name), max_size=12), "keys")
        got = self.redo(data, name, keys, lambda todo: state.get_many([keys[r] for r in todo]))
        for record, value in got.items():
            key = keys[record]
            if key not in entries or value is None:
                assert value is None
                assert key not in entries
            elif kind in ("i64", "f64"):
                assert same_number(kind, value, entries[key])
            else:
                assert value == encode_value(kind, entries[key])
        found = state.contains_many(keys)  # by now all is known
        assert [bool(there) for there in found] == [key in entries for key in keys]

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def put_many(self, data: st.DataObject, name: str) -> None:
        kind, state, entries = SPECS[name][0], self.states[name], self.model[name]
        keys = data.draw(st.lists(key_of(name), max_size=12), "keys")
        values = [data.draw(value_of(name), "value") for _ in keys[:3]]
        column = [values[at % len(values)] for at in range(len(keys))]
        entries.update(zip(keys, column, strict=True))
        if kind not in ("i64", "f64"):
            column = [encode_value(kind, value) for value in column]
        state.put_many(keys, column)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def delete_many(self, data: st.DataObject, name: str) -> None:
        state, entries = self.states[name], self.model[name]
        keys = data.draw(st.lists(key_of(name), max_size=12), "keys")
        got = self.redo(data, name, keys, lambda todo: state.delete_many([keys[r] for r in todo]))
        for record, key in enumerate(keys):
            assert bool(got[record]) == (entries.pop(key, None) is not None)

    @rule(data=st.data())
    def add_many(self, data: st.DataObject) -> None:
        name = "i64 by str"
        state, entries = self.states[name], self.model[name]
        keys = data.draw(st.lists(key_of(name), max_size=12), "keys")
        amounts = [at - 3 for at in range(len(keys))]
        if any(abs(entries.get(key, 0)) > 2**62 for key in keys):
            return
        got = self.redo(
            data, name, keys,
            lambda todo: state.add_many(
                [keys[r] for r in todo], [amounts[r] for r in todo], returning=True
            ),
        )  # fmt: skip
        for record, key in enumerate(keys):
            entries[key] = entries.get(key, 0) + amounts[record]
            assert got[record] == entries[key]

    @rule(data=st.data())
    def append_many(self, data: st.DataObject) -> None:
        name = "list by str"
        state, entries = self.states[name], self.model[name]
        keys = data.draw(st.lists(key_of(name), max_size=12), "keys")
        self.redo(
            data, name, keys,
            lambda todo: state.append_many([keys[r] for r in todo], todo),
        )  # fmt: skip
        for record, key in enumerate(keys):
            entries[key] = [*entries.get(key, []), pack(record)]

    @rule(data=st.data())
    def map_put_many(self, data: st.DataObject) -> None:
        name = "map by int"
        state, entries = self.states[name], self.model[name]
        keys = data.draw(st.lists(key_of(name), max_size=12), "keys")
        self.redo(
            data, name, keys,
            lambda todo: state.map_put_many([keys[r] for r in todo], [r % 3 for r in todo], todo),
        )  # fmt: skip
        for record, key in enumerate(keys):
            entries[key] = {**entries.get(key, {}), pack(record % 3): pack(record)}

    # ---- Leaves

    def draw_leaf(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, self.store.leaves - 1), "leaf")

    @rule(data=st.data(), mode=st.sampled_from(["under", "under_all"]))
    def load(self, data: st.DataObject, mode: Any) -> None:
        leaf = self.draw_leaf(data)
        self.store.decode_leaf(leaf, self.home_blocks(leaf), mode)

    @rule(data=st.data())
    def ask_and_get_no_answer_yet(self, data: st.DataObject) -> None:
        leaf = self.draw_leaf(data)
        self.late.append((leaf, self.home_blocks(leaf)))

    @precondition(lambda self: self.late)
    @rule(mode=st.sampled_from(["under", "under_all"]))
    def a_late_answer_changes_nothing_in_a_whole_leaf(self, mode: Any) -> None:
        """An old answer of the home must not bring back what was deleted meanwhile."""
        leaf, blocks = self.late.pop(0)
        if self.store.residency(leaf) != "whole":
            return  # a provider drops answers that were overtaken by a later question
        before = self.store.encode_leaf(leaf)
        self.store.decode_leaf(leaf, blocks, mode)
        for name, encoded, value in entries_of(blocks):
            self.states[name].install(CODECS[name].decode(encoded), value)
        assert self.store.encode_leaf(leaf) == before

    @rule(data=st.data())
    def take_dirty(self, data: st.DataObject) -> None:
        leaf = self.draw_leaf(data)
        if leaf in self.writing:
            return
        blocks = self.store.dirty_take(leaf)
        assert all(block.is_delta for block in Block.each(blocks))
        if blocks:
            self.writing[leaf] = blocks

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), arrives=st.booleans(), confirmed=st.booleans())
    def end_writing(self, data: st.DataObject, arrives: bool, confirmed: bool) -> None:
        """Confirmed only if it arrived; it may also arrive and not be confirmed."""
        leaf = data.draw(st.sampled_from(sorted(self.writing)), "leaf")
        self.finish(leaf, arrives, confirmed and arrives)

    def finish(self, leaf: int, arrives: bool, confirmed: bool) -> None:
        blocks = self.writing.pop(leaf)
        if arrives:
            apply_blocks(self.home, blocks)
        self.store.dirty_done(leaf, confirmed)

    def flush(self, leaf: int) -> None:
        if leaf in self.writing:
            self.finish(leaf, True, True)
        blocks = self.store.dirty_take(leaf)
        if blocks:
            self.writing[leaf] = blocks
            self.finish(leaf, True, True)
        assert self.store.stats(None, leaf, leaf + 1).dirty == 0

    @rule(wanted=st.sampled_from([0, 1, 100, 2000, 10**9]))
    def evict(self, wanted: int) -> None:
        before = self.store.bytes_used
        freed = self.store.evict(wanted)
        assert self.store.bytes_used == before - freed

    @rule(data=st.data(), residency=st.sampled_from(["absent", "partial"]))
    def unload(self, data: st.DataObject, residency: Any) -> None:
        """A clean leaf may be dropped. Thanks to tombstones, a leaf may become partial any time."""
        leaf = self.draw_leaf(data)
        if residency == "absent":
            self.flush(leaf)
        elif self.store.residency(leaf) == "absent":
            return
        self.store.mark(leaf, leaf + 1, residency)

    @rule(data=st.data(), name=st.sampled_from(NAMES), blind=st.booleans())
    def clear(self, data: st.DataObject, name: str, blind: bool) -> None:
        """If a leaf is whole, write-back tells the home; else the home must be cleared, too."""
        leaf = self.draw_leaf(data)
        is_whole = self.store.residency(leaf) == "whole"
        if not blind and not is_whole:
            assert is_unknown(lambda: self.store.clear(self.states[name], leaf, leaf + 1))
            return
        if leaf in self.writing and not is_whole:
            self.finish(leaf, True, True)
        self.store.clear(self.states[name], leaf, leaf + 1, blind=blind)
        for key in [key for key in self.model[name] if self.leaf(name, key) == leaf]:
            del self.model[name][key]
        for encoded in list(self.home[name]) if not is_whole else ():
            if self.leaf(name, CODECS[name].decode(encoded)) == leaf:
                del self.home[name][encoded]

    @rule(arrive=st.booleans())
    def move(self, arrive: bool) -> None:
        """All leaves go to another store. Nobody confirms what is being written at that time."""
        other = Store(*self.geometry)
        leaves = self.store.detach(0, self.store.leaves)
        for blocks in self.writing.values():
            if arrive:
                apply_blocks(self.home, blocks)
        self.writing = {}
        other.attach(leaves)
        self.use(other)

    @precondition(lambda self: len(self.snapshots) < 2)
    @rule()
    def open_snapshot(self) -> None:
        home = self.home_of_leaves_that_are_not_whole()
        self.snapshots.append((self.store.snapshot(), home, image_of_model(self.model)))

    def home_of_leaves_that_are_not_whole(self) -> Image:
        """What the home has of leaves that are not whole: the rest of its rows does not count."""
        whole = [self.store.residency(leaf) == "whole" for leaf in range(self.store.leaves)]
        return {
            name: {
                key: value
                for key, value in entries.items()
                if not whole[self.leaf(name, CODECS[name].decode(key))]
            }
            for name, entries in self.home.items()
        }

    @precondition(lambda self: self.snapshots)
    @rule()
    def read_snapshot(self) -> None:
        """A snapshot over the home as it was then is the model as it was then."""
        snapshot, home, then = self.snapshots.pop(0)
        with snapshot:
            for _, blocks in snapshot:
                apply_blocks(home, blocks)
        assert home == then

    # ---- Always

    @invariant()
    def memory_over_home_is_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        image = self.home_of_leaves_that_are_not_whole()
        for leaf in range(self.store.leaves):
            blocks = self.store.encode_leaf(leaf)
            if self.store.residency(leaf) == "absent":
                assert not blocks
            apply_blocks(image, blocks)
        model = image_of_model(self.model)
        assert image == model
        if self.store.stats().dirty == 0 and not self.writing:
            assert self.home == model

    @invariant()
    def figures_agree(self) -> None:
        if hasattr(self, "store"):
            stats = self.store.stats()
            assert stats.bytes == self.store.bytes_used
            assert stats.dirty <= stats.entries + stats.tombstones
            assert stats.whole + stats.partial + stats.absent == self.store.leaves

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            for leaf in range(self.store.leaves):
                self.flush(leaf)
            assert self.home == image_of_model(self.model)
            self.store.evict(10**9)
            assert self.store.stats()[:3] == (0, 0, 0)
            self.store.mark(0, self.store.leaves, "absent")
            assert self.store.bytes_used == 0
        finally:
            for snapshot, _, _ in self.snapshots:
                snapshot.close()


TestHome = HomeMachine.TestCase
TestHome.settings = settings(stateful_step_count=80)
