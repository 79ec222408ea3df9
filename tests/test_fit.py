"""What is written is what is read: every value of every type, in memory, in a block and at home."""

import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import math
import re
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    TypedDict,
)
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statekit as sk
from statekit.errors import (
    BadValueError,
    ColumnError,
    OverflowStateError,
    SchemaError,
    StateKitError,
)

I64_MIN, I64_MAX = -(2**63), 2**63 - 1
BERLIN = ZoneInfo("Europe/Berlin")


@dataclasses.dataclass
class Click:
    url: str
    at: int = 0


@dataclasses.dataclass
class Tagged(Click):
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    x: float
    y: float = 0.0


@dataclasses.dataclass
class Tree:
    value: int
    left: "Tree | None" = None
    more: list["Tree"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class Cart:
    limit: ClassVar[int] = 5
    items: dict[str, Click]
    spot: Spot | None = None
    total: decimal.Decimal = decimal.Decimal(0)
    count: int = dataclasses.field(init=False, default=3, compare=False)


@dataclasses.dataclass
class Derived:
    """Its __post_init__ gives the same result for the same fields."""

    width: int
    area: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.area = self.width * self.width


@dataclasses.dataclass
class Counting:
    """Its __post_init__ changes what was stored."""

    count: int

    def __post_init__(self) -> None:
        self.count += 1


class Pair(NamedTuple):
    a: int
    b: str = ""


class Triple(Pair):
    @property
    def c(self) -> int:
        return self.a


class Person(TypedDict):
    name: str
    age: NotRequired[int]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"
    CRIMSON = "red"  # noqa: PIE796  (an alias)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    YES = "yes"
    NO = "no"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Text(str):
    pass


class Number(int):
    pass


class Items(list[Any]):
    pass


class Moment(dt.datetime):
    pass


UserId = NewType("UserId", int)


# ---- An oracle: the same value, of the same class, at every depth


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, decimal.Decimal):
        return a.as_tuple() == b.as_tuple()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.items(), b.items()))  # in this order
    if isinstance(a, set):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    if dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a)]
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, dt.datetime | dt.time):
        return a == b and a.fold == b.fold and a.tzinfo == b.tzinfo
    return bool(a == b)


def equal(a: Any, b: Any) -> bool:
    """The same, whatever the classes."""
    if isinstance(a, dt.datetime) and isinstance(b, dt.datetime) and a.tzinfo is not None:
        return a.timestamp() == b.timestamp()  # Python finds no two datetimes in a fold equal
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        is_tuple = isinstance(a, tuple), isinstance(b, tuple)
        return is_tuple[0] == is_tuple[1] and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(map(equal, a.items(), b.items()))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        names = [field.name for field in dataclasses.fields(a)]
        return all(equal(getattr(a, name), getattr(b, name)) for name in names)
    return bool(a == b) or (a != a and b != b)


# ---- Types, and values of them

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
INTS = st.integers(I64_MIN, I64_MAX)
FLOATS = st.floats()
TIMES = st.times(timezones=st.none() | st.just(dt.UTC)).map(lambda t: t.replace(fold=0))
MOMENTS = st.datetimes(timezones=st.none() | st.just(dt.UTC)).map(lambda d: d.replace(fold=0))
JSON = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXTS | st.binary(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | INTS, inner, max_size=3),
    max_leaves=6,
)
CLICKS = st.builds(Click, TEXTS, INTS)
SPOTS = st.builds(Spot, FLOATS, FLOATS)


@st.composite
def carts(draw: st.DrawFn) -> Cart:
    cart = Cart(
        items=draw(st.dictionaries(TEXTS, CLICKS, max_size=2)),
        spot=draw(st.none() | SPOTS),
        total=draw(st.decimals()),
    )
    cart.count = draw(INTS)
    return cart


SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, INTS),
    (float, FLOATS),
    (bool, st.booleans()),
    (str, TEXTS),
    (bytes, st.binary(max_size=40)),
    (None, st.none()),
    (dt.datetime, MOMENTS),
    (dt.date, st.dates()),
    (dt.time, TIMES),
    (dt.timedelta, st.timedeltas()),
    (uuid.UUID, st.uuids()),
    (decimal.Decimal, st.decimals()),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
    (Word, st.sampled_from(Word)),
    (Access, st.sampled_from([Access.READ, Access.READ | Access.WRITE, Access(0)])),
    (Literal["a", 1, None], st.sampled_from(["a", 1, None])),
    (UserId, INTS),
    (Annotated[str, "a note"], TEXTS),
]
RECORDS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (Click, CLICKS),
    (Tagged, st.builds(Tagged, TEXTS, INTS, st.lists(TEXTS, max_size=2))),
    (Spot, SPOTS),
    (Cart, carts()),
    (Derived, st.builds(Derived, st.integers(-1000, 1000))),
    (Tree, st.recursive(st.builds(Tree, INTS), lambda t: st.builds(Tree, INTS, st.none() | t))),
    (Pair, st.builds(Pair, INTS, TEXTS)),
    (Triple, st.builds(Triple, INTS, TEXTS)),
    (Person, st.fixed_dictionaries({"name": TEXTS}, optional={"age": INTS})),
    (Any, JSON),
    (object, JSON),
    (list, st.lists(JSON, max_size=3)),
    (dict, st.dictionaries(TEXTS, JSON, max_size=3)),
]
MAP_KEYS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, TEXTS),
    (int, INTS),
    (bytes, st.binary(max_size=10)),
    (tuple[str, int], st.tuples(TEXTS, INTS)),
]
MEMBERS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    *MAP_KEYS,
    (float, st.floats(allow_nan=False).map(lambda x: x + 0.0)),
    (Color, st.sampled_from(Color)),
    (dt.date, st.dates()),
    (tuple[int, ...], st.lists(INTS, max_size=3).map(tuple)),
]
Typed = tuple[Any, st.SearchStrategy[Any]]


def containers(inner: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    """Types made of types, with values."""
    return st.one_of(
        inner.map(lambda t: (list[t[0]], st.lists(t[1], max_size=3))),
        inner.map(lambda t: (tuple[t[0], ...], st.lists(t[1], max_size=3).map(tuple))),
        inner.map(lambda t: (Optional[t[0]], st.none() | t[1])),  # noqa: UP045
        st.tuples(inner, inner).map(
            lambda two: (tuple[two[0][0], two[1][0]], st.tuples(two[0][1], two[1][1]))
        ),
        st.tuples(st.sampled_from(MAP_KEYS), inner).map(
            lambda two: (
                dict[two[0][0], two[1][0]],
                st.dictionaries(two[0][1], two[1][1], max_size=3),
            )
        ),
        st.sampled_from(MEMBERS).map(lambda t: (set[t[0]], st.sets(t[1], max_size=3))),
        st.tuples(inner, inner).map(made_dataclass),
    )


def made_dataclass(two: tuple[Typed, Typed]) -> Typed:
    cls = dataclasses.make_dataclass("Made", [("one", two[0][0]), ("other", two[1][0])])
    return cls, st.builds(cls, two[0][1], two[1][1])


TYPES: st.SearchStrategy[Typed] = st.recursive(
    st.sampled_from([*SCALARS, *RECORDS]), containers, max_leaves=4
)


def write(kv: sk.KVProvider, hint: Any, value: Any, number: int) -> Callable[[sk.KVProvider], Any]:
    """Writes a value in all ways. Returns a function that reads it in all ways."""
    declare: dict[str, Callable[[sk.KVProvider], Any]] = {
        "value": lambda kv: kv.value(f"value {number}", hint),
        "put_many": lambda kv: kv.value(f"put_many {number}", hint),
        "list": lambda kv: kv.list(f"list {number}", hint),
        "map": lambda kv: kv.map(f"map {number}", str, hint),
        "extend": lambda kv: kv.list(f"extend {number}", hint),
    }
    declare["value"](kv)["k"] = value
    declare["put_many"](kv).put_many(["k"], [value])
    declare["list"](kv)["k"].append(value)
    declare["map"](kv)["k"].update(k=value)
    declare["extend"](kv)["k"].extend([value, value])

    def read(kv: sk.KVProvider) -> dict[str, Any]:
        return {
            "value": declare["value"](kv)["k"],
            "get_many": declare["put_many"](kv).get_many(["k"])[0],
            "list": declare["list"](kv)["k"].copy()[0],
            "map": declare["map"](kv)["k"].copy()["k"],
            "extend": declare["extend"](kv)["k"][0:2][1],
        }

    return read


def drawn(data: st.DataObject) -> list[tuple[Any, Any]]:
    found = []
    for _ in range(data.draw(st.integers(1, 4), "how many")):
        hint, values = data.draw(TYPES, "type")
        found.append((hint, data.draw(values, "value")))
    return found


def check(found: dict[str, Any], hint: Any, value: Any) -> None:
    for how, back in found.items():
        assert same(back, value), (how, hint, value, back)


@settings(max_examples=150)
@given(data=st.data())
def test_every_value_of_every_type_comes_back_as_it_was(data: st.DataObject) -> None:
    with sk.open("memory:", key_groups=1, subgroups=1) as kv:
        for number, (hint, value) in enumerate(drawn(data)):
            check(write(kv, hint, value, number)(kv), hint, value)


@settings(max_examples=30)
@given(data=st.data())
def test_every_value_comes_back_from_a_checkpoint(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("checkpoint")
    cases = drawn(data)
    with sk.open("memory:", key_groups=1, subgroups=1) as kv:
        reads = [write(kv, hint, value, number) for number, (hint, value) in enumerate(cases)]
        kv.checkpoint(place)
    with sk.restore(place, lazy=data.draw(st.booleans(), "lazy")) as kv:
        for read, (hint, value) in zip(reads, cases, strict=True):
            check(read(kv), hint, value)


@settings(max_examples=15)
@given(data=st.data())
def test_every_value_comes_back_from_a_home_that_is_opened_again(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    url = f"rocksdb:{tmp_path_factory.mktemp('home')}/db"
    cases = drawn(data)
    with sk.open(url, key_groups=1, subgroups=1) as kv:
        reads = [write(kv, hint, value, number) for number, (hint, value) in enumerate(cases)]
    with sk.open(url) as kv:
        for read, (hint, value) in zip(reads, cases, strict=True):
            check(read(kv), hint, value)


# ---- Values that are almost of the type

POOL: list[Any] = [
    None, True, False, 0, 1, -1, I64_MAX, I64_MIN, 2**53 + 1, 2**63, 2**64, 10**400, 0.0, -0.0, 1.0,
    1.5, math.nan, math.inf, 1j, "", "a", "red", "yes", "\ud800", b"", b"ab", bytearray(b"ab"),
    memoryview(b"ab"), memoryview(array.array("i", [1])), array.array("q", [1]), Text("a"),
    Number(5), Items([1]), Items(["a"]), Level.LOW, Word.YES, Color.RED, Access.READ,
    Access.READ | Access.WRITE, np.int64(3), np.uint64(2**63), np.float32(0.1), np.float64(1.5),
    np.longdouble("0.1"), np.bool_(True), np.str_("a"), np.array([1, 2]), np.array(5), np.nan,
    np.datetime64("2024-01-01"), decimal.Decimal("0.5"), decimal.Decimal("0.1"),
    decimal.Decimal("NaN"), fractions.Fraction(1, 2), fractions.Fraction(1, 3),
    dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
    dt.datetime(2024, 10, 27, 2, 30, fold=1),
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2))),
    dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=2))), Moment(2024, 1, 1),
    pd.Timestamp("2024-01-01"), pd.Timestamp("2024-01-01T00:00:00.000000001"), pd.NaT,
    pd.Timestamp("2024-01-01", tz="Europe/Berlin"), pd.Timedelta("1s"), pd.Timedelta("1ns"), pd.NA,
    dt.date(2024, 1, 1), dt.time(1), dt.time(1, fold=1), dt.time(1, tzinfo=dt.UTC),
    dt.time(1, tzinfo=BERLIN), dt.time(1, tzinfo=dt.timezone(dt.timedelta(seconds=90))),
    dt.timedelta(1), uuid.UUID(int=5), str(uuid.UUID(int=5)), Click("u"), Tagged("u"), Click(5),  # type: ignore[arg-type]
    Click("u", True), Click("u", np.int64(3)), Click("u", 2**63), Click(Word.YES), Click(Text("a")),  # type: ignore[arg-type]
    Spot(1), Spot(2**53 + 1), Spot(-0.0), Spot(np.float32(0.5)), Counting(1), Derived(2),  # type: ignore[arg-type]
    Tree(1, Tree(2)), Tree(1, Tree(2.0)), Cart(items={"a": Tagged("u")}), Pair(1), Triple(1),  # type: ignore[arg-type]
    Pair(True), (1, "a"), (1, ""), ("a", 1), (1.0, 2), [], [1], [True], [1.0], ["a"], [[1]], [(1,)],
    [None], [Click("u")], [Tagged("u")], [2**63], [math.nan], (), (1, 2), {1}, {1.0}, {"a"}, set(),
    frozenset({1}), {(1, 2)}, {}, {"name": "n"}, {"name": "n", "age": 1}, {"name": "n", "x": 1},
    {"name": "n", "age": True}, {"age": 1}, {"a": 1}, {"a": True}, {"a": (1,)}, {1: 1}, {True: 1},
    {(1, "a"): 1}, {Pair(1, "a"): 1}, {None: 1}, {1.5: 1}, {b"a": 1}, {frozenset({1}): 1},
    collections.OrderedDict(a=1), collections.Counter("aa"), collections.defaultdict(int, a=1),
    types.MappingProxyType({"a": 1}), collections.deque([1]), range(3), object(), int, len, ...,
    msgspec.msgpack.Ext(5, b"x"), msgspec.msgpack.Ext(-83, bytes(8)), msgspec.Raw(b"\x01"),
]  # fmt: skip
HINTS: list[Any] = [
    int, float, bool, str, bytes, None, dt.datetime, dt.date, dt.time, dt.timedelta, uuid.UUID,
    decimal.Decimal, Color, Level, Word, Access, Literal["a", 1], Click, Tagged, Spot, Tree, Cart,
    Counting, Derived, Pair, Triple, Person, Any, UserId, int | None, float | None, int | float,
    bool | int, str | int, Click | None, Color | None, dt.datetime | None, dt.date | None,
    decimal.Decimal | float, list[int] | dict[str, int], list[int], list[float], list[str],
    list[Click], list[Any], list[int | None], set[int], set[float], set[Any], set[tuple[int, int]],
    dict[str, int], dict[int, int], dict[str, Any], dict[Any, int], dict[tuple[int, str], int],
    dict[str, Click], tuple[int, str], tuple[float, float], tuple[int, ...], tuple[Click, ...],
    tuple[()], list, dict, set,
]  # fmt: skip
ids = [str(hint) for hint in HINTS]


@pytest.mark.parametrize("hint", HINTS, ids=ids)
def test_a_value_is_stored_as_something_equal_or_refused(hint: Any) -> None:
    kv = sk.open("memory:", key_groups=1, subgroups=1)
    state, maps = kv.value("things", hint), kv.map("maps", str, hint)
    for value in POOL:
        try:
            state["key"] = value
        except (BadValueError, OverflowStateError) as error:
            told, named = str(error), (error.state, error.key)
            assert "(state 'things', key 'key'). " in told
            assert named == ("things", "key")
            assert "key" not in state
            with pytest.raises((BadValueError, OverflowStateError, ColumnError), match="things"):
                state.put_many(["key"], [value])
        else:
            back = state.pop("key")
            assert equal(back, value), (value, back)
            state.put_many(["key"], [value])
            assert same(state.pop("key"), back), value
            state["key"] = back  # what was read is of the type, so it stays as it is
            assert same(state.pop("key"), back)
        if hint in (list, dict, set) or getattr(hint, "__origin__", None) in (list, dict, set):
            continue  # live containers accept whatever list(), dict() and set() accept
        try:
            maps["key"]["a"] = value
        except (BadValueError, OverflowStateError):
            assert maps["key"] == {}
        else:
            back = maps["key"].pop("a")
            assert equal(back, value), (value, back)


@pytest.mark.parametrize("hint", HINTS, ids=ids)
def test_items_of_a_container_are_taken_as_if_alone(hint: Any) -> None:
    kv = sk.open("memory:", key_groups=1, subgroups=1)
    alone, lists, maps = kv.list("alone", hint), kv.list("lists", hint), kv.map("maps", str, hint)
    for value in POOL:
        try:
            alone["key"] = []
            alone["key"].append(value)
            expected = alone["key"].copy()[0]
        except (BadValueError, OverflowStateError):
            calls: list[Callable[[], Any]] = [
                lambda: lists["key"].extend([value]),  # noqa: B023
                lambda: lists.__setitem__("key", [value]),  # noqa: B023
                lambda: maps["key"].update(a=value),  # noqa: B023
            ]
            for call in calls:
                with pytest.raises((BadValueError, OverflowStateError)):
                    call()
        else:
            lists["key"] = [value]
            lists["key"].extend([value])
            maps["key"].update(a=value)
            assert same(lists["key"].copy(), [expected, expected]), value
            assert same(maps["key"].copy(), {"a": expected}), value


@settings(max_examples=150)
@given(data=st.data())
def test_what_is_exact_stays_so_beside_what_is_converted(data: st.DataObject) -> None:
    hint, values = data.draw(TYPES, "type")
    value = data.draw(values, "value")
    state = sk.open("memory:", key_groups=1, subgroups=1).value("s", tuple[int, hint, float])
    state["k"] = (True, value, 1)  # type: ignore[assignment]
    assert same(state["k"], (1, value, 1.0))


# ---- What is refused, and how it is said


@dataclasses.dataclass
class Deep:
    clicks: list[Click]
    people: dict[str, Person]
    pair: tuple[int, float] = (0, 0.0)


REFUSED: list[tuple[Any, Any, str]] = [
    (Click, Tagged("u"),
     "Tagged(url='u', at=0, tags=[]) is of the subclass Tagged of Click, and would come back as "
     "Click (state 's', key 'k'). Declare the state with Tagged, or pass a value of type Click."),
    (Click | None, Tagged("u"), "is of the subclass Tagged of Click"),
    (Pair, Triple(1), "is of the subclass Triple of Pair"),
    (Deep, Deep([Click("u"), Tagged("v")], {}),
     "at .clicks[1] of what was given, is of the subclass Tagged of Click"),
    (Deep, Deep([Click("u", "x")], {}),  # type: ignore[arg-type]
     "'x', at .clicks[0].at of what was given, is of type str, not int (state 's', key 'k'). "
     "Pass a value of type int."),
    (Deep, Deep([], {"a": {"name": "n", "x": 1}}),  # type: ignore[typeddict-unknown-key]
     "at .people['a'] of what was given, has the key 'x', which Person does not have"),
    (Deep, Deep([], {5: {"name": "n"}}),  # type: ignore[dict-item]
     "5, a key at .people of what was given, is of type int, not str"),
    (Deep, Deep([], {}, (1, 2**53 + 1)),
     "at .pair[1] of what was given, has no equal float; the nearest one is 9007199254740992.0"),
    (Person, {"name": "n", "x": 1},
     "has the key 'x', which Person does not have (state 's', key 'k'). Leave it out, or add it"),
    (Person, {"age": 1}, "lacks the key 'name' of Person"),
    (Counting, Counting(1), "would not come back as it is"),
    (dt.datetime, dt.datetime(2024, 10, 27, 2, 30, fold=1), "has fold=1"),
    (dt.datetime, dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=2))),
     "is not between the years 1 and 9999 in UTC"),
    (dt.datetime, pd.Timestamp("2024-01-01T00:00:00.000000001"), "has nanoseconds"),
    (dt.date, dt.datetime(2024, 1, 1),
     "is of type datetime, not date (state 's', key 'k'). Pass its .date()."),
    (dt.time, dt.time(1, tzinfo=BERLIN), "has a time zone that is no offset of whole minutes"),
    (float, 2**53 + 1, "has no equal float; the nearest one is 9007199254740992.0"),
    (float, decimal.Decimal("0.1"), "has no equal float; the nearest one is 0.1"),
    (float, 10**400, "is larger than any float"),
    (int, 2**63, "9223372036854775808 does not fit into 64 bits, which is -2**63 to 2**63 - 1 "
     "(state 's', key 'k'). Declare it as Decimal, float or str, or pass a smaller int."),
    (Click, Click("u", 2**63), "at .at of what was given, does not fit into 64 bits"),
    (Click, Click("\ud800"), "at .url of what was given, has no UTF-8 form"),
    (Any, {"a": [1, (2,)]},
     "(2,), at ['a'][1] of what was given, is of type tuple, which an Any would not give back"),
    (Any, Click("u"), "is of type Click, which an Any would not give back"),
    (Any, {1}, "is of type set, which an Any"),
    (Any, dt.datetime(2024, 1, 1), "is of type datetime, which an Any"),
    (Any, Color.RED, "is of type Color, which an Any"),
    (set[int], {"a"}, "'a', a member of what was given, is of type str, not int"),
    (Literal["a", 1], "b", "'b' is none of Literal['a', 1]"),
    (Color, "red", "is of type str, not Color (state 's', key 'k'). Pass a member of Color."),
    (tuple[int, str], (1, "a", 2), "has 3 items, not 2"),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "wrong", "told"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_change_is_refused_with_state_key_place_and_advice(
    hint: Any, wrong: Any, told: str
) -> None:
    state = sk.open("memory:", key_groups=1, subgroups=1).value("s", hint)
    with pytest.raises(StateKitError, match=re.escape(told)) as caught:
        state["k"] = wrong
    assert "(state 's', key 'k')" in str(caught.value)
    assert "k" not in state


def test_a_field_that_was_never_set_is_named() -> None:
    state = sk.open("memory:", key_groups=1, subgroups=1).value("s", Derived)
    half = object.__new__(Derived)
    half.width = 1
    with pytest.raises(BadValueError, match="has nothing in its field 'area'"):
        state["k"] = half


def test_a_class_of_the_same_name_is_told_from_the_one_declared() -> None:
    state = sk.open("memory:", key_groups=1, subgroups=1).value("s", Click)
    other = dataclasses.make_dataclass("Click", [("url", str), ("at", int)])
    with pytest.raises(BadValueError, match="is of another class that is called Click"):
        state["k"] = other("u", 1)


def test_only_fields_are_stored() -> None:
    state = sk.open("memory:", key_groups=1, subgroups=1).value("s", Click)
    click = Click("u")
    click.cached = 5  # type: ignore[attr-defined]  # as functools.cached_property does
    state["k"] = click
    assert state["k"] == click
    assert not hasattr(state["k"], "cached")


def test_a_value_that_contains_itself_is_refused() -> None:
    kv = sk.open("memory:", key_groups=1, subgroups=1)
    endless: list[Any] = []
    endless.append(endless)
    tree = Tree(1)
    tree.left = tree
    for hint, value in ((Any, endless), (list[Any], endless), (Tree, tree)):
        with pytest.raises(BadValueError, match="nested too deeply or contains itself"):
            kv.value(f"s {hint}", hint)["k"] = value


def test_a_tree_is_stored_only_if_it_can_be_read() -> None:
    state = sk.open("memory:", key_groups=1, subgroups=1).value("s", Tree)
    tree, depth = Tree(0), 0
    while True:
        tree, depth = Tree(depth, tree), depth + 1
        try:
            state["k"] = tree
        except BadValueError:
            break
    assert depth > 100
    found: Tree | None = state["k"]
    seen = 0
    while found is not None:
        found, seen = found.left, seen + 1
    assert seen == depth


def test_constraints_of_msgspec_are_checked_before_a_value_is_stored() -> None:
    positive = Annotated[int, msgspec.Meta(gt=0)]
    cls = dataclasses.make_dataclass("Limited", [("size", positive)])
    state = sk.open("memory:", key_groups=1, subgroups=1).value("s", cls)
    with pytest.raises(BadValueError, match="Expected int >= 1"):
        state["k"] = cls(-1)
    state["k"] = cls(1)
    assert state["k"] == cls(1)


def test_annotated_containers_are_live() -> None:
    kv = sk.open("memory:", key_groups=1, subgroups=1)
    numbers = kv.state("numbers", Annotated[list[int], "a note"])
    numbers["k"].append(1)
    Tags = NewType("Tags", set[str])
    tags = kv.state("tags", dict[str, Tags])
    tags["k"]["a"].add("x")
    assert (numbers["k"].copy(), tags["k"].copy()) == ([1], {"a": {"x"}})


def test_members_that_are_equal_are_one_at_any_depth() -> None:
    kv = sk.open("memory:", key_groups=1, subgroups=1)
    pairs = kv.state("pairs", set[tuple[float, float]])
    pairs["k"] |= {(0.0, 1.0)}
    pairs["k"].add((-0.0, 1.0))
    assert (0, True) in pairs["k"]
    assert (len(pairs["k"]), pairs["k"].copy()) == (1, {(0.0, 1.0)})


def test_tuples_are_tuples_among_keys_of_any_type() -> None:
    kv = sk.open("memory:", key_groups=1, subgroups=1)
    members, maps = kv.state("s", set), kv.map("m", Any, int)
    lists = kv.state("l", dict[Any, list[int]])
    members["k"].add((1, "a"))
    members["k"].update([(3,), 4])
    maps["k"][1, 2] = 5
    maps["k"].update({(3,): 6})
    lists["k"][1, 2].append(7)
    assert list(members["k"]) == [(1, "a"), (3,), 4]
    assert members["k"] == {(1, "a"), (3,), 4}
    assert (repr(members["k"]), members["k"].pop()) == ("{(1, 'a'), (3,), 4}", (1, "a"))
    assert (list(maps["k"]), maps["k"][1, 2], repr(maps["k"])) == (
        [(1, 2), (3,)], 5, "{(1, 2): 5, (3,): 6}",
    )  # fmt: skip
    assert maps["k"].popitem() == ((3,), 6)
    assert dict(lists["k"].items()) == {(1, 2): [7]}
    for wrong in ([1], {1: 2}, frozenset({1}), (1, (2,))):
        with pytest.raises(BadValueError, match=r"state 's', key 'k'"):
            members["k"].add(wrong)


@pytest.mark.parametrize(
    "item", [Spot, Click | None, tuple[int, tuple[int, int]], list[int], dict[str, int], Person]
)
def test_what_cannot_be_a_member_is_refused_when_the_set_is_declared(item: Any) -> None:
    kv = sk.open("memory:", key_groups=1, subgroups=1)
    with pytest.raises(SchemaError, match=r"cannot be in a set that is alive.*kv\.value\(name"):
        kv.state("s", set[item])
    with pytest.raises(SchemaError, match="cannot be in a set that is alive"):
        kv.state("s", dict[str, set[item]])
    assert "s" not in kv.schemas


def test_an_aware_datetime_comes_back_as_the_same_moment_in_utc() -> None:
    state = sk.open("memory:", key_groups=1, subgroups=1).value("s", dt.datetime)
    for fold in (0, 1):
        moment = dt.datetime(2024, 10, 27, 2, 30, fold=fold, tzinfo=BERLIN)
        state["k"] = moment
        assert state["k"].timestamp() == moment.timestamp()
        assert state["k"].tzinfo is dt.UTC


def test_enums_whose_values_are_too_large_are_refused_when_they_are_declared() -> None:
    large = enum.Enum("large", {"A": 2**63})
    with pytest.raises(SchemaError, match="large"):
        sk.open("memory:").value("s", large)


def test_flags_are_read_from_a_checkpoint_without_their_class(tmp_path: Path) -> None:
    from statekit.render import PlainCodec

    kv = sk.open("memory:", key_groups=1, subgroups=1)
    state = kv.value("s", Access)
    state["k"] = Access.READ | Access.WRITE
    codec = PlainCodec(kv.schemas["s"])
    stored = state._raw.get_encoded("k")
    assert stored is not None
    assert codec.read(stored) == 3
    assert codec.write(3) == stored
    assert state.to_arrow()["value"].to_pylist() == [3]
