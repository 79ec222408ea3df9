"""The bases in C (csrc/py.h, statekit/_fast.py) do what the methods in Python do, to the letter.

Each operation is done twice: through C on one provider, and by the class in Python on another. The
answers, the exceptions and their messages, and what is stored must be the same.
"""

import copy
import enum
import gc
import inspect
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statekit as sk
from statekit import _fast
from statekit._native import lib
from statekit.codecs import make_codec
from statekit.errors import ClosedError, KindError, NotOwnedError, StateKitError
from statekit.kinds import KINDS
from statekit.state import containers, fast, value, views

I64_MAX = 2**63 - 1


class Text(str):
    """A subclass: C leaves it to Python."""

    __slots__ = ()


class Whole(int):
    pass


class Color(enum.Enum):
    RED = "red"


@dataclass
class Click:
    url: str
    at: int


@dataclass
class Odd(Click):
    more: int = 0


class Pair(NamedTuple):
    a: int
    b: str


SLOW: dict[type, type] = {
    fast.ValueState: value.ValueState,
    fast.NumberValueState: value.NumberValueState,
    fast.ListState: containers.ListState,
    fast.MapState: containers.MapState,
    fast.SetState: containers.SetState,
    fast.ListView: views.ListView,
    fast.MapView: views.MapView,
    fast.SetView: views.SetView,
}


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, in a form that shows the class of numbers and tells -0.0 from 0.0."""
    try:
        found = call()
        if isinstance(found, views.View):
            found = found.copy()
    except Exception as error:
        return type(error), str(error)
    return type(found), shown(found)


def shown(found: Any) -> str:
    """The order of a set depends on where its NaN is in memory."""
    return repr(sorted(map(repr, found)) if isinstance(found, set) else found)


def slow(target: Any, name: str) -> Any:
    """The method in Python of an object that has one in C."""
    return getattr(SLOW[type(target)], name).__get__(target)


def same(quick: Any, plain: Any, name: str, *args: Any, **named: Any) -> Any:
    """Does an operation on two objects that stand for the same, in the two ways."""
    one = outcome(lambda: getattr(quick, name)(*args, **named))
    other = outcome(lambda: slow(plain, name)(*args, **named))
    assert one == other, (name, args, named)
    return one


# ---- Keys and values that fit, that nearly fit, and that do not

TEXTS = st.sampled_from(["", "a", "ключ", "k" * 17, "k" * 40, "k" * 700, "\ud800", "nul\0"])
NUMBERS = st.sampled_from([0, 1, -1, 127, 128, -32, -33, 255, 256, 65535, 65536, 2**31, 2**32,
    -(2**31) - 1, I64_MAX, -I64_MAX - 1, I64_MAX + 1, -I64_MAX - 2, 2**64, 10**30])  # fmt: skip
FLOATS = st.sampled_from([0.0, -0.0, 1.5, math.nan, -math.nan, math.inf, -math.inf, 5e-324])
BYTES = st.sampled_from([b"", b"a", b"b" * 40, b"c" * 300, b"d" * 70_000, bytearray(b"e")])
ODD = st.sampled_from([None, True, False, Text("a"), Whole(5), np.int64(3), np.float64(2.5),
    np.bool_(True), [1], {"a": 1}, {1}, (), ("a",), ("a", 1), ("a", 1, b"b"), ("a", 2**70),
    ("\ud800", 1, b""), ("k" * 400, 1, b"v" * 200), (Text("a"), 1, b""), Color.RED, object,
    Click("u", 1), Odd("u", 1), Click("u", "x"), Click("u", 2**63), Pair(1, "b")])  # type: ignore[arg-type]  # fmt: skip
ANYTHING = TEXTS | NUMBERS | FLOATS | BYTES | ODD

KEY_TYPES: dict[Any, Any] = {
    str: TEXTS,
    bytes: BYTES,
    int: NUMBERS,
    tuple[str, int, bytes]: st.tuples(TEXTS, NUMBERS, BYTES),
}
# Value types, and values that fit.
VALUE_TYPES: dict[Any, Any] = {
    int: NUMBERS,
    float: FLOATS | NUMBERS,
    str: TEXTS | st.just("t" * 70_000),
    bytes: BYTES,
    bool: st.booleans(),
    Click: st.builds(Click, TEXTS, NUMBERS),
    Pair: st.builds(Pair, NUMBERS, TEXTS),
    Any: ANYTHING,
    int | None: NUMBERS | st.none(),
    Annotated[int, msgspec.Meta(ge=0)]: NUMBERS,
    Color: st.just(Color.RED),
    list[int]: st.lists(NUMBERS, max_size=3),
    list[dict[str, float]]: st.lists(
        st.dictionaries(TEXTS, FLOATS | NUMBERS, max_size=2), max_size=2
    ),
    dict[str, bytes]: st.dictionaries(TEXTS, BYTES, max_size=3),
    dict[int, Click]: st.dictionaries(NUMBERS, st.builds(Click, TEXTS, NUMBERS), max_size=2),
    dict[str, Any]: st.dictionaries(TEXTS, NUMBERS, max_size=2),
}
DEFAULTS: dict[Any, Any] = {int: 7, float: -0.0, str: "none", bytes: b"", Click: Click("d", 0)}


def pair_of_providers() -> list[sk.KVProvider]:
    return [sk.open("memory:", key_groups=4, subgroups=2) for _ in range(2)]


def same_change_of_place(data: st.DataObject, kvs: list[sk.KVProvider]) -> None:
    """What happens to leaves in the middle of it all: the same to both providers."""
    step = data.draw(st.sampled_from(["gate", "away", "snapshot", "close", "forget", "open"]))
    for store in [kv._residence.store for kv in kvs]:
        with suppress(NotOwnedError):  # then nothing has changed, in either
            if step in ("gate", "open"):
                store.set_gate(0, 3, "shut" if step == "gate" else "open")
            elif step == "away":
                store.mark(0, 2, "away")
            elif step == "forget":
                store.mark(2, 4, "partial")
        if step == "snapshot":
            store.snapshot()  # stays open until it is collected
    if step == "close":
        for kv in kvs:
            kv.close()


@settings(deadline=None)
@given(st.data())
def test_value_states_do_the_same_in_c_and_in_python(data: st.DataObject) -> None:
    key_type = data.draw(st.sampled_from(list(KEY_TYPES)), "key type")
    hint = data.draw(st.sampled_from(list(VALUE_TYPES)), "type")
    settings_ = {}
    if hint in DEFAULTS and data.draw(st.booleans(), "default"):
        settings_["default"] = DEFAULTS[hint]
    if data.draw(st.booleans(), "ttl"):
        settings_["ttl"] = sk.TTL(1, refresh=data.draw(st.sampled_from(["read", "write"])))
    kvs = pair_of_providers()
    quick, plain = (kv.value("v", hint, key=key_type, **settings_) for kv in kvs)
    assert type(quick) in SLOW
    keys = data.draw(st.lists(KEY_TYPES[key_type] | ANYTHING, min_size=1, max_size=4), "keys")
    names = ["get", "set", "del", "contains", "discard", "drop", "again", "add", "time", "place"]
    names.append("words")
    now = 1_000_000
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        key = data.draw(st.sampled_from(keys), "key")
        name = data.draw(st.sampled_from(names), "step")
        given_ = data.draw(VALUE_TYPES[hint] | ANYTHING, "value")
        if name == "get":
            same(quick, plain, "__getitem__", key)
        elif name == "set":
            same(quick, plain, "__setitem__", key, given_)
        elif name == "del":
            same(quick, plain, "__delitem__", key)
        elif name == "contains":
            same(quick, plain, "__contains__", key)
        elif name in ("discard", "drop"):
            same(quick, plain, name, key)
        elif name == "again":
            same(quick, plain, "get", key)
            same(quick, plain, "get", key, given_)
            same(quick, plain, "get", key, value.NO_DEFAULT)
        elif name == "words":
            same(quick, plain, "get", key=key, default=3)
            same(quick, plain, "discard", key=key)
            same(quick, plain, "drop", key=key)
        elif name == "add":
            same(quick, plain, "add", key)
            same(quick, plain, "add", key, given_)
            same(quick, plain, "add", key=key, amount=2)
        elif name == "time" and quick._ptr is not None:
            now += 600
            for kv in kvs:
                kv._residence.store.set_time("processing", now)
        elif name == "place" and quick._ptr is not None:
            same_change_of_place(data, kvs)
    stored = [
        outcome(lambda s=s: sorted((repr(k), shown(v)) for k, v in s.items()))
        for s in (quick, plain)
    ]
    assert stored[0] == stored[1]
    for kv in kvs:
        kv.close()
    same(quick, plain, "__getitem__", keys[0])
    same(quick, plain, "__setitem__", keys[0], 1)


SHAPES: dict[Any, Any] = {
    list[int]: NUMBERS,
    list[str]: TEXTS,
    list[Click]: st.builds(Click, TEXTS, NUMBERS),
    list[list[int]]: st.lists(NUMBERS, max_size=3),
    dict[str, float]: FLOATS | NUMBERS,
    dict[int, bytes]: BYTES,
    dict[tuple[str, int], int]: NUMBERS,
    dict[str, list[int]]: st.lists(NUMBERS, max_size=3),
    dict[tuple[str, int], dict[str, list[int]]]: st.dictionaries(
        TEXTS, st.lists(NUMBERS, max_size=3), max_size=2
    ),
    list[list[set[int]]]: st.lists(st.sets(NUMBERS, max_size=2), max_size=2),
    dict[str, Any]: ANYTHING,
    set[str]: TEXTS,
    set[float]: FLOATS,
    set[int]: NUMBERS,
}
POSITIONS = st.integers(-4, 70) | NUMBERS | ODD | st.just(slice(0, 2))
WHOLES = st.lists(NUMBERS, max_size=3) | st.dictionaries(TEXTS, NUMBERS, max_size=3)
WHOLES = WHOLES | st.sets(TEXTS, max_size=3) | st.just(list(range(100))) | ODD


def same_below(data: st.DataObject, one: Any, other: Any, item: Any, depth: int) -> None:
    """The views of containers in containers."""
    if depth == 0 or isinstance(one, views.SetView):
        return
    where = data.draw(POSITIONS | TEXTS | st.tuples(TEXTS, NUMBERS), "where below")
    found = []
    for view, way in ((one, one.__getitem__), (other, slow(other, "__getitem__"))):
        try:
            found.append(way(where))
        except Exception:  # it was compared already
            return
        if not isinstance(found[-1], views.View):
            return
        assert isinstance(found[-1]._shape, type(found[0]._shape)), view
    one, other = found
    assert type(one) is type(other)
    places = [(v._key, v._k, v._steps, v._levels) for v in (one, other)]
    assert places[0] == places[1]
    same(one, other, "__len__")
    same(one, other, "copy")
    if isinstance(one, views.ListView):
        same(one, other, "append", item)
        same(one, other, "__getitem__", -1)
    elif isinstance(one, views.MapView):
        same(one, other, "__setitem__", where, item)
        same(one, other, "get", where)
        same(one, other, "get", where, 5)
    else:
        same(one, other, "add", item)
    same_below(data, one, other, item, depth - 1)


@settings(deadline=None)
@given(st.data())
def test_containers_and_views_do_the_same_in_c_and_in_python(data: st.DataObject) -> None:
    hint = data.draw(st.sampled_from(list(SHAPES)), "type")
    kvs = pair_of_providers()
    more = {"ttl": sk.TTL(1, refresh="read")} if data.draw(st.booleans(), "ttl") else {}
    quick, plain = (kv.state("c", hint, **more) for kv in kvs)
    assert type(quick) in SLOW
    keys = data.draw(st.lists(TEXTS | ODD, min_size=1, max_size=3), "keys")
    items, now = SHAPES[hint] | ANYTHING, 1_000_000
    names = TEXTS | NUMBERS | st.tuples(TEXTS, NUMBERS)
    wholes = WHOLES | st.lists(items, max_size=3) | st.lists(SHAPES[hint], max_size=3)
    wholes = wholes | st.dictionaries(names, SHAPES[hint], max_size=3)
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        key, item = data.draw(st.sampled_from(keys), "key"), data.draw(items, "item")
        step = data.draw(st.sampled_from(["state", "view", "view", "view", "time", "place"]))
        if step == "time" and quick._ptr is not None:
            now += 600
            for kv in kvs:
                kv._residence.store.set_time("processing", now)
        elif step == "place" and quick._ptr is not None:
            same_change_of_place(data, kvs)
        elif step == "state":
            name = data.draw(st.sampled_from(["get", "copy", "__setitem__", "__contains__",
                "__delitem__", "discard", "drop", "append"]))  # fmt: skip
            if name == "__setitem__":
                same(quick, plain, name, key, data.draw(wholes, "whole"))
            elif name == "append":
                if "list" in str(hint)[:4]:
                    same(quick, plain, name, key, item)
            else:
                same(quick, plain, name, key)
        else:
            same(quick, plain, "__getitem__", key)
            try:
                one, other = quick[key], plain[key]
            except StateKitError:
                continue
            same(one, other, "__len__")
            same(one, other, "copy")
            where = data.draw(POSITIONS | TEXTS, "where")
            if isinstance(one, views.SetView):
                same(one, other, "add", item)
                same(one, other, "__contains__", item)
                continue
            same(one, other, "__getitem__", where)
            same(one, other, "__setitem__", where, item)
            same(one, other, "__getitem__", where)
            same_below(data, one, other, item, depth=3)
            if isinstance(one, views.ListView):
                same(one, other, "append", item)
                same(one, other, "__getitem__", -1)
            else:
                same(one, other, "__contains__", where)
                same(one, other, "get", where)
                same(one, other, "get", where, 5)
    stored = [
        outcome(lambda s=s: sorted((repr(k), shown(v)) for k, v in s.items()))
        for s in (quick, plain)
    ]
    assert stored[0] == stored[1]
    for kv in kvs:
        kv.close()


@given(ANYTHING | st.integers() | st.text() | st.binary() | st.floats())
def test_scalars_are_packed_and_unpacked_as_their_codecs_do(given_: Any) -> None:
    for number, hint in enumerate((int, float, bool, str, bytes), 1):
        codec = make_codec(hint)
        native = _fast.Codec(number, codec.encode, codec.decode)
        packed = native.pack(given_)
        if packed is None:
            continue
        assert packed == codec.encode(given_)
        back = native.unpack(packed)
        if back is None:  # for the codec, which decodes what is not small
            continue
        assert outcome(lambda p=packed, n=native: n.unpack(p)) == outcome(
            lambda p=packed, c=codec: c.decode(p)
        )


@given(st.binary(max_size=12) | st.binary(max_size=4).map(lambda tail: b"\xd9\x02" + tail))
def test_what_c_unpacks_is_what_the_codec_decodes(data: bytes) -> None:
    for number, hint in enumerate((int, float, bool, str, bytes), 1):
        codec = make_codec(hint)
        native = _fast.Codec(number, codec.encode, codec.decode)
        if (found := native.unpack(data)) is not None:
            assert repr(found) == repr(codec.decode(data)), (hint, data)


# ---- What is easily forgotten


def state_of(kv: sk.KVProvider, hint: Any = int) -> Any:
    return kv.state("s", hint)


def test_a_call_is_counted_once() -> None:
    with sk.open("memory:") as kv:
        visits = kv.value("visits", int)
        store = kv._residence.store
        calls: list[Callable[[], Any]] = [
            lambda: visits.__setitem__("a", 1),
            lambda: visits["a"],
            lambda: visits.get("b"),
            lambda: visits.add("a", 2),
            lambda: "a" in visits,
            lambda: visits.discard("a"),
        ]
        for done, call in enumerate(calls, 1):
            call()
            assert store.stats(visits._raw).operations == done
        assert sum(store.heat()) == len(calls)


def test_an_entry_that_c_changed_is_in_a_delta_and_is_written_home(tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    with sk.open(f"rocksdb:{tmp_path}/home") as kv:
        visits = kv.value("visits", int)
        names = kv.list("names", str)
        visits["a"] = 1
        kv.flush()
        assert kv._residence.store.stats().dirty == 0
        visits["a"] = 2  # in C: the entry is here
        names["a"].append("x")
        assert kv._residence.store.stats().dirty == 2
    with sk.open(f"rocksdb:{tmp_path}/home") as kv:
        assert kv.value("visits", int)["a"] == 2
        assert kv.list("names", str)["a"] == ["x"]


def test_a_snapshot_does_not_see_what_c_changes_after_it() -> None:
    with sk.open("memory:") as kv:
        visits = kv.value("visits", int)
        words = kv.value("words", str)
        logs = kv.list("logs", int)
        for at in range(200):
            visits[f"k{at}"] = at
            words[f"k{at}"] = "before"
            logs[f"k{at}"].append(at)
        snapshot = kv._residence.store.snapshot()
        for at in range(200):
            visits[f"k{at}"] += 1
            visits.add(f"k{at}")
            words[f"k{at}"] = "after"
            logs[f"k{at}"].append(-1)
        with sk.Store() as other:
            for leaf, blocks in snapshot:
                other.decode_leaf(leaf, blocks)
            found = {state.name: dict(other.scan(state)) for state in other.states()}
    assert sorted(found["visits"].values()) == list(range(200))
    assert set(found["words"].values()) == {b"\xa6before"}
    encode = make_codec(list[int]).encode
    assert sorted(found["logs"].values()) == sorted(encode([at]) for at in range(200))


def test_a_default_that_can_change_is_made_anew_each_time() -> None:
    with sk.open("memory:") as kv:
        clicks = kv.value("clicks", Click, default=Click("d", 0))
        clicks["a"].url = "changed"
        clicks.get("a").url = "changed"
        assert clicks["a"] == Click("d", 0)


def test_a_handle_for_one_key_gives_the_default_of_the_state_or_none() -> None:
    with sk.open("memory:") as kv:
        kv.value("visits", int)
        kv.value("names", str)
        kv.value("scores", int, default=5)
        kv.value("clicks", Click, default=Click("d", 0))
        bob = kv.keyed("bob")
        assert bob.visits.get() is None
        assert bob.names.get() is None
        assert bob.scores.get() == 5
        assert bob.clicks.get() == Click("d", 0)
        assert repr(bob.names) == "<'names' of 'bob': None>"


def test_garbage_may_be_collected_while_bad_text_is_refused() -> None:
    """A finalizer runs in the middle of a read, and reads something else, which is large."""
    with sk.open("memory:") as kv:
        names, large = kv.list("names", str), kv.map("large", str, bytes)
        names._raw.put_encoded("a", b"\x91\xa1\xff")  # a list of one str that is no UTF-8
        large["a"]["x"] = b"z" * 3_000_000
        view, ran = names["a"], []

        class Cyclic:
            def __init__(self) -> None:
                self.me = self

            def __del__(self) -> None:
                ran.append(len(large["a"]["x"]))

        thresholds = gc.get_threshold()
        gc.set_threshold(20, 10**9, 10**9)
        try:
            for objects in range(40):  # one of these makes the collection come in the call
                gc.collect()
                gc.disable()
                Cyclic()
                others = [[] for _ in range(objects)]
                gc.enable()
                with pytest.raises(UnicodeDecodeError):
                    view[0]
                del others
        finally:
            gc.enable()
            gc.set_threshold(*thresholds)
        assert set(ran) == {3_000_000}


def test_a_missing_key_that_is_a_tuple_is_named_as_it_is() -> None:
    with sk.open("memory:") as kv:
        visits = kv.value("visits", int, key=tuple[str, int])
        prefs = kv.map("prefs", tuple[str, int], int)
        for call in (lambda: visits["a", 1], lambda: prefs["x"]["a", 1]):
            with pytest.raises(KeyError) as caught:
                call()
            assert caught.value.args == (("a", 1),)


def test_values_can_be_closed_under_while_they_are_encoded() -> None:
    """Encoding and decoding run code of the user's, which may do anything."""
    with sk.open("memory:") as kv:
        clicks = kv.value("clicks", Click)
        encode = clicks._codec.encode
        clicks["a"] = Click("u", 1)

        def encode_and_close(given: Any) -> bytes:
            kv.close()
            return encode(given)

        native = _fast.Codec(0, encode_and_close, clicks._decode)
        clicks._bind_values(native)
        with pytest.raises(ClosedError):
            clicks["a"] = Click("v", 2)
        with pytest.raises(ClosedError):
            clicks["a"]


@pytest.mark.parametrize("hint", [int, str])
def test_a_kind_that_c_does_not_know_goes_the_slow_way(hint: Any) -> None:
    with sk.open("memory:") as kv:
        state = kv.value("v", hint)
        value = hint("5")
        state["a"] = value
        state._bind_native("s", KINDS["list"].number, False)
        if hint is int:
            state._bind_numbers(0)
        else:
            state._bind_values(state._codec.native)
        assert state["a"] == value
        state["a"] = value + value
        assert state.get("a") == value + value
        assert "a" in state
        assert state.discard("a")


def test_a_container_may_change_while_it_is_tested() -> None:
    """Testing a record runs code of its class, which may change the container around it."""

    @dataclass
    class Clearing:
        at: int

        def __getattribute__(self, name: str) -> Any:
            if name == "at":
                given.clear()
            return super().__getattribute__(name)

    with sk.open("memory:") as kv:
        lists, maps = kv.list("lists", Clearing), kv.map("maps", str, Clearing)
        given: Any = [Clearing(at) for at in range(20)]
        lists["a"] = given
        assert lists.copy("a") == []
        given = {str(at): Clearing(at) for at in range(20)}
        with suppress(RuntimeError, StateKitError):  # of a dict that changes while it is packed
            maps["a"] = given
        assert len(maps["a"]) <= 20


def test_an_interrupt_while_encoding_is_not_taken_for_a_bad_value() -> None:
    with sk.open("memory:") as kv:
        clicks = kv.value("clicks", Click)
        clicks["a"] = Click("u", 1)

        def interrupted(_: Any) -> Any:
            raise KeyboardInterrupt

        clicks._bind_values(_fast.Codec(0, interrupted, interrupted))
        with pytest.raises(KeyboardInterrupt):
            clicks["a"] = Click("v", 2)
        with pytest.raises(KeyboardInterrupt):
            clicks["a"]


def test_states_and_views_cannot_be_copied_and_show_themselves_as_before() -> None:
    with sk.open("memory:") as kv:
        visits, names = kv.value("visits", int), kv.value("names", str)
        logs, prefs = kv.list("logs", int), kv.map("prefs", str, int)
        tags = kv.state("tags", set[str])
        for state, shown in (
            (visits, "ValueState"), (names, "ValueState"), (logs, "ListState"),
            (prefs, "MapState"), (tags, "SetState"), (logs["a"], "ListView"),
            (prefs["a"], "MapView"), (tags["a"], "SetView"),
        ):  # fmt: skip
            with pytest.raises(KindError):
                pickle.dumps(state)
            if "State" in shown:
                assert repr(state).startswith(f"<{shown} ")
                assert isinstance(state, getattr(sk, shown))
                with pytest.raises(KindError):
                    copy.copy(state)
            else:
                assert type(state).__name__ == shown
                assert copy.copy(state) == state
        assert str(inspect.signature(visits.get)) == "(key, default=None)"


def test_objects_are_freed_with_what_they_refer_to() -> None:
    def make() -> None:
        kv = sk.open("memory:")
        logs = kv.list("logs", int)
        logs["a"].append(1)
        visits = kv.value("visits", int, default=3)
        visits["a"] = 1
        view = logs["a"]
        cycle: list[Any] = [view, visits]
        cycle.append(cycle)
        kv.close()

    def count() -> int:
        gc.collect()
        return sum(
            isinstance(one, _fast.Keyed | _fast.Place | _fast.Codec | _fast.Plan)
            for one in gc.get_objects()
        )

    def many() -> int:
        for _ in range(20):
            make()
        return count()

    first = many()
    assert many() <= first


def test_references_are_counted_right() -> None:
    """A missing or surplus reference shows after many calls, of each outcome."""
    with sk.open("memory:") as kv:
        default, key = 10**15, "a key that nobody else has"
        visits = kv.value("visits", int, default=default)
        words = kv.value("words", str)
        logs, prefs = kv.list("logs", str), kv.map("prefs", str, str)
        text = "some text that nobody else has"
        watched = [key, text, visits, logs, prefs, logs._shape, logs._shape.plan]
        prefs[key][key] = text

        def once() -> None:
            visits[key], visits.get(key), visits.get("zz", text), visits.add(key)
            words[key] = text
            words[key], words.get(key), words.get("zz", text)
            logs[key].append(text)
            logs.append(key, text)
            logs[key][0], len(logs[key]), logs.get("zz", text), logs.get(key)
            prefs[key][key] = text
            prefs[key][key], prefs[key].get("zz", text), key in prefs[key]
            logs.discard(key)
            for bad in (
                lambda: visits.__setitem__(key, text),
                lambda: words.__setitem__(key, 5),
                lambda: words["zz"],
                lambda: logs[key][5],
                lambda: prefs[key]["zz"],
                lambda: visits[5],
            ):
                with pytest.raises((StateKitError, KeyError, IndexError)):
                    bad()

        once()
        before = [sys.getrefcount(one) for one in watched]
        for _ in range(300):
            once()
        gc.collect()
        after = [sys.getrefcount(one) for one in watched]
        assert all(abs(a - b) < 20 for a, b in zip(before, after, strict=True)), (before, after)


def test_a_subinterpreter_is_refused() -> None:
    code = (
        "import _xxsubinterpreters as inner\n"
        "made = inner.create()\n"
        "inner.run_string(made, '''\n"
        "try:\n"
        "    import statekit._fast\n"
        "except ImportError as error:\n"
        "    print('refused:', error)\n"
        "''')\n"
        "inner.destroy(made)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    if "No module named '_xxsubinterpreters'" in done.stderr:
        pytest.skip("this Python has no subinterpreters to try")
    assert "refused: " in done.stdout, done.stderr


@pytest.mark.parametrize("is_forever", [False, True])
@pytest.mark.parametrize("nth", range(1, 12))
def test_an_allocation_that_fails_leaves_everything_as_it_was(nth: int, is_forever: bool) -> None:
    """If it fails once, the slow way succeeds; if it goes on failing, the slow way says so."""
    if not lib.sk_is_testing_build():
        pytest.skip("allocations fail only in testing builds: make sanitize")
    kv = sk.open("memory:", key_groups=2, subgroups=1)
    visits, words = kv.value("visits", int), kv.value("words", str)
    logs, prefs = kv.list("logs", int), kv.map("prefs", str, str)
    key, text, items = "k" * 40, "x" * 90, list(range(100))
    logs["a"] = items
    calls: list[tuple[Any, Callable[[], Any], Any]] = [
        (visits, lambda: visits.__setitem__(key, 1), {key: 1}),
        (visits, lambda: visits.add("n" * 40), {key: 1, "n" * 40: 1}),
        (words, lambda: words.__setitem__("a", text), {"a": text}),
        (words, lambda: words["a"], {"a": text}),
        (logs, lambda: logs["a"].append(7), {"a": [*items, 7]}),
        (logs, lambda: logs["a"][50], {"a": [*items, 7]}),
        (prefs, lambda: prefs["a"].__setitem__(key, text), {"a": {key: text}}),
        (prefs, lambda: prefs["a"][key], {"a": {key: text}}),
    ]
    for state, call, after in calls:
        before, failure = dict(state.items()), None
        lib.sk_fail_alloc(nth, is_forever)
        try:
            call()
        except StateKitError as error:
            failure = error
        finally:
            lib.sk_fail_alloc(0, False)
        if failure is not None:
            assert is_forever
            assert "memory" in str(failure)
            assert dict(state.items()) == before
            call()
        assert dict(state.items()) == after
    kv.close()


# ---- With others at the same time


def test_calls_batches_snapshots_and_moves_at_the_same_time() -> None:
    """Each thread counts under keys of its own and under common ones; nothing is lost."""
    rounds, workers = 3000, 4
    kv = sk.open("memory:", key_groups=8, subgroups=2)
    visits, words = kv.value("visits", int), kv.value("words", str)
    logs, prefs = kv.list("logs", int), kv.map("prefs", str, int)
    done, failures = threading.Event(), []

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
                raise

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def count(worker: int) -> None:
        mine = f"mine{worker}"
        for at in range(rounds):
            visits.add("common")
            visits.add(f"k{at % 50}")
            visits[mine] = at
            assert visits[mine] == at
            words[f"w{at % 50}"] = "x" * (at % 60)
            assert set(words.get(f"w{at % 50}", "")) <= {"x"}
            logs[mine].append(at)
            assert logs[mine][at] == at
            prefs["common"][mine] = at
            assert prefs["common"][mine] == at

    def batches() -> None:
        keys = [f"k{at}" for at in range(50)]
        while not done.is_set():
            visits.add_many(keys, 0)
            words.put_many(["w1", "w2"], ["", "xx"])

    def snapshots() -> None:
        while not done.is_set():
            with sk.Store(8, 2) as other:
                for leaf, blocks in kv._residence.store.snapshot():
                    other.decode_leaf(leaf, blocks)

    def moves() -> None:
        store = kv._residence.store
        while not done.is_set():
            for leaf in range(store.leaves):
                store.encode_leaf(leaf)

    workers_ = [guarded(lambda w=w: count(w)) for w in range(workers)]
    others = [guarded(work) for work in (batches, snapshots, moves)]
    for thread in workers_:
        thread.join()
    done.set()
    for thread in others:
        thread.join()
    assert not failures
    assert visits["common"] == rounds * workers
    assert sum(visits[f"k{at}"] for at in range(50)) == rounds * workers
    for worker in range(workers):
        assert logs.copy(f"mine{worker}") == list(range(rounds))
    kv.close()


def test_leaves_go_and_come_under_calls() -> None:
    """Splitting and merging under a loop of calls: each call is done, or refused as not owned."""
    kv = sk.open("memory:", key_groups=8, subgroups=2)
    visits = kv.value("visits", int)
    done, counted = threading.Event(), [0] * 16

    def count() -> None:
        at = 0
        while not done.is_set():
            at = (at + 1) % 16
            try:
                visits.add(f"k{at}")
            except NotOwnedError:
                continue
            counted[at] += 1

    thread = threading.Thread(target=count)
    thread.start()
    for _ in range(60):
        parts = kv.split([range(4), range(4, 8)])
        for part in parts:
            if part is not kv:
                kv.merge(part)
    done.set()
    thread.join()
    assert [visits.get(f"k{at}", 0) for at in range(16)] == counted
    kv.close()


def test_key_groups_are_handed_over_under_calls_batches_and_checkpoints(tmp_path: Path) -> None:
    """Two owners in turn, and threads that count with whichever has the key: nothing is lost."""
    kvs = [sk.open("memory:", key_groups=8, subgroups=2, owned=owned) for owned in (None, ())]
    states = [(kv.value("visits", int), kv.list("logs", int)) for kv in kvs]
    addresses = [kv.serve().address for kv in kvs]
    keys = [f"k{at}" for at in range(40)]
    done, failures = threading.Event(), []
    one, many, items = (dict.fromkeys(keys, 0) for _ in range(3))

    def attempt(call: Callable[[Any, Any], Any]) -> bool:
        for visits, logs in states:
            with suppress(NotOwnedError):
                call(visits, logs)
                return True
        return False

    def work(call: Callable[[str], Callable[[Any, Any], Any]], mine: dict[str, int]) -> None:
        try:
            while not done.is_set():
                for key in keys:
                    mine[key] += attempt(call(key))
        except BaseException as error:
            failures.append(error)
            raise

    def snapshots() -> None:
        try:
            while not done.is_set():
                for at, kv in enumerate(kvs):
                    kv.checkpoint(str(tmp_path / str(at)))
        except BaseException as error:
            failures.append(error)
            raise

    calls = [
        (lambda key: lambda visits, logs: visits.add(key), one),
        (lambda key: lambda visits, logs: visits.add_many([key]), many),
        (lambda key: lambda visits, logs: logs[key].append(1), items),
    ]
    threads = [threading.Thread(target=work, args=call) for call in calls]
    threads.append(threading.Thread(target=snapshots))
    for thread in threads:
        thread.start()
    for at in range(6):
        new, old = (at + 1) % 2, at % 2
        kvs[new].fetch_from(addresses[old], key_groups=range(8)).wait()
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    visits, logs = states[0]
    assert {key: visits.get(key) or 0 for key in keys} == {k: one[k] + many[k] for k in keys}
    assert {key: len(logs[key]) for key in keys} == items
    for kv in kvs:
        kv.close()


def test_a_provider_is_closed_under_calls() -> None:
    for _ in range(30):
        kv = sk.open("memory:", key_groups=2, subgroups=2)
        visits, logs = kv.value("visits", int), kv.list("logs", int)
        closed = []

        def count(visits: Any = visits, logs: Any = logs, closed: Any = closed) -> None:
            try:
                while True:
                    visits.add("a")
                    logs["a"].append(1)
            except ClosedError:
                closed.append(True)

        threads = [threading.Thread(target=count) for _ in range(3)]
        for thread in threads:
            thread.start()
        kv.close()
        for thread in threads:
            thread.join()
        assert len(closed) == 3
