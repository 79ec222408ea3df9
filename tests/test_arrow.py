"""States as Arrow: every declared type, chains, key-groups, and other people's readers."""

import dataclasses
import datetime as dt
import enum
import gc
import json
import math
import sys
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statekit as sk
from statekit.checkpoint.reader import Checkpoint
from statekit.errors import (
    ArgumentError,
    BadValueError,
    CorruptBlockError,
    DamagedError,
    MissingPackageError,
    SchemaError,
)
from statekit.native.ttl import TTL
from statekit.render.columns import StateColumns
from statekit.state.export import _pieces

I64 = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
US = dt.timedelta(microseconds=1)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Person(TypedDict):
    name: str
    age: NotRequired[int]


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal
    sizes: list[int | None] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Order:
    id: uuid.UUID
    at: dt.datetime
    lines: list[Line]
    by: Person | None = None
    where: dict[str, Point] = dataclasses.field(default_factory=dict)
    colour: Colour = Colour.RED


@dataclasses.dataclass
class Tree:
    name: str
    children: list["Tree"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Nothing:
    pass


DATETIMES = st.datetimes(timezones=st.just(dt.UTC))
TIMEDELTAS = st.timedeltas(-(2**62) * US, 2**62 * US)
DECIMALS = st.decimals(-(10**19), 10**19, places=18) | st.decimals(-100, 100, places=2)
POINTS = st.builds(Point, I64, st.floats(allow_nan=False))
PEOPLE = st.fixed_dictionaries({"name": TEXTS}, optional={"age": I64})
LINES = st.builds(Line, TEXTS, DECIMALS, st.lists(st.none() | I64, max_size=3))
ORDERS = st.builds(
    Order,
    st.uuids(),
    DATETIMES,
    st.lists(LINES, max_size=2),
    st.none() | PEOPLE,
    st.dictionaries(TEXTS, POINTS, max_size=2),
    st.sampled_from(Colour),
)
ANY = st.none() | st.booleans() | I64 | TEXTS | st.lists(I64, max_size=3)
UTC, UUID, DECIMAL = pa.timestamp("us", "UTC"), pa.string(), pa.decimal128(38, 18)
POINT = pa.struct([("x", pa.int64()), ("y", pa.float64())])
PERSON = pa.struct([("name", pa.string()), ("age", pa.int64())])
LINE = pa.struct([("sku", pa.string()), ("price", DECIMAL), ("sizes", pa.list_(pa.int64()))])
ORDER = pa.struct(
    [
        ("id", UUID), ("at", UTC), ("lines", pa.list_(LINE)), ("by", PERSON),
        ("where", pa.map_(pa.string(), POINT)), ("colour", pa.string()),
    ]
)  # fmt: skip

# hint, the type of its column, values that the column holds
TYPES: dict[str, tuple[Any, Any, st.SearchStrategy[Any]]] = {
    "int": (int, pa.int64(), I64),
    "float": (float, pa.float64(), st.floats(allow_nan=False)),
    "bool": (bool, pa.bool_(), st.booleans()),
    "str": (str, pa.string(), TEXTS),
    "bytes": (bytes, pa.binary(), st.binary(max_size=300)),
    "none": (None, pa.null(), st.none()),
    "datetime": (dt.datetime, UTC, DATETIMES),
    "date": (dt.date, pa.date32(), st.dates()),
    "time": (dt.time, pa.time64("us"), st.times().map(lambda t: t.replace(fold=0))),
    "timedelta": (dt.timedelta, pa.duration("us"), TIMEDELTAS),
    "uuid": (uuid.UUID, UUID, st.uuids()),
    "decimal": (Decimal, DECIMAL, DECIMALS),
    "enum": (Colour, pa.string(), st.sampled_from(Colour)),
    "intenum": (Level, pa.int64(), st.sampled_from(Level)),
    "flags": (Right, pa.int64(), st.sampled_from([Right.READ, Right.READ | Right.WRITE])),
    "literal": (Literal["a", "b"], pa.string(), st.sampled_from(["a", "b"])),
    "bools": (Literal[True], pa.bool_(), st.just(True)),
    "optional": (int | None, pa.int64(), st.none() | I64),
    "optional text": (str | None, pa.string(), st.none() | TEXTS),
    "optional point": (Point | None, POINT, st.none() | POINTS),
    "tuple": (
        tuple[str, int],
        pa.struct([("0", pa.string()), ("1", pa.int64())]),
        st.tuples(TEXTS, I64),
    ),
    "tuples": (
        tuple[dt.date, ...],
        pa.list_(pa.date32()),
        st.lists(st.dates(), max_size=4).map(tuple),
    ),
    "list": (list[bool], pa.list_(pa.bool_()), st.lists(st.booleans(), max_size=10)),
    "lists": (
        list[list[str | None]],
        pa.list_(pa.list_(pa.string())),
        st.lists(st.lists(st.none() | TEXTS, max_size=3), max_size=3),
    ),
    "set": (set[int], pa.list_(pa.int64()), st.sets(I64, max_size=5)),
    "dict": (
        dict[str, list[float]],
        pa.map_(pa.string(), pa.list_(pa.float64())),
        st.dictionaries(TEXTS, st.lists(st.floats(allow_nan=False), max_size=3), max_size=3),
    ),
    "dict of tuples": (
        dict[tuple[str, int], Point],
        pa.map_(pa.struct([("0", pa.string()), ("1", pa.int64())]), POINT),
        st.dictionaries(st.tuples(TEXTS, I64), POINTS, max_size=3),
    ),
    "namedtuple": (Point, POINT, POINTS),
    "typeddict": (Person, PERSON, PEOPLE),
    "dataclass": (Order, ORDER, ORDERS),
    "any": (Any, pa.string(), ANY),
    "union": (int | str, pa.string(), I64 | TEXTS),
    "mixed literal": (Literal["a", 1], pa.string(), st.sampled_from(["a", 1])),
    "tree": (Tree, pa.string(), st.just(Tree("a", [Tree("b")]))),
    "no fields": (Nothing, pa.string(), st.just(Nothing())),
}
AS_JSON = ("any", "union", "mixed literal", "tree", "no fields")
by_type = pytest.mark.parametrize("name", TYPES)


def plain(value: Any) -> Any:
    """What pyarrow gives for a value: the oracle, which knows nothing of how it is stored."""
    match value:
        case enum.Enum():
            return value.value
        case uuid.UUID():
            return str(value)
        case tuple() if hasattr(value, "_asdict"):
            return {name: plain(part) for name, part in value._asdict().items()}
        case tuple():
            return {str(at): plain(part) for at, part in enumerate(value)}
        case list():
            return [plain(part) for part in value]
        case set():
            return sorted(map(plain, value))
        case dict() if value.keys() <= {"name", "age"} and "name" in value:
            return {"name": value["name"], "age": value.get("age")}
        case dict():
            return [(plain(key), plain(part)) for key, part in value.items()]
        case _ if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return {one.name: plain(getattr(value, one.name)) for one in fields}
    return value


def plain_of(name: str, value: Any) -> Any:
    if name in AS_JSON:
        return json.dumps(
            dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value,
            ensure_ascii=False,
        )
    return list(value) if name == "tuples" else plain(value)


def small(**options: Any) -> sk.KVProvider:
    return sk.open("memory:", key_groups=4, subgroups=2, **options)


def rows_of(batches: Any) -> dict[Any, Any]:
    """{key: value} of batches, or of a table; a key may come only once."""
    found: dict[Any, Any] = {}
    for batch in batches.to_batches() if isinstance(batches, pa.Table) else batches:
        batch.validate(full=True)
        *keys, values = (batch.column(name).to_pylist() for name in batch.schema.names)
        for key, value in zip(zip(*keys, strict=True), values, strict=True):
            key = key[0] if len(key) == 1 else key
            assert key not in found
            found[key] = value
    return found


def stored(kv: sk.KVProvider, tmp: Path) -> Checkpoint:
    return kv.checkpoint(tmp)


# ---- Types


@by_type
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_declared_type_comes_out_as_it_went_in(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hint, column, values = TYPES[name]
    kv = small()
    state = kv.value("s", hint)
    given_values = data.draw(st.lists(values, max_size=20))
    state.update({f"k{at}": value for at, value in enumerate(given_values)})
    expected = {f"k{at}": plain_of(name, value) for at, value in enumerate(given_values)}
    checkpoint = stored(kv, tmp_path_factory.mktemp("c"))
    assert checkpoint.arrow_schema("s") == pa.schema([("key", pa.string()), ("value", column)])
    batches = list(checkpoint.to_arrow("s"))
    assert all(batch.schema == checkpoint.arrow_schema("s") for batch in batches)
    assert rows_of(batches) == expected
    live = state.to_arrow()
    assert live.schema == checkpoint.arrow_schema("s")
    assert rows_of(live) == expected
    found = state.get_many([*expected, "missing"]).to_arrow().to_pylist()
    assert found == [*expected.values(), None]


@pytest.mark.parametrize("name", [name for name in TYPES if name not in ("int", "float")])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_unpacking_in_one_pass_gives_what_reading_one_by_one_gives(
    name: str, data: st.DataObject
) -> None:
    hint, column, values = TYPES[name]
    state = small().value("s", hint)
    state.update(dict(enumerate_text(data.draw(st.lists(values, max_size=20)))))
    columns = StateColumns(state.schema)
    pieces = list(_pieces(state))
    slow = columns._plain(pieces, column)
    columns._plain = None  # type: ignore[assignment,method-assign]  # the fast way must not need it
    fast = columns._values(pieces) if pieces else slow
    assert fast.equals(slow)
    assert fast.type == column


def enumerate_text(values: list[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"k{at}", value) for at, value in enumerate(values))


LIVE: list[tuple[str, Callable[[sk.KVProvider], Any], Any, Any]] = [
    ("list", lambda kv: kv.list("s", int), [1, 2, 3], [1, 2, 3]),
    ("long list", lambda kv: kv.list("s", int), list(range(5000)), list(range(5000))),
    ("map", lambda kv: kv.map("s", str, float), {"a": 0.5, "b": 1.0}, [("a", 0.5), ("b", 1.0)]),
    ("set", lambda kv: kv.state("s", set[str]), {"b", "a"}, ["a", "b"]),
    (
        "nested",
        lambda kv: kv.state("s", dict[str, list[Point]]),
        {"a": [Point(1)], "b": []},
        [("a", [{"x": 1, "y": 0.5}]), ("b", [])],
    ),
    ("sets", lambda kv: kv.state("s", dict[str, set[int]]), {"a": {2, 1}}, [("a", [1, 2])]),
    ("reduce", lambda kv: kv.reduce("s", int, max).state, 7, 7),
]


@pytest.mark.parametrize(("name", "declare", "value", "column"), LIVE, ids=[x[0] for x in LIVE])
def test_every_form_of_state_is_a_table(
    name: str, declare: Any, value: Any, column: Any, tmp_path: Path
) -> None:
    kv = small()
    state = declare(kv)
    state["k"] = value
    assert rows_of(state.to_arrow()) == {"k": column}
    assert rows_of(pa.table(kv["s"])) == {"k": column}
    assert rows_of(stored(kv, tmp_path).to_arrow("s")) == {"k": column}


def test_timers_are_lists_of_due_times(tmp_path: Path) -> None:
    kv = small()
    timers = kv.timers("t", key=int)
    for due in (5, 3, 2**62):
        timers.set(7, due)
    timers.set(8, -1)
    expected = {7: [3, 5, 2**62], 8: [-1]}
    assert rows_of(timers.to_arrow()) == expected
    assert rows_of(stored(kv, tmp_path).to_arrow("t")) == expected


@pytest.mark.parametrize(
    ("key", "keys", "columns"),
    [
        (str, ["a", "", "zoë" * 50], {"key": pa.string()}),
        (bytes, [b"", b"\xff\0"], {"key": pa.binary()}),
        (int, [0, -(2**63), 2**63 - 1], {"key": pa.int64()}),
        (
            tuple[str, int, bytes],
            [("a", 1, b"x"), ("", -1, b""), ("é", 2**63 - 1, b"\0")],
            {"key_0": pa.string(), "key_1": pa.int64(), "key_2": pa.binary()},
        ),
        (tuple[int], [(1,), (-5,)], {"key_0": pa.int64()}),
    ],
    ids=str,
)
def test_keys_of_every_type_are_columns(
    key: Any, keys: list[Any], columns: dict[str, Any], tmp_path: Path
) -> None:
    kv = small()
    numbers, texts = kv.value("n", int, key=key), kv.value("t", str, key=key)
    numbers.update({one: at for at, one in enumerate(keys)})
    texts.update({one: str(at) for at, one in enumerate(keys)})
    checkpoint = stored(kv, tmp_path)
    if key == tuple[int]:  # rows_of() gives what is in the one column
        keys = [one for (one,) in keys]
    wanted = {one: at for at, one in enumerate(keys)}
    for found in (checkpoint.table("n").read(), numbers.to_arrow()):
        assert found.schema == pa.schema([*columns.items(), ("value", pa.int64())])
        assert rows_of(found) == wanted
    for found in (checkpoint.table("t").read(), texts.to_arrow()):
        assert rows_of(found) == {one: str(at) for one, at in wanted.items()}


NOT_HELD: list[tuple[str, Any, Any]] = [
    ("datetime", dt.datetime, dt.datetime(2026, 1, 1)),
    ("datetime", dict[str, dt.datetime], {"a": dt.datetime(2026, 1, 1)}),
    ("time", dt.time, dt.time(1, 2, tzinfo=dt.UTC)),
    ("timedelta", dt.timedelta, dt.timedelta.max),
    ("decimal", Decimal, Decimal("NaN")),
    ("decimal", Decimal, Decimal("Infinity")),
    ("decimal", Decimal, Decimal("1e-19")),
    ("decimal", Decimal, Decimal(10**20)),
    ("decimal", list[Line], [Line("a", Decimal("1.0000000000000000001"))]),
]


@pytest.mark.parametrize(("kind", "hint", "value"), NOT_HELD, ids=lambda x: str(x)[:40])
def test_what_a_column_cannot_hold_is_an_error_that_says_what_to_do(
    kind: str, hint: Any, value: Any, tmp_path: Path
) -> None:
    kv = small()
    state = kv.value("it", hint)
    state["k"] = value
    checkpoint = stored(kv, tmp_path)
    for read in (lambda: list(checkpoint.to_arrow("it")), state.to_arrow):
        with pytest.raises(BadValueError, match=rf"'it'.*text=\[\"{kind}\"\]") as caught:
            read()
        assert caught.value.state == "it"
    # A consumer of the stream is told the same.
    with pytest.raises(Exception, match=f'text=."{kind}"'):
        pa.table(checkpoint.table("it"))
    for table in (checkpoint.table("it", text=[kind]).read(), state.to_arrow(text=[kind])):
        ((_, text),) = rows_of(table).items()
        if hint is Decimal:
            assert str(Decimal(text)) == str(value)
        if hint is dt.datetime:
            assert dt.datetime.fromisoformat(text) == value
        if hint is dt.time:
            assert dt.time.fromisoformat(text) == value


def test_all_typed_columns_can_be_text(tmp_path: Path) -> None:
    kv = small()
    state = kv.value("s", tuple[dt.datetime, dt.date, dt.time, dt.timedelta, Decimal])
    now = dt.datetime(2026, 11, 18, 20, 30, 0, 5, tzinfo=dt.UTC)
    state["k"] = (now, now.date(), now.time(), dt.timedelta(1, 2, 3), Decimal("1.10"))
    text = ["datetime", "date", "time", "timedelta", "decimal"]
    table = stored(kv, tmp_path).table("s", text=text).read()
    assert table.schema.field("value").type == pa.struct(
        [(str(at), pa.string()) for at in range(5)]
    )
    found = [*table["value"].to_pylist()[0].values()]
    assert found == [now.isoformat(), "2026-11-18", "20:30:00.000005", "P1DT2.000003S", "1.10"]


# ---- Chains


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_version_of_a_chain_reads_as_it_was(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp = tmp_path_factory.mktemp("c")
    compression = data.draw(st.sampled_from([None, "zstd"]))
    kv = small()
    numbers, texts = kv.value("n", int, key=int), kv.value("t", str, key=tuple[str, int])
    lists = kv.list("l", str)
    models: list[tuple[dict[Any, Any], ...]] = []
    keys = st.integers(0, 30)
    for _ in range(data.draw(st.integers(1, 5))):
        for key in data.draw(st.lists(keys, max_size=12)):
            match data.draw(st.integers(0, 5)):
                case 0:
                    numbers.discard(key)
                case 1:
                    texts.discard((str(key), key))
                case 2:
                    lists[str(key)].append(f"v{key}")
                case 3:
                    lists.discard(str(key))
                case 4:
                    texts[str(key), key] = data.draw(TEXTS)
                case _:
                    numbers[key] = data.draw(I64)
        kv.checkpoint(tmp, compression=compression)
        models.append((dict(numbers.items()), dict(texts.items()), dict(lists.items())))
    for checkpoint, (n, t, ls) in zip(sk.checkpoints(tmp), models, strict=True):
        assert rows_of(checkpoint.to_arrow("n")) == n
        assert rows_of(checkpoint.to_arrow("t")) == t
        assert rows_of(checkpoint.to_arrow("l")) == ls


def test_key_groups_are_disjoint_and_together_everything(tmp_path: Path) -> None:
    kv = sk.open("memory:", key_groups=16, subgroups=4)
    state = kv.value("s", int)
    model = {f"user-{at}": at for at in range(3000)}
    state.update(model)
    checkpoint = stored(kv, tmp_path)
    found: dict[Any, Any] = {}
    for groups in (*sk.assign(16, 5)[:4], [12, 15, 13, 14]):
        part = rows_of(checkpoint.to_arrow("s", key_groups=groups))
        assert part
        assert not found.keys() & part.keys()
        leaves = {sk.leaf_of(str, key, 16, 4) // 4 for key in part}
        assert leaves <= {*groups}
        found |= part
    assert found == model
    assert rows_of(checkpoint.to_arrow("s", key_groups=[])) == {}


@pytest.mark.parametrize("batch_rows", [1, 7, 1000, 10**6])
def test_batches_have_the_rows_that_were_asked_for(batch_rows: int, tmp_path: Path) -> None:
    kv = small()
    state = kv.value("s", str, key=int)
    state.update({at: str(at) for at in range(1003)})
    sizes = [len(one) for one in stored(kv, tmp_path).to_arrow("s", batch_rows=batch_rows)]
    assert sum(sizes) == 1003
    assert {*sizes[:-1]} <= {batch_rows}
    assert 0 < sizes[-1] <= batch_rows


def test_batches_are_made_as_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statekit.checkpoint.table._RUN_BYTES", 4096)
    kv = sk.open("memory:", key_groups=64, subgroups=1)
    kv.value("s", str, key=int).update(dict.fromkeys(range(2000), "x" * 100))
    checkpoint = stored(kv, tmp_path)
    asked: list[int] = []
    read_joined = Checkpoint.read_joined

    def counted(self: Checkpoint, pack: int, segments: Any) -> Any:
        asked.append(sum(segment.length for segment in segments))
        return read_joined(self, pack, segments)

    monkeypatch.setattr(Checkpoint, "read_joined", counted)
    batches = checkpoint.to_arrow("s", batch_rows=10)
    next(batches)
    assert 0 < sum(asked) < checkpoint.bytes / 10
    assert sum(map(len, batches)) == 1990
    assert sum(asked) <= checkpoint.bytes


def test_values_that_are_too_much_for_one_batch_come_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statekit.render.columns._BYTES_MAX", 1000)
    kv = small()
    model = dict.fromkeys(range(200), "x" * 300)
    kv.value("s", str, key=int).update(model)
    batches = list(stored(kv, tmp_path).to_arrow("s"))
    assert max(one.nbytes for one in batches) < 5000
    assert rows_of(batches) == model


# ---- Evolution


def test_what_was_stored_before_the_type_changed_is_read_as_it_is_now(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Old:
        a: int
        gone: str

    @dataclasses.dataclass
    class New:
        a: float
        c: str = "new"

    kv = small()
    kv.value("n", int).update({"x": 1, "y": 2})
    kv.value("r", Old).update({"x": Old(1, "g"), "y": Old(2, "h")})
    kv.checkpoint(tmp_path)
    New.__name__ = "Old"
    kv = sk.restore(tmp_path)
    numbers, records = kv.value("n", float), kv.value("r", New)
    numbers["y"] = 2.5
    records["y"] = New(2.5, "!")
    checkpoint = kv.checkpoint(tmp_path)
    found = checkpoint.table("n").read()
    assert found.schema.field("value").type == pa.float64()
    assert rows_of(found) == {"x": 1.0, "y": 2.5}
    found = rows_of(checkpoint.to_arrow("r"))
    assert found == {"x": {"a": 1.0, "c": None}, "y": {"a": 2.5, "c": "!"}}
    assert rows_of(records.to_arrow()) == found


# ---- Time to live


@pytest.mark.parametrize("clock", ["event", "processing"])
def test_entries_that_were_not_touched_for_so_long_are_left_out(
    clock: Literal["event", "processing"], tmp_path: Path
) -> None:
    kv = small()
    store = kv._residence.store
    hour = dt.timedelta(hours=1)
    state = kv.value("s", str, ttl=TTL(hour, time=clock))
    now = 1_800_000_000_000

    def at(ms: int) -> None:
        if clock == "event":
            kv.advance_watermark(ms)
        else:
            store.set_time("processing", ms)

    at(now - 2 * 3_600_000)
    state.update({f"old{i}": "a" for i in range(50)})
    at(now - 1000)
    state.update({f"new{i}": "b" for i in range(50)})
    both = stored(kv, tmp_path / "before")
    at(now)
    assert {*rows_of(state.to_arrow())} == {f"new{i}" for i in range(50)} == {*state.keys()}
    if clock == "event":
        at(now)
        both = stored(kv, tmp_path)
        found = rows_of(both.to_arrow("s", ttl=hour))
        assert found == {f"new{i}": "b" for i in range(50)}
        assert rows_of(both.to_arrow("s", ttl=0.5, batch_rows=3)) == {}
        table = both.table("s", ttl=3600, stamps=True).read()
        assert {*table["stamp"].to_pylist()} == {now - 1000}
    else:  # by the clock on the wall, which is before `now`
        assert rows_of(both.to_arrow("s", ttl=dt.timedelta(days=100_000))).keys() >= {"new0"}
    assert both.arrow_schema("s", stamps=True).names == ["key", "value", "stamp"]


def test_stamps_that_are_not_known_are_null(tmp_path: Path) -> None:
    kv = small()
    state = kv.value("s", int, ttl=TTL(5, time="event"))
    state["before"] = 1
    checkpoint = stored(kv, tmp_path)
    (row,) = checkpoint.table("s", stamps=True, ttl=5).read().to_pylist()
    assert row == {"key": "before", "value": 1, "stamp": None}


# ---- Where entries are


def test_a_home_and_a_lazy_restore_are_read_too(tmp_path: Path) -> None:
    kv = sk.open(f"rocksdb:{tmp_path / 'home'}?memory=1MiB", key_groups=4, subgroups=2)
    numbers, texts = kv.value("n", int, key=int), kv.value("t", Point, key=tuple[str, int])
    model = {at: at * 7 for at in range(5000)}
    points = {(f"k{at}", at): Point(at, at / 2) for at in range(2000)}
    numbers.update(model)
    texts.update(points)
    kv.flush()
    kv._residence.store.evict(1 << 30)
    del numbers[0]
    numbers[1] = -1
    model = {**model, 1: -1}
    del model[0]
    for _ in range(2):
        assert rows_of(numbers.to_arrow()) == model
        assert rows_of(texts.to_arrow()) == {key: plain(value) for key, value in points.items()}
    kv.checkpoint(tmp_path / "c")
    kv.close()
    lazy = sk.restore(tmp_path / "c", lazy=True)
    assert rows_of(pa.table(lazy.value("n", int, key=int))) == model


# ---- Readers


def orders(kv: sk.KVProvider) -> Any:
    state = kv.value("orders", Order, key=int)
    state.update(
        {
            at: Order(
                uuid.UUID(int=at),
                dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + at * dt.timedelta(hours=1),
                [Line(f"sku{at % 3}", Decimal(at) / 4, [at, None])],
                {"name": f"n{at}"} if at % 2 else None,
                {"home": Point(at)},
            )
            for at in range(500)
        }
    )
    return state


def test_duckdb_reads_states_and_checkpoints_as_tables(tmp_path: Path) -> None:
    kv = small()
    live = orders(kv)
    saved = stored(kv, tmp_path).table("orders")
    query = """
        select key, value.lines[1].price, value."where"['home'].x, value."by".name, value.colour,
               value.at, value.id
        from {} order by key
    """
    expected = [
        (key, one.lines[0].price, one.where["home"].x, one.by and one.by["name"], "red", one.at,
         str(one.id))
        for key, one in sorted(live.items())
    ]  # fmt: skip
    prices = sum(one.lines[0].price for one in live.values())
    assert saved.read().num_rows == 500
    for name in ("live", "saved"):  # DuckDB finds the variables
        for _ in range(2):  # a table can be read more than once
            found = duckdb.sql(query.format(name)).fetchall()
            assert [(*row[:5], row[5].astimezone(dt.UTC), row[6]) for row in found] == expected
        total = duckdb.sql(f"select sum(value.lines[1].price), count(*) from {name}").fetchall()
        assert total == [(prices, 500)]


def test_polars_and_pandas_read_states_and_checkpoints(tmp_path: Path) -> None:
    kv = small()
    state = kv.value("s", float, key=str)
    model = {f"u{at}": at / 4 for at in range(1000)}
    state.update(model)
    table = stored(kv, tmp_path).table("s")
    for source in (state, table):
        frame = pl.DataFrame(source)
        assert dict(zip(frame["key"], frame["value"], strict=True)) == model
        assert source.to_pandas().set_index("key")["value"].to_dict() == model
        reader = pa.RecordBatchReader.from_stream(source)
        assert rows_of(reader) == model
        assert pa.schema(source) == reader.schema


def test_a_state_without_entries_is_a_table_without_rows(tmp_path: Path) -> None:
    kv = small()
    states = [kv.value("n", int), kv.value("r", Order, key=tuple[str, int]), kv.timers("t")]
    states[0]["gone"] = 1
    kv.checkpoint(tmp_path)
    del states[0]["gone"]
    checkpoint = kv.checkpoint(tmp_path)
    for live in states:
        saved = checkpoint.table(live.name)
        assert saved.read().num_rows == len(live.to_arrow()) == 0
        assert saved.schema == live.to_arrow().schema
        assert duckdb.sql("select count(*) from saved").fetchall() == [(0,)]


def test_buffers_live_as_long_as_arrays_that_use_them() -> None:
    kv = small()
    state = kv.value("s", str, key=str)
    model = {f"key{at}": f"value{at}" * 5 for at in range(500)}
    state.update(model)
    part = state.to_arrow()["value"].slice(3, 5)
    texts = part.to_pylist()
    kv.close()
    del kv, state
    gc.collect()
    junk = [bytes(100) for _ in range(10_000)]
    assert part.to_pylist() == texts
    assert junk


# ---- Mistakes


def test_mistakes_are_told(tmp_path: Path) -> None:
    kv = small()
    kv.value("visits", int)["a"] = 1
    checkpoint = stored(kv, tmp_path)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"state": "visit"}, ArgumentError, r"no state 'visit'. It has 'visits'"),
        ({"batch_rows": 0}, ArgumentError, "0 rows"),
        ({"batch_rows": True}, ArgumentError, "True rows"),
        ({"key_groups": range(3, 5)}, ArgumentError, "no key-group 4"),
        ({"key_groups": "0-3"}, ArgumentError, "names no key-groups"),
        ({"text": ["str"]}, ArgumentError, r"'str'.*datetime, date, time, timedelta, decimal"),
        ({"ttl": 5}, SchemaError, "'visits' is stored without a time to live"),
    ]
    for options, error, message in cases:
        given_options = {"state": "visits", **options}
        for call in (checkpoint.table, checkpoint.to_arrow):
            with pytest.raises(error, match=message):
                call(**given_options)
    for call in (checkpoint.arrow_schema, lambda name: list(checkpoint.to_arrow(name))):
        with pytest.raises(ArgumentError, match="no state 'x'"):
            call("x")
    with pytest.raises(ArgumentError, match="'str'"):
        kv["visits"].to_arrow(text=["str"])


def test_key_groups_that_a_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    kv = small()
    kv.value("n", int).update({str(at): at for at in range(100)})
    (low,) = kv.split([range(2)])
    checkpoint = low.checkpoint(tmp_path)
    with pytest.raises(ArgumentError, match=r"does not have the key-groups 2\. It has 0-1 of 4"):
        checkpoint.to_arrow("n", key_groups=range(1, 3))
    assert {*rows_of(checkpoint.to_arrow("n"))} == {*low["n"].keys()}


@pytest.mark.parametrize("package", ["pyarrow", "numpy"])
def test_a_package_that_is_missing_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = small()
    state = kv.value("n", int)
    state["a"] = 1
    checkpoint = stored(kv, tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    for call in (
        lambda: checkpoint.to_arrow("n"),
        lambda: checkpoint.arrow_schema("n"),
        lambda: checkpoint.table("n"),
        state.__arrow_c_stream__,
        state.__arrow_c_schema__,
    ):
        with pytest.raises(MissingPackageError, match=r"pip install statekit\[arrow\]"):
            call()


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    kv = small()
    kv.value("s", str, key=int).update(dict.fromkeys(range(100), "x" * 50))
    checkpoint = stored(kv, tmp_path)
    (pack,) = tmp_path.glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(DamagedError, match="there is no good frame"):
        list(checkpoint.to_arrow("s"))


@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        (str, b"\xa2\xff\xfe"),  # no UTF-8
        (str, b"\xa1a\xa1b"),  # two values
        (str, b"\x07"),
        (list[int], b"\x91\xa1a"),
        (dt.date, b"\xa3abc"),
        (Point, b"\x93\x01"),  # cut short
        (Order, b"\x80"),  # fields are missing
        (Order, b"\x82\xa2id\xa0\xa2id\xa0"),
        (Colour, b"\xa5green"),
        (Level, b"\x09"),
        (bool, b"\xc0"),
        (tuple[int, int], b"\x91\x01"),
        (Decimal, b"\xa3abc"),
    ],
    ids=str,
)
def test_values_that_are_not_of_their_type_are_damage(kind: Any, packed: bytes) -> None:
    state = small().value("s", kind)
    state._raw.put_encoded("k", packed)
    with pytest.raises(CorruptBlockError, match="'s'"):
        state.to_arrow()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_bytes_whatsoever_are_more_than_an_error(data: st.DataObject) -> None:
    """Unpacking trusts nothing: either all is well, or it is a CorruptBlockError."""
    name = data.draw(st.sampled_from(sorted(TYPES.keys() - {"int", "float"})))
    hint, _, values = TYPES[name]
    state = small().value("s", hint)
    packed = bytearray(state._codec.encode(data.draw(values)))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(packed)))
        packed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    state._raw.put_encoded("k", bytes(packed))
    try:
        table = state.to_arrow()
    except (CorruptBlockError, BadValueError):
        return
    table.validate(full=True)
    assert table.num_rows == 1


def test_floats_that_are_no_numbers_are_kept() -> None:
    state = small().value("s", list[float])
    state["k"] = [math.nan, math.inf, -math.inf, -0.0]
    ((_, found),) = rows_of(state.to_arrow()).items()
    assert math.isnan(found[0])
    assert [math.copysign(1, one) for one in found[1:]] == [1, -1, -1]
