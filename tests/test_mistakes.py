"""Mistakes that users make. The error says what, where and what to do, and nothing changes."""

import copy
import datetime as dt
import decimal
import operator
import pickle
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import statekit as sk
from statekit.errors import (
    ArgumentError,
    BadValueError,
    ColumnError,
    HomeError,
    KeyTypeError,
    KindError,
    MissingPackageError,
    OccupiedError,
    OverflowStateError,
    SchemaError,
    StateKitError,
    StorageError,
)


@dataclass
class Click:
    url: str
    at: int = 0


class World:
    """A provider with a state of each kind, and what is in them."""

    def __init__(self) -> None:
        self.kv = kv = sk.open("memory:", key_groups=2, subgroups=2)
        self.count = kv.value("count", int, default=0)
        self.price = kv.value("price", float)
        self.text = kv.value("text", str)
        self.flag = kv.value("flag", bool)
        self.click = kv.value("click", Click)
        self.when = kv.value("when", dt.datetime)
        self.span = kv.value("span", dt.timedelta)
        self.by_number = kv.value("by_number", int, key=int)
        self.by_pair = kv.value("by_pair", int, key=tuple[str, int])
        self.numbers = kv.list("numbers", int)
        self.rows = kv.list("rows", list[int])
        self.prices = kv.list("prices", float)
        self.clicks = kv.list("clicks", Click)
        self.prefs = kv.map("prefs", str, int)
        self.nested = kv.state("nested", dict[str, list[int]])
        self.tags = kv.state("tags", set[int])
        self.timers = kv.timers("timers")
        self.best = kv.reduce("best", int, max)
        self.joined = kv.reduce("joined", str, lambda a, b: a + b)
        self.count["k"] = 5
        self.text["k"] = "old"
        self.numbers["k"] = [1, 2, 3]
        self.prefs["k"] = {"a": 1}
        self.nested["k"] = {"a": [1]}
        self.tags["k"] = {1}
        self.timers.set("k", 7)

    def contents(self) -> dict[str, Any]:
        return {name: sorted(self.kv[name].items()) for name in self.kv.schemas}


Mistake = tuple[Callable[[World], Any], type[BaseException], str]

DECLARING: list[Mistake] = [
    (lambda w: w.kv.value(5, int), ArgumentError, "5 cannot name a state"),
    (lambda w: w.kv.value("", int), ArgumentError, "'' cannot name a state"),
    (lambda w: w.kv.value("x", "int"), SchemaError, "Pass the type itself, not its name"),
    (lambda w: w.kv.value("x", Click("u")), SchemaError, "Pass the class, Click."),
    (lambda w: w.kv.value("x", tuple), SchemaError, "Use tuple[int, ...] or tuple[str, int]."),
    (lambda w: w.kv.value("x", frozenset[int]), SchemaError, "Use set."),
    (lambda w: w.kv.value("x", typing.Sequence[int]), SchemaError, "Use list."),
    (
        lambda w: w.kv.value("x", np.int64),
        SchemaError,
        "int64 is no type that a state can hold. Use int, float",
    ),
    (lambda w: w.kv.value("x", [int]), SchemaError, "is no type that a state can hold"),
    (lambda w: w.kv.value("x", str | bytes), SchemaError, "str | bytes is no type"),
    (lambda w: w.kv.map("x", float, int), SchemaError, "cannot be the key of a map"),
    (lambda w: w.kv.value("x", int, key=float), KeyTypeError, "is no key type. Use str"),
    (lambda w: w.kv.value("x", int, key=[str]), KeyTypeError, "is no key type. Use str"),
    (lambda w: w.kv.value("x", int, key=tuple[str, ...]), KeyTypeError, "is no key type"),
    (
        lambda w: w.kv.value("x", int, default="a"),
        BadValueError,
        "the default of state 'x': 'a' is of type str, not int. Pass a value of type int.",
    ),
    (lambda w: w.kv.value("x", int, default=2**63), OverflowStateError, "64 bits"),
    (
        lambda w: w.kv.value("x", Click, default=Click(5)),
        BadValueError,
        "the default of state 'x': 5, at .url of what was given, is of type int, not str",
    ),
    (lambda w: w.kv.value("x", int, ttl=0), ArgumentError, "entries cannot live for 0"),
    (lambda w: w.kv.value("x", int, ttl="5m"), ArgumentError, "entries cannot live for '5m'"),
    (lambda w: w.kv.value("x", int, ttl=True), ArgumentError, "entries cannot live for True"),
    (lambda w: w.kv.value("x", int, ttl=1e30), ArgumentError, "leave ttl out"),
    (lambda w: sk.TTL(5, time="x"), ArgumentError, 'time is "processing" or "event"'),
    (
        lambda w: w.kv.value("count", str),
        SchemaError,
        "is declared in this provider as value of int",
    ),
    (lambda w: w.kv.value("count", int, ttl=5), SchemaError, "with a time to live"),
    (lambda w: w.kv["cuont"], SchemaError, "there is no state 'cuont' in this provider"),
    (lambda w: w.kv.reduce("x", int, "add"), ArgumentError, "Pass one such as operator.add"),
    (lambda w: w.kv.aggregate("x", int, initial=0, add=5), ArgumentError, "add=5 is no function"),
    (
        lambda w: w.kv.aggregate("x", int, initial=0, add=operator.add, result=5),
        ArgumentError,
        "result=5 is no function",
    ),
]
ONE_KEY: list[Mistake] = [
    (lambda w: w.count[5], KeyTypeError, "the key 5 is of type int, not str (state 'count')"),
    (lambda w: w.count[None], KeyTypeError, "the key None is of type NoneType"),
    (
        lambda w: w.by_number[2**63],
        KeyTypeError,
        "the key 9223372036854775808 does not fit into 64 "
        "bits, which is -2**63 to 2**63 - 1 (state 'by_number'). Declare the state with key=str",
    ),
    (
        lambda w: w.by_pair["a", 2**63],
        KeyTypeError,
        "its part 1, 9223372036854775808, does not fit",
    ),
    (lambda w: w.by_pair["a"], KeyTypeError, "is of type str, not tuple[str, int]"),
    (lambda w: w.by_pair["a", 1, 2], KeyTypeError, "has 3 parts, and does not fit tuple[str, int]"),
    (lambda w: w.by_pair["a", "b"], KeyTypeError, "its part 1, 'b', is of type str, not int"),
    (lambda w: w.count["\ud800"], KeyTypeError, "has no UTF-8 form"),
    (lambda w: w.count["x" * 70_000], KeyTypeError, "above the limit of 65536"),
    (lambda w: w.count.put("k", "x"), BadValueError, "'x' is of type str, not int"),
    (lambda w: w.count.put("k", 1.0), BadValueError, "1.0 is of type float, not int"),
    (
        lambda w: w.count.put("k", 2**63),
        OverflowStateError,
        "9223372036854775808 does not fit into "
        "64 bits, which is -2**63 to 2**63 - 1 (state 'count', key 'k')",
    ),
    (lambda w: w.count.add("k", 1.5), BadValueError, "1.5 is of type float"),
    (lambda w: w.count.add("k", 2**63), OverflowStateError, "64 bits"),
    (lambda w: w.count.compare_and_set("k", 2**63, 1), OverflowStateError, "9223372036854775808"),
    (lambda w: w.price.add("k", 2**53 + 1), BadValueError, "has no equal float"),
    (lambda w: w.price.max("k", 10**400), OverflowStateError, "is larger than any float"),
    (lambda w: w.text.add("k", 1), KindError, "values of type str have no add()"),
    (
        lambda w: w.text.update({"k": 5}),
        BadValueError,
        "record 0: 5 is of type int, not str (state 'text', key 'k')",
    ),
    (lambda w: w.click.put("k", {"url": "u"}), BadValueError, "is of type dict, not Click"),
    (
        lambda w: w.numbers.__setitem__("k", "ab"),
        BadValueError,
        "'ab' is of type str, not list[int]",
    ),
    (lambda w: w.numbers["k"].extend([1, "x"]), BadValueError, "'x', at [1] of what was given"),
    (lambda w: w.numbers["k"]["x"], TypeError, "list indices must be integers or slices, not str"),
    (lambda w: w.numbers["k"].insert("x", 1), TypeError, "list indices must be integers"),
    (lambda w: w.numbers["k"][9], IndexError, "there are 3 items (state 'numbers', key 'k')"),
    (lambda w: w.numbers["k"].remove(9), ValueError, "9 is not in the list (state 'numbers'"),
    (lambda w: w.nested["k"]["a"]["b"], TypeError, "list indices must be integers"),
    (lambda w: w.nested["k"].__setitem__("a", 5), BadValueError, "is of type int, not list[int]"),
    (lambda w: w.rows["k"].append(["x"]), BadValueError, "'x', at [0] of what was given"),
    (
        lambda w: w.prefs["k"].__setitem__(5, 1),
        BadValueError,
        "the map key 5 is of type int, not str (state 'prefs', key 'k')",
    ),
    (lambda w: w.prefs["k"].get(5), BadValueError, "the map key 5 is of type int, not str"),
    (lambda w: w.prefs.__setitem__("k", {"a": "x"}), BadValueError, "'x', at ['a'] of what"),
    (lambda w: w.prefs["no"].popitem(), KeyError, "the map is empty"),
    (lambda w: w.tags["k"].add("x"), BadValueError, "'x' is of type str, not int (state 'tags'"),
    (lambda w: w.tags["no"].pop(), KeyError, "pop from an empty set (state 'tags', key 'no')"),
    (lambda w: w.timers.set("k", dt.datetime(2024, 1, 1)), ArgumentError, "has no time zone"),
    (lambda w: w.timers.set("k", 2**63), ArgumentError, "Pass an int of 64 bits or a datetime"),
    (lambda w: w.timers.pop_due(9, limit=-1), ArgumentError, "limit=-1 is no number of timers"),
    (lambda w: w.timers.pop_due(9, limit="x"), ArgumentError, "limit='x' is no number"),
    (lambda w: w.kv.keyed("k").cuont, AttributeError, "there is no state 'cuont'"),
    (lambda w: w.best.add("k", "x"), BadValueError, "'x' is of type str"),
    (lambda w: w.count.current, ArgumentError, "Use it inside `with kv.key(...)`"),
]
PROVIDERS: list[Mistake] = [
    (lambda w: list(w.kv), KindError, "a provider is no collection. `for name in kv.schemas`"),
    (
        lambda w: w.kv.split(2),
        ArgumentError,
        "2 is no list of key-groups for new providers. Pass one "
        "range for each: [range(0, 1), range(1, 2)], or what statekit.assign(2, 2) gives.",
    ),
    (lambda w: w.kv.split("a"), ArgumentError, "is no list of key-groups"),
    (lambda w: w.kv.split([1, 2]), ArgumentError, "1 names no key-groups. Pass a range"),
    (lambda w: w.kv.split([b"\0"]), ArgumentError, "names no key-groups"),
    (lambda w: w.kv.merge(5), ArgumentError, "5 is no provider"),
    (lambda w: w.kv.merge(w.kv), ArgumentError, "cannot be merged with itself"),
    (lambda w: w.kv.merge(World().kv), OccupiedError, "both providers have key-groups 0-1"),
    (lambda w: w.kv.key_group_of(1.5), KeyTypeError, "is of type float, which no key has"),
    (lambda w: w.kv.key_group_of(2**63), KeyTypeError, "does not fit into 64 bits"),
    (lambda w: w.kv.advance_watermark(1.5), ArgumentError, "is no timestamp (watermark)"),
    (
        lambda w: sk.open("memory:", key_groups="a"),
        ArgumentError,
        "key_groups='a' is no number of "
        "key-groups. Pass a power of two, 1048576 at most. `owned` says which",
    ),
    (
        lambda w: sk.open("memory:", key_groups=range(4)),
        ArgumentError,
        "is no number of key-groups",
    ),
    (lambda w: sk.open("memory:", key_groups=3), ArgumentError, "key_groups=3 is no number"),
    (
        lambda w: sk.open("memory:", subgroups=True),
        ArgumentError,
        "subgroups=True is no number of sub",
    ),
    (lambda w: sk.open("memory:", owned="a"), ArgumentError, "'a' names no key-groups"),
    (lambda w: sk.open("memory:", owned=b"ab"), ArgumentError, "b'ab' names no key-groups"),
    (lambda w: sk.open("rocksdb:/proc/nothing"), HomeError, "/proc and the like take none"),
    (
        lambda w: w.kv.checkpoint("/proc/nothing"),
        StorageError,
        "'/proc/nothing' cannot be made: No "
        "such file or directory. Name a directory on a disk (/proc and the like take none)",
    ),
    (lambda w: sk.assign(128, 0), ArgumentError, "cannot be shared by 0 workers"),
    (lambda w: sk.assign("a", 2), ArgumentError, "Pass two ints, as in assign(128, 4)"),
    (lambda w: sk.leaf_of(str, "a", key_groups="a"), ArgumentError, "no store has 'a' key-groups"),
]
BATCHES: list[Mistake] = [
    (lambda w: w.count.put_many(["a", "b"], [1]), ColumnError, "there are 2 keys but 1 values"),
    (lambda w: w.text.put_many(["a"], ["x", "y"]), ColumnError, "there are 1 keys but 2 values"),
    (lambda w: w.numbers.append_many(["a"], [1, 2]), ColumnError, "there are 1 keys but 2 values"),
    (
        lambda w: w.prefs.update_many(["a", "b"], ["x"], [1, 2]),
        ColumnError,
        "2 keys but 1 map keys",
    ),
    (lambda w: w.joined.add_many(["a"], ["x", "y"]), ColumnError, "there are 1 keys but 2 values"),
    (lambda w: w.count.add_many(["a", None]), ColumnError, "item 1 is null"),
    (lambda w: w.count.add_many(pa.array(["a", None])), ColumnError, "item 1 is null"),
    (
        lambda w: w.count.add_many(pa.chunked_array([["a"], ["b", None]])),
        ColumnError,
        "item 2 is null",
    ),
    (lambda w: w.count.add_many(pa.array(["a", None]).dictionary_encode()), ColumnError, "item 1"),
    (lambda w: w.count.add_many(pd.Series(["a", None], dtype="category")), ColumnError, "item 1"),
    (lambda w: w.by_number.add_many(pd.Series([1, None], dtype="Int64")), ColumnError, "item 1"),
    (lambda w: w.by_number.add_many(np.ma.masked_array([1, 2], [0, 1])), ColumnError, "item 1"),
    (lambda w: w.count.put_many(["a", "b"], pa.array([1, None])), ColumnError, "item 1 is null"),
    (lambda w: w.text.put_many(["a", "b"], pa.array(["x", None])), BadValueError, "record 1: None"),
    (lambda w: w.count.add_many("abc"), ColumnError, "'abc' is one item, not a column"),
    (lambda w: w.count.add_many({"a": 5}), ColumnError, "is a mapping, not a column. Pass list(x)"),
    (lambda w: w.count.add_many(None), ColumnError, "an object of type NoneType is no column"),
    (lambda w: w.count.add_many([1]), ColumnError, "item 0 is 1. Pass str items."),
    (lambda w: w.count.add_many(np.array([["a"]])), ColumnError, "the array has 2 dimensions"),
    (lambda w: w.count.add_many(pd.DataFrame({"x": ["a"]})), ColumnError, "is not supported"),
    (lambda w: w.count.add_many(["\ud800"]), ColumnError, "item 0, '\\ud800', has no UTF-8 form"),
    (lambda w: w.by_number.add_many(np.array([1.0])), ColumnError, "it holds float. Pass int"),
    (lambda w: w.by_number.add_many([2**63]), ColumnError, "does not fit into 64 bits, which is"),
    (lambda w: w.by_number.add_many(np.array([2**63], "u8")), ColumnError, "does not fit into 64"),
    (
        lambda w: w.by_number.add_many(np.array(["2024-01-01"], "M8[s]")),
        ColumnError,
        "datetime64[s]",
    ),
    (
        lambda w: w.by_pair.add_many(["a"]),
        ColumnError,
        "Pass a tuple of 2 columns or a list of tuples",
    ),
    (lambda w: w.by_pair.add_many([["a", 1], ["b", 2]]), ColumnError, "a list of tuples"),
    (lambda w: w.by_pair.add_many((["a", "b"], [1])), ColumnError, "have 2, 1 items"),
    (lambda w: w.by_pair.add_many(5), ColumnError, "do not fit tuple[str, int]"),
    (lambda w: w.count.put_many(["a"], [1.5]), ColumnError, "item 0 is 1.5. Pass int items."),
    (lambda w: w.price.put_many(["a"], np.array([2**53 + 1])), ColumnError, "has no equal float"),
    (
        lambda w: w.price.put_many(["a"], [decimal.Decimal("0.1")]),
        ColumnError,
        "has no equal float",
    ),
    (lambda w: w.price.put_many(["a"], pa.array([2**53 + 1])), ColumnError, "has no equal float"),
    (lambda w: w.prices.append_many(["a"], [2**53 + 1]), ColumnError, "has no equal float"),
    (lambda w: w.price.put_many(["a"], np.array([0.1], "g")), ColumnError, "its dtype is float128"),
    (lambda w: w.count.add_many(["a"], "5"), ColumnError, "'5' is one item, not a column"),
    (lambda w: w.count.add_many(["a"], 1.5), BadValueError, "1.5 is of type float"),
    (lambda w: w.text.put_many(["a"], "x"), ColumnError, "'x' is no column of values"),
    (lambda w: w.text.put_many(["a"], None), ColumnError, "None is no column of values"),
    (lambda w: w.joined.add_many(["a"], 5), ColumnError, "5 is no column of values"),
    (lambda w: w.flag.put_many(["a"], [1]), BadValueError, "record 0: 1 is of type int, not bool"),
    (
        lambda w: w.when.put_many(["a"], np.array(["2024-01-01T00:00:00.000000001"], "M8[ns]")),
        ColumnError,
        "has nanoseconds, which a datetime or timedelta has not",
    ),
    (
        lambda w: w.when.put_many(
            ["a"], pd.Series(pd.to_datetime(["2024-01-01T00:00:00.000000001"]))
        ),
        BadValueError,
        "has nanoseconds, which a datetime has not",
    ),
    (lambda w: w.when.put_many(["a"], pa.array([1], pa.timestamp("ns"))), BadValueError, "nanosec"),
    (lambda w: w.span.put_many(["a"], np.array([1], "m8[ns]")), ColumnError, "has nanoseconds"),
    (
        lambda w: w.clicks.append_many(["a", "b"], [Click("u"), 5]),
        BadValueError,
        "record 1: 5 is of",
    ),
    (
        lambda w: w.click.put_many(["a", "k"], [Click("u"), 5]),
        BadValueError,
        "record 1: 5 is of type int, not Click (state 'click', key 'k')",
    ),
    (
        lambda w: w.nested.update_many(["a"], ["b"], [[1]]),
        KindError,
        "Use put_many(), or the views",
    ),
    (lambda w: w.kv.key_groups_of([1]), ColumnError, "item 0 is 1. Pass str items."),
]
MISTAKES = [*DECLARING, *ONE_KEY, *PROVIDERS, *BATCHES]


@pytest.mark.parametrize(("mistake", "error", "told"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_named_and_changes_nothing(
    mistake: Callable[[World], Any], error: type[BaseException], told: str
) -> None:
    world = World()
    before = world.contents()
    with pytest.raises(error, match=re.escape(told)) as caught:
        mistake(world)
    assert isinstance(caught.value, StateKitError) or error in (
        TypeError, IndexError, ValueError, KeyError, AttributeError,
    )  # fmt: skip
    assert world.contents() == before


# ---- Batches do the same as a loop over a dict

S = ["a", "b", "", "ключ", "a", "k" * 40]
I = [0, 1, -1, 2**62, 1, 7]  # noqa: E741
B = [b"a", b"", b"\x00\xff", b"a", b"z" * 40]
P = [("a", 1), ("b", -1), ("", 5), ("a", 1)]


def pick(column: Any, every: int) -> Any:
    return column[::every]


COLUMNS: list[tuple[Any, list[Any], Callable[[], Any]]] = [
    *[
        (str, S, make)
        for make in (
            lambda: S,
            lambda: tuple(S),
            lambda: iter(S),
            lambda: np.array(S),
            lambda: np.array(S, object),
            lambda: pick(np.array([x for s in S for x in (s, "no")]), 2),
            lambda: np.array(S[::-1])[::-1],
            lambda: [np.str_(s) for s in S],
            lambda: pa.array(S),
            lambda: pa.array(S, pa.large_string()),
            lambda: pa.array(S, pa.string_view()),
            lambda: pa.array(["zz", *S, "yy"])[1:-1],
            lambda: pa.array(S).dictionary_encode(),
            lambda: pa.array(["zz", *S, "yy"]).dictionary_encode()[1:-1],
            lambda: pa.chunked_array([S[:2], [], S[2:]]),
            lambda: pa.chunked_array([["q", *S[:2]], [*S[2:], "r"]])[1:-1],
            lambda: pa.chunked_array(
                [pa.array(S[:3]).dictionary_encode(), pa.array(S[3:]).dictionary_encode()]
            ),
            lambda: pa.array([None, *S])[1:],
            lambda: pd.Series(S),
            lambda: pd.Series(["x", *S])[1:],
            lambda: pd.Series(S, index=range(10, 16)),
            lambda: pd.Series(S, dtype="string"),
            lambda: pd.Series(S, dtype="category"),
            lambda: pd.Index(S),
            lambda: pa.DictionaryArray.from_arrays(
                pa.array([0, 1, 2, 3, 0, 4]), pa.array([*dict.fromkeys(S), None])
            ),
        )
    ],
    *[
        (int, I, make)
        for make in (
            lambda: I,
            lambda: np.array(I),
            lambda: np.array(I, ">i8"),
            lambda: np.array(I, object),
            lambda: pick(np.array([x for i in I for x in (i, 9)]), 2),
            lambda: pa.array(I),
            lambda: pa.array([5, *I, 6])[1:-1],
            lambda: pa.chunked_array([I[:2], I[2:]]),
            lambda: pa.array(I).dictionary_encode(),
            lambda: pd.Series(I, dtype="Int64"),
            lambda: pd.Series(I, dtype="category"),
            lambda: [np.int64(i) for i in I],
        )
    ],
    (int, [0, 1, 200], lambda: np.array([0, 1, 200], "u1")),
    (int, [0, 1, 200], lambda: pa.array([0, 1, 200], pa.uint64())),
    (int, list(range(5)), lambda: range(5)),
    *[
        (bytes, B, make)
        for make in (
            lambda: B,
            lambda: pa.array(B),
            lambda: pa.array(B, pa.large_binary()),
            lambda: pa.array([b"q", *B])[1:],
            lambda: pa.array(B).dictionary_encode(),
            lambda: pa.array(B, pa.binary_view()),
            lambda: [bytearray(b) for b in B],
            lambda: pd.Series(B),
        )
    ],
    (bytes, [b"ab", b"cd"], lambda: pa.array([b"zz", b"ab", b"cd"], pa.binary(2))[1:]),
    *[
        (tuple[str, int], P, make)
        for make in (
            lambda: P,
            lambda: iter(P),
            lambda: zip([s for s, _ in P], [i for _, i in P], strict=True),
            lambda: ([s for s, _ in P], [i for _, i in P]),
            lambda: (pa.array([s for s, _ in P]), np.array([i for _, i in P])),
            lambda: pd.Series(P),
            lambda: pd.MultiIndex.from_tuples(P),
        )
    ],
    *[
        (str, [], make)
        for make in (
            list,
            lambda: np.array([]),
            lambda: pa.array([]),
            lambda: pa.array([], pa.string()),
            lambda: pa.chunked_array([], pa.string()),
            lambda: pd.Series([], dtype=object),
            lambda: pd.Series([], dtype="float64"),
            lambda: np.array([], int),
        )
    ],
    (int, [], lambda: np.array([])),
    (tuple[str, int], [], list),
    (tuple[str, int], [], lambda: (np.array([]), [])),
]


@pytest.mark.parametrize(("key", "keys", "make"), COLUMNS, ids=range(len(COLUMNS)))
@pytest.mark.parametrize("home", ["memory:", "rocksdb:{}/db"])
def test_a_batch_is_a_loop_over_a_dict(
    key: Any, keys: list[Any], make: Callable[[], Any], home: str, tmp_path: Path
) -> None:
    kv = sk.open(home.format(tmp_path), key_groups=2, subgroups=2)
    counts = kv.value("counts", int, default=0, key=key)
    texts, lists = kv.value("texts", str, key=key), kv.list("lists", int, key=key)
    maps = kv.map("maps", str, int, key=key)
    model: dict[Any, Any] = {}
    counts.add_many(make())
    for one in keys:
        model[one] = model.get(one, 0) + 1
    assert dict(counts.items()) == model
    numbers = list(range(len(keys)))
    model.update(zip(keys, numbers, strict=True))
    for column in (numbers, np.array(numbers), pa.array(numbers), pa.array(numbers, pa.int8()),
                   pd.Series(numbers, dtype="int64"), np.array(numbers, "u1"),
                   pa.chunked_array([numbers[:1], numbers[1:]], pa.int64())):  # fmt: skip
        counts.clear()
        counts.put_many(make(), column)
        assert dict(counts.items()) == model
    found = counts.get_many(make())
    for results in (found.to_list(), found.to_arrow().to_pylist(), found.to_numpy().tolist(),
                    pickle.loads(pickle.dumps(found)), copy.copy(found)):  # fmt: skip
        assert results == [model[one] for one in keys]
    texts.put_many(make(), [str(number) for number in numbers])
    assert dict(texts.items()) == {one: str(number) for one, number in model.items()}
    lists.append_many(make(), numbers)
    maps.update_many(make(), [f"f{number % 2}" for number in numbers], numbers)
    appended: dict[Any, list[int]] = {}
    mapped: dict[Any, dict[str, int]] = {}
    for one, number in zip(keys, numbers, strict=True):
        appended.setdefault(one, []).append(number)
        mapped.setdefault(one, {})[f"f{number % 2}"] = number
    assert (dict(lists.items()), dict(maps.items())) == (appended, mapped)
    groups = list(kv.key_groups_of(make(), key=key))
    assert groups == [kv.key_group_of(one) for one in keys]
    assert counts.contains_many(make()) == [True] * len(keys)
    assert counts.delete_many(make()) == len(model)
    assert len(counts) == 0
    kv.close()


def test_lists_in_a_numpy_array_are_objects() -> None:
    state = sk.open("memory:", key_groups=1, subgroups=1).value("s", list[int])
    state.put_many(["a", "b"], [[1, 2], [3, 4]])
    found = state.get_many(["a", "b"]).to_numpy()
    assert (found.shape, found[1]) == ((2,), [3, 4])


# ---- Packages that are not there


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("pyarrow", lambda state: state.to_arrow()),
        ("pyarrow", lambda state: state.get_many(["k"]).to_arrow()),
        ("numpy", lambda state: state.get_many(["k"]).to_numpy()),
        ("pandas", lambda state: state.to_pandas()),
        ("pyarrow", lambda state: state.to_pandas()),
    ],
)
@pytest.mark.parametrize("name", ["count", "text", "numbers"])
def test_a_package_that_is_missing_is_named_with_its_extra(
    package: str, call: Callable[[Any], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = World().kv[name]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=r"pip install statekit\[arrow\]") as caught:
        call(state)
    assert f"needs {package}" in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_a_column_that_needs_pyarrow_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = pa.array(["a"]).dictionary_encode()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ColumnError, match=r"pip install statekit\[arrow\]"):
        World().count.add_many(keys)


# ---- What cannot be copied or pickled


def test_what_stands_for_something_in_this_process_cannot_be_copied(tmp_path: Path) -> None:
    world = World()
    kv, count = world.kv, world.count
    job = kv.checkpoint_async(tmp_path)
    told = {
        kv: "Open a provider in the other process",
        count: "Declare it on a provider of the other process",
        world.numbers: "Declare it on a provider",
        world.timers: "Declare it on a provider",
        world.best: "Declare it on a provider",
        job: "Pass on what wait() gives",
        kv._residence.store: "Make one in the other process",
        count._raw: "Ask a store of the other process",
    }
    for thing, advice in told.items():
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(KindError, match=re.escape(advice)) as caught:
                duplicate(thing)
            assert "cannot be copied or pickled" in str(caught.value)
            assert isinstance(caught.value, TypeError)


def test_a_copy_of_what_is_under_a_key_is_the_same_place() -> None:
    kv = World().kv
    keyed = copy.copy(kv.keyed("k"))
    assert keyed.count.get() == 5
    assert keyed["numbers"] == [1, 2, 3]
    handle = copy.copy(keyed.count)
    handle.add(1)
    assert kv["count"]["k"] == 6
    for thing in (keyed, handle):
        with pytest.raises(KindError, match="cannot be copied or pickled"):
            pickle.dumps(thing)


# ---- Tables


def test_times_with_and_without_a_zone_stay_apart_in_a_table() -> None:
    kv = sk.open("memory:", key_groups=1, subgroups=1)
    naive, aware = dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
    moments, lists = kv.value("m", dt.datetime), kv.value("l", list[dt.datetime])
    moments.update({"a": naive, "b": aware})
    lists["a"] = [aware, naive]
    times = kv.value("t", dt.time)
    times["a"] = dt.time(1, tzinfo=dt.UTC)
    for state, kind in ((moments, "datetime"), (lists, "datetime"), (times, "time")):
        with pytest.raises(BadValueError, match=rf'{state.name}.*text=\["{kind}"\]'):
            state.to_arrow()
    found = dict(zip(*moments.to_arrow(text=["datetime"]).to_pydict().values(), strict=True))
    assert {key: dt.datetime.fromisoformat(text) for key, text in found.items()} == {
        "a": naive, "b": aware,
    }  # fmt: skip
    texts = lists.to_arrow(text="datetime")["value"].to_pylist()
    assert texts == [[aware.isoformat(), naive.isoformat()]]
    # As msgspec writes it: Z for the offset 0.
    assert times.to_arrow(text=["time"])["value"].to_pylist() == ["01:00:00Z"]
    assert moments.get_many(["a"]).to_arrow(text=["datetime"]).to_pylist() == [naive.isoformat()]


def test_what_no_column_holds_becomes_text() -> None:
    kv = sk.open("memory:", key_groups=1, subgroups=1)
    mixed = kv.value("l", typing.Literal["a", 1])
    mixed.update({"a": "a", "b": 1})
    assert sorted(mixed.to_arrow()["value"].to_pylist()) == ['"a"', "1"]
    large = kv.value("n", Any)
    large["a"] = 2**64 - 1
    assert large.to_arrow()["value"].to_pylist() == [str(2**64 - 1)]
