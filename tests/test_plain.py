"""Plain values say what the typed API says, without its classes, and become the same again."""

import datetime as dt
import decimal
import json
import math
import uuid
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

import statekit as sk
from statekit.errors import BadValueError, KeyTypeError
from statekit.keys import key_codec
from statekit.render import (
    NoColumnError,
    PlainCodec,
    StateSchema,
    key_json,
    key_text,
    parse_key,
    to_json,
)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Click:
    url: str
    ms: int
    tags: set[str] = field(default_factory=set)
    weight: float | None = None


@dataclass(frozen=True)
class Spot:
    x: int
    y: int


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Address(TypedDict, total=False):
    street: str
    number: int


@dataclass
class Tree:
    name: str
    children: list["Tree"] = field(default_factory=list)
    parent: "Tree | None" = None


NOW = dt.datetime(2026, 11, 16, 12, 30, 1, 250000, tzinfo=dt.UTC)
TREE = Tree("a", [Tree("b", [Tree("c")]), Tree("d", parent=Tree("e"))])

# hint, value, its plain form
CASES: list[tuple[Any, Any, Any]] = [
    (int, 7, 7),
    (int, -(2**63), -(2**63)),
    (float, 1.5, 1.5),
    (float, math.inf, "Infinity"),
    (float, -math.inf, "-Infinity"),
    (bool, True, True),
    (str, "zoë", "zoë"),
    (bytes, b"\x00ab", "0x006162"),
    (bytes, b"", "0x"),
    (Any, {"a": [1, None, 2.5]}, {"a": [1, None, 2.5]}),
    (Any, b"ab", {"$bytes": "0x6162"}),
    (Any, {1: "a", (2, "b"): b"c"}, {"$map": [[1, "a"], [[2, "b"], {"$bytes": "0x63"}]]}),
    (Any, {"$bytes": 1}, {"$map": [["$bytes", 1]]}),
    (Any, math.inf, {"$float": "Infinity"}),
    (Any, [NOW, 2**64 - 1], [{"$datetime": NOW.isoformat()}, 2**64 - 1]),
    (dt.datetime, NOW, "2026-11-16T12:30:01.250000+00:00"),
    (dt.datetime, NOW.replace(tzinfo=None), "2026-11-16T12:30:01.250000"),
    (dt.date, NOW.date(), "2026-11-16"),
    (dt.time, NOW.time(), "12:30:01.250000"),
    (dt.timedelta, dt.timedelta(days=1, seconds=1.5), "P1DT1.5S"),
    (uuid.UUID, uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
    (decimal.Decimal, decimal.Decimal("1.50"), "1.50"),
    (Colour, Colour.BLUE, "blue"),
    (Literal["a", 3], 3, 3),
    (int | str | None, None, None),
    (int | str | None, "x", "x"),
    (int | float, 2.0, 2.0),
    (list[int] | dict[str, int], {"a": 1}, {"a": 1}),
    (Click | list[Spot] | None, [Spot(1, 2)], [{"x": 1, "y": 2}]),
    (Click, Click("/", 3, {"b", "a"}), {"url": "/", "ms": 3, "tags": ["a", "b"], "weight": None}),
    (Point, Point(1, 2.0), {"x": 1, "y": 2.0}),
    (Point | dict[str, int], Point(1, 2.0), {"x": 1, "y": 2.0}),
    (Address, {"number": 7}, {"number": 7}),
    (tuple[int, str], (1, "a"), [1, "a"]),
    (tuple[int, ...], (1, 2, 3), [1, 2, 3]),
    (Tree, TREE, asdict(TREE)),
    (Tree | None, TREE, asdict(TREE)),
    (list[int], list(range(70_000)), list(range(70_000))),
    (list[Click], [Click("/", 1)], [{"url": "/", "ms": 1, "tags": [], "weight": None}]),
    (dict[str, list[int]], {"a": [1], "b": []}, {"a": [1], "b": []}),
    (dict[int, float], {7: 1.0, -1: 2.0}, {"7": 1.0, "-1": 2.0}),
    (dict[bytes, str], {b"\xff": "x"}, {"0xff": "x"}),
    (dict[tuple[str, int], Spot], {("a", 1): Spot(1, 2)}, {'["a", 1]': {"x": 1, "y": 2}}),
    (dict[Any, int], {1: 2}, {"$map": [[1, 2]]}),
    (dict[Any, set[int]], {"a": {2, 1}}, {"a": [1, 2]}),
    (set[str], {"b", "a"}, ["a", "b"]),
    (set[Point], {Point(2), Point(1)}, [{"x": 1, "y": 0.5}, {"x": 2, "y": 0.5}]),
    (set[float], {0.0, 1.5}, [0.0, 1.5]),
    (set[tuple[int, str]], {(2, "a"), (1, "b")}, [[1, "b"], [2, "a"]]),
    (dict[str, set[bytes]], {"a": {b"\1"}}, {"a": ["0x01"]}),
    (list[dict[str, set[int]]], [{"a": {2, 1}}, {}], [{"a": [1, 2]}, {}]),
]
IDS = [f"{at}-{hint}" for at, (hint, _, _) in enumerate(CASES)]


def unwrapped(value: Any) -> Any:
    return value.copy() if hasattr(value, "copy") and not is_dataclass(value) else value


@pytest.mark.parametrize(("hint", "value", "plain"), CASES, ids=IDS)
@pytest.mark.parametrize("declare", ["state", "value"])
def test_reads_what_the_typed_api_wrote_and_writes_what_it_reads(
    hint: Any, value: Any, plain: Any, declare: str
) -> None:
    kv = sk.open("memory:")
    typed = getattr(kv, declare)("it", hint)
    typed["k"] = value
    codec = PlainCodec(kv.schemas["it"])
    raw = typed._raw
    ((_, stored),) = typed._residence.scan(raw)
    found = codec.read(stored)
    assert found == plain
    assert json.loads(to_json(found)) == found
    # Back, through JSON, into the same place. The typed API says whether it is the same.
    del typed["k"]
    raw.put_encoded("k", codec.write(json.loads(to_json(plain))))
    assert unwrapped(typed["k"]) == value


@pytest.mark.parametrize(("hint", "value", "plain"), CASES, ids=IDS)
def test_columns_are_what_arrow_gives_back(hint: Any, value: Any, plain: Any) -> None:
    kv = sk.open("memory:")
    typed = kv.state("it", hint)
    typed["k"] = value
    codec = PlainCodec(kv.schemas["it"], "columns")
    ((_, stored),) = typed._residence.scan(typed._raw)
    try:
        column = codec.read(stored)
    except NoColumnError as error:
        codec = PlainCodec(kv.schemas["it"], "columns", text=[error.kind])
        column = codec.read(stored)
    del typed["k"]
    typed._raw.put_encoded("k", codec.write(column))
    assert unwrapped(typed["k"]) == value


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.datetimes(timezones=st.just(dt.UTC))
)
map_keys = st.text() | st.integers(-(2**63), 2**63 - 1) | st.binary() | st.sampled_from(["$map"])
anything = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(map_keys, inner), max_leaves=20
)


@given(value=anything)
def test_anything_goes_through_json_and_comes_back(value: Any) -> None:
    kv = sk.open("memory:")
    typed = kv.value("it", object)
    typed["k"] = value
    stored = typed["k"]
    codec = PlainCodec(typed.schema)
    ((_, data),) = typed._residence.scan(typed._raw)
    typed._raw.put_encoded("k", codec.write(json.loads(to_json(codec.read(data)))))
    assert typed["k"] == stored


def test_nan_is_text() -> None:
    codec = PlainCodec(sk.open("memory:").value("v", float).schema)
    assert codec.read(math.nan) == "NaN"
    assert codec.write("NaN") == b"\0\0\0\0\0\0\xf8\x7f"


def test_timers_are_due_times() -> None:
    kv = sk.open("memory:")
    timers = kv.timers("expiry")
    timers.set("a", 300)
    timers.set("a", 100)
    codec = PlainCodec(kv.schemas["expiry"])
    ((_, stored),) = timers._residence.scan(timers._raw)
    assert codec.read(stored) == [100, 300]
    timers._raw.put_encoded("b", codec.write([5, 4, 5]))
    assert timers["b"] == (4, 5)


def test_fields_that_came_later_are_left_out_and_those_that_went_are_not_shown() -> None:
    @dataclass
    class Before:
        name: str
        gone: int

    @dataclass
    class After:
        name: str
        new: int = 7

    old = sk.open("memory:").value("v", Before)
    old["k"] = Before("a", 1)
    ((_, stored),) = old._residence.scan(old._raw)
    codec = PlainCodec(sk.open("memory:").value("v", After).schema)
    assert codec.read(stored) == {"name": "a"}


def test_an_int_is_read_as_the_float_that_the_schema_has_become() -> None:
    schema = sk.open("memory:").state("v", list[float]).schema
    assert PlainCodec(schema).read(b"\x92\x01\xcb\x3f\xf8\0\0\0\0\0\0") == [1.0, 1.5]


FAULTS: list[tuple[Any, Any, str]] = [
    (int, "7", r"\$ is '7', a str; expected is int"),
    (int, True, r"\$ is True, a bool; expected is int"),
    (int, 2**63, r"expected is int of 64 bits"),
    (int, None, r"\$ is null; expected is int"),
    (float, "x", r"expected is float"),
    (float, 10**400, r"expected is float"),
    (bool, 1, r"\$ is 1, an int; expected is bool"),
    (bytes, "ab", r'expected is bytes in hex, such as "0x6162"'),
    (bytes, "0x6", "bytes in hex"),
    (bytes, "0x61 62", "bytes in hex"),
    (str, "\ud800", "UTF-8"),
    (dt.datetime, "yesterday", "a datetime such as 2026"),
    (dt.date, "2026-13-01", "date in ISO 8601"),
    (uuid.UUID, "7", "expected is uuid"),
    (decimal.Decimal, "1.x", "expected is decimal"),
    (Colour, "green", "expected is one of 'red', 'blue'"),
    (list[int], {"a": 1}, r"\$ is \{'a': 1\}, a dict; expected is a list"),
    (list[int], [1, 2, "x"], r"\$\[2\] is 'x'"),
    (dict[str, list[int]], {"a": [1, None]}, r'\$\["a"\]\[1\] is null; expected is int'),
    (dict[int, int], {"a": 1}, r'\$\["a"\] is \'a\', a str; expected is a key of type int'),
    (dict[int, int], {"1": 1, "01": 2}, "a key that is not there yet"),
    (list[Click], [{"url": "/"}], r"\$\[0\] is .*; expected is an object with the field 'ms'"),
    (Click, {"url": "/", "ms": 1, "x": 2}, r"no field 'x'; Click has url, ms, tags, weight"),
    (Click, {"url": "/", "ms": "1"}, r"\$\.ms is '1', a str; expected is int"),
    (Click, [1], "an object with the fields of Click"),
    (Point, [], "a list of the 2 fields of Point"),
    (Point, {"y": 1.0}, "an object with the field 'x'"),
    (tuple[int, str], [1], "a list of 2"),
    (int | str | None, 1.5, r"expected is int \| str \| None"),
    (Click | None, {"url": "/", "ms": None}, r"\$\.ms is null"),
    (Any, {"$bytes": "xy"}, r'\$\["\$bytes"\]'),
    (Any, [1, 10**30], r"\$\[1\]"),
    (
        Tree,
        {"name": "a", "children": [{"name": "b", "children": [{}]}]},
        r"\.children\[0\]\.children\[0\]",
    ),
]


@pytest.mark.parametrize(("hint", "plain", "message"), FAULTS)
def test_what_does_not_fit_is_named_with_its_path(hint: Any, plain: Any, message: str) -> None:
    codec = PlainCodec(sk.open("memory:").state("it", hint).schema)
    with pytest.raises(BadValueError, match=message) as caught:
        codec.write(plain)
    assert "(state 'it')" in str(caught.value)


def test_a_value_without_end_is_refused() -> None:
    codec = PlainCodec(sk.open("memory:").state("it", Any).schema)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(BadValueError, match="nested"):
        codec.write(deep)


KEYS = [
    ("s", "alice", "alice", "alice"),
    ("s", "7", "7", "7"),
    ("s", "", "", ""),
    ("i", "-7", -7, -7),
    ("b", "0x00ff", b"\x00\xff", "0x00ff"),
    ("(si)", '["a", 7]', ("a", 7), ["a", 7]),
    ("(bs)", '["0x61", "0x61"]', (b"a", "0x61"), ["0x61", "0x61"]),
    ("(s)", '["a"]', ("a",), ["a"]),
]


@pytest.mark.parametrize(("kind", "text", "key", "plain"), KEYS)
def test_keys_as_text(kind: str, text: str, key: Any, plain: Any) -> None:
    codec = key_codec(kind)
    assert parse_key(codec, text) == key
    assert key_text(codec, key) == text
    assert key_json(key) == plain


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("i", "alice", "'alice' is no key of type int. Write 7 or -7"),
        ("i", "9223372036854775808", "does not fit into 64 bits"),
        ("b", "ab", "bytes are written in hex. Write 0x6162"),
        ("(si)", "alice", r'Write a JSON array: \["alice", 7\]'),
        ("(si)", '["a"]', r"tuple\[str, int\]"),
        ("(si)", '["a", "b"]', r"does not fit tuple\[str, int\]"),
        ("(bi)", '["a", 1]', "Write 0x61"),
    ],
)
def test_a_text_that_is_no_key_is_refused_with_what_to_write(
    kind: str, text: str, message: str
) -> None:
    with pytest.raises(KeyTypeError, match=message):
        parse_key(key_codec(kind), text)


def test_a_number_that_no_float_is_equal_to_is_refused() -> None:
    codec = PlainCodec(StateSchema("s", "value", "s", ["list", "float"]))
    assert codec.read(codec.write([2**53, 1])) == [2.0**53, 1.0]
    with pytest.raises(BadValueError, match=r"at \$\[1\].*a number that a float is equal to"):
        codec.write([1, 2**53 + 1])
