"""States of checkpoints as DataFrames."""

import datetime as dt
import pickle
import sys
import uuid
from dataclasses import make_dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import statekit as sk
import statekit.spark as sks
from statekit.errors import ArgumentError, MissingPackageError, StateKitError
from statekit.native.ttl import TTL
from statekit.spark.source import Reading

pyspark = pytest.importorskip("pyspark")
VERSION = tuple(map(int, pyspark.__version__.split(".")[:2]))
if VERSION < (4, 0):
    pytest.skip("data sources in Python came with PySpark 4.0", allow_module_level=True)
from test_arrow import (  # noqa: E402 - which needs packages that are not there then
    TYPES,
    Colour,
    Level,
    Line,
    Nothing,
    Order,
    Point,
    Right,
    Tree,
    plain_of,
)

pushes_filters = pytest.mark.skipif(VERSION < (4, 1), reason="filters are handed over since 4.1")

NOW = dt.datetime(2026, 11, 18, 20, 30, 0, 5, tzinfo=dt.UTC)
LINE = Line("sku", Decimal("1.10"), [1, None])
ORDER = Order(
    uuid.UUID(int=7), NOW, [LINE, LINE], {"name": "n"}, {"home": Point(1, 2.0)}, Colour.BLUE
)
VALUES: dict[str, list[Any]] = {
    "int": [1, -(2**63)], "float": [0.5, -1e300], "bool": [True, False], "str": ["a", "zoë", ""],
    "bytes": [b"\xff\0", b""], "none": [None], "datetime": [NOW], "date": [NOW.date()],
    "time": [NOW.time(), dt.time(0)], "timedelta": [dt.timedelta(-1, 2, 3)],
    "uuid": [uuid.UUID(int=2**100)], "decimal": [Decimal("-12.5"), Decimal(0)],
    "enum": [Colour.RED], "intenum": [Level.HIGH], "flags": [Right.READ | Right.WRITE],
    "literal": ["b"], "bools": [True], "optional": [None, 5], "optional text": [None, "x"],
    "optional point": [None, Point(1)], "tuple": [("a", 1)],
    "tuples": [(NOW.date(), dt.date.min), ()], "list": [[True, False], []],
    "lists": [[["a", None], []], []], "set": [{3, 1, 2}], "dict": [{"a": [1.0], "b": []}, {}],
    "dict of tuples": [{("a", 1): Point(3)}], "namedtuple": [Point(7)],
    "typeddict": [{"name": "n"}, {"name": "m", "age": 3}], "dataclass": [ORDER],
    "any": [None, [1, "a"]], "union": [1, "a"], "mixed literal": ["a", 1],
    "tree": [Tree("a", [Tree("b")])], "no fields": [Nothing()],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered(spark: Any) -> None:
    sks.register(spark)


def small() -> sk.KVProvider:
    return sk.open("memory:", key_groups=8, subgroups=2)


def load(spark: Any, place: Path, **options: Any) -> Any:
    reader = spark.read.format("statekit")
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load(str(place))


def rows(frame: Any) -> dict[Any, Any]:
    """{key: value} of a DataFrame."""
    found: dict[Any, Any] = {}
    for row in frame.toArrow().to_pylist():
        *keys, value = row.values()
        key = keys[0] if len(keys) == 1 else tuple(keys)
        assert key not in found
        found[key] = value
    return found


def test_every_declared_type_is_a_column_of_its_own(spark: Any, tmp_path: Path) -> None:
    """All types as fields of one record: every query of Spark takes a second."""
    assert VALUES.keys() == TYPES.keys()
    names = {name.replace(" ", "_"): name for name in VALUES}
    record: Any = make_dataclass("All", [(field, TYPES[name][0]) for field, name in names.items()])
    kv = small()
    state = kv.value("all", record)
    expected = {}
    for at in range(max(map(len, VALUES.values()))):
        values = {name: given[at % len(given)] for name, given in VALUES.items()}
        state[f"k{at}"] = record(*values.values())
        expected[f"k{at}"] = {one: plain_of(name, values[name]) for one, name in names.items()}
    kv.checkpoint(tmp_path)
    frame = load(spark, tmp_path)
    assert rows(frame) == expected
    types = dict(frame.select("value.*").dtypes)
    assert types["dataclass"] == (
        "struct<id:string,at:timestamp,"
        "lines:array<struct<sku:string,price:decimal(38,18),sizes:array<bigint>>>,"
        "by:struct<name:string,age:bigint>,where:map<string,struct<x:bigint,y:double>>,"
        "colour:string>"
    )
    assert types["timedelta"].startswith("interval day")
    assert (types["int"], types["bytes"], types["date"]) == ("bigint", "binary", "date")


def test_sql_reaches_into_nested_state(spark: Any, tmp_path: Path) -> None:
    kv = small()
    pages = kv.state("pages", dict[str, list[float]])
    pages["a"]["/home"].extend([1.0, 2.5])
    pages["b"]["/home"].append(4.0)
    kv.checkpoint(tmp_path)
    load(spark, tmp_path, state="pages").createOrReplaceTempView("pages")
    query = "select key, aggregate(value['/home'], 0D, (a, b) -> a + b) from pages order by key"
    assert [tuple(row) for row in spark.sql(query).collect()] == [("a", 3.5), ("b", 4.0)]


def test_a_version_is_the_state_as_it_was_then(spark: Any, tmp_path: Path) -> None:
    kv = small()
    state = kv.value("n", int)
    models = []
    for version in range(1, 4):
        state.update({f"k{at}": version * at for at in range(version * 20)})
        state.discard(f"k{version}")
        models.append(dict(state.items()))
        kv.checkpoint(tmp_path)
    newest = load(spark, tmp_path)
    for version, model in enumerate(models, 1):
        assert rows(load(spark, tmp_path, version=version)) == model
    state["new"] = 1
    kv.checkpoint(tmp_path)
    assert rows(newest) == models[-1]  # it was chosen when load() was called
    assert rows(load(spark, tmp_path)) == {**models[-1], "new": 1}


@pytest.mark.parametrize("partitions", [1, 3, 8, 100])
def test_partitions_share_the_key_groups(spark: Any, tmp_path: Path, partitions: int) -> None:
    from pyspark.sql.functions import spark_partition_id

    kv = small()
    model = {at: str(at) for at in range(500)}
    kv.value("s", str, key=int).update(model)
    kv.checkpoint(tmp_path)
    frame = load(spark, tmp_path, partitions=partitions)
    assert rows(frame) == model
    used = frame.select(spark_partition_id().alias("p")).distinct().count()
    assert used == min(partitions, 8)


@pushes_filters
def test_a_lookup_reads_one_key_group(spark: Any, tmp_path: Path) -> None:
    kv = small()
    numbers = kv.value("n", int)
    numbers.update({f"k{at}": at for at in range(400)})
    checkpoint = kv.checkpoint(tmp_path)
    group = sk.leaf_of(str, "k7", 8, 2) // 2
    # Everything else becomes unreadable: whoever reads it fails.
    (pack,) = tmp_path.glob("*.pack")
    data = bytearray(pack.read_bytes())
    for segment in checkpoint.manifest.segments:
        if segment.leaf // 2 != group:
            data[segment.offset + segment.length // 2] ^= 1
    pack.write_bytes(data)
    frame = load(spark, tmp_path)
    assert [tuple(row) for row in frame.where("key = 'k7'").collect()] == [("k7", 7)]
    inside = [key for key in numbers.keys() if sk.leaf_of(str, key, 8, 2) // 2 == group][:5]  # noqa: SIM118
    assert rows(frame.where(frame.key.isin(inside))) == {key: numbers[key] for key in inside}
    assert frame.where("key = 'k7' and key = 'other'").count() == 0
    with pytest.raises(Exception, match="there is no good frame"):
        frame.where("value = 7").collect()


@pushes_filters
def test_filters_choose_the_key_groups_of_the_keys_and_no_others(tmp_path: Path) -> None:
    from pyspark.sql.datasource import EqualNullSafe, EqualTo, GreaterThan, In, IsNotNull, Not

    from statekit.spark.reader import FilteringSource

    kv = small()
    kv.value("t", int, key=tuple[str, int])["a", 1] = 1
    kv.value("b", int, key=bytes)[b"a"] = 1
    kv.checkpoint(tmp_path)

    def groups(state: str, *filters: Any) -> set[int] | None:
        source = FilteringSource({"path": str(tmp_path), "state": state})
        reader = source.reader(source.schema())
        # Spark is to evaluate all of them again.
        assert list(reader.pushFilters(list(filters))) == list(filters)
        found = {one for share in reader.partitions() for part in share.groups for one in part}
        return None if found == {*range(8)} else found

    def of(*keys: tuple[str, int]) -> set[int]:
        return {sk.leaf_of(tuple[str, int], key, 8, 2) // 2 for key in keys}

    name, number = ("key_0",), ("key_1",)
    assert groups("t") is None
    assert groups("t", EqualTo(name, "a")) is None  # the hash needs all parts
    assert groups("t", EqualTo(name, "a"), EqualTo(number, 1)) == of(("a", 1))
    both = In(name, ("a", "b")), In(number, (1, 2, None))
    assert groups("t", *both) == of(("a", 1), ("a", 2), ("b", 1), ("b", 2))
    assert groups("t", *both, EqualNullSafe(name, "b")) == of(("b", 1), ("b", 2))
    assert groups("t", EqualTo(name, "a"), EqualTo(number, 1), EqualTo(number, 2)) == set()
    assert groups("t", EqualTo(name, "a"), EqualNullSafe(number, None)) == set()
    assert groups("t", Not(EqualTo(name, "a")), GreaterThan(number, 1), IsNotNull(name)) is None
    assert groups("t", EqualTo(name, 5), EqualTo(number, 1)) is None  # no str: left to Spark
    assert groups("t", EqualTo(("value", "key_0"), "a"), EqualTo(number, 1)) is None
    expected = {sk.leaf_of(bytes, b"a", 8, 2) // 2}
    assert groups("b", EqualTo(("key",), bytearray(b"a"))) == expected


@pushes_filters
@pytest.mark.parametrize("key", [str, int, bytes, tuple[str, int]], ids=str)
def test_filters_find_what_a_dict_finds(spark: Any, tmp_path: Path, key: Any) -> None:
    makers: dict[Any, Any] = {str: str, int: int, bytes: lambda at: bytes([at])}
    make = makers.get(key, lambda at: (f"u{at % 7}", at))
    kv = small()
    model = {make(at): at for at in range(60)}
    kv.value("s", int, key=key).update(model)
    kv.checkpoint(tmp_path)
    frame = load(spark, tmp_path)
    for one in [*list(model)[:3], make(61)]:
        parts = one if isinstance(one, tuple) else (one,)
        condition = None
        for column, part in zip(frame.columns, parts, strict=False):
            test = frame[column] == (bytearray(part) if isinstance(part, bytes) else part)
            condition = test if condition is None else condition & test
        assert rows(frame.where(condition)) == ({one: model[one]} if one in model else {})
    if key == tuple[str, int]:
        assert rows(frame.where("key_0 = 'u3'")) == {k: v for k, v in model.items() if k[0] == "u3"}


def test_states_without_entries_have_columns_and_no_rows(spark: Any, tmp_path: Path) -> None:
    kv = small()
    kv.value("n", Order, key=tuple[str, int])
    kv.checkpoint(tmp_path)
    frame = load(spark, tmp_path)
    assert frame.count() == 0
    assert frame.columns == ["key_0", "key_1", "value"]


def test_options_for_times(spark: Any, tmp_path: Path) -> None:
    kv = small()
    seen = kv.value("seen", dt.datetime, ttl=TTL(dt.timedelta(hours=1), time="event"))
    now = 1_800_000_000_000
    naive = dt.datetime(2026, 1, 1)
    kv.advance_watermark(now - 3_600_000)
    seen["old"] = naive
    kv.advance_watermark(now - 1000)
    seen["new"] = NOW
    kv.checkpoint(tmp_path)
    with pytest.raises(Exception, match=r'text=\["datetime"\]'):
        load(spark, tmp_path).collect()
    frame = load(spark, tmp_path, text="datetime", stamps="true")
    assert {tuple(row) for row in frame.collect()} == {
        ("old", naive.isoformat(), now - 3_600_000),
        ("new", NOW.isoformat(), now - 1000),
    }
    assert rows(load(spark, tmp_path, ttl=1800, batch_rows=1)) == {"new": NOW}


# ---- Mistakes


def test_mistakes_are_told_when_load_is_called(spark: Any, tmp_path: Path) -> None:
    kv = small()
    kv.value("visits", int)["a"] = 1
    kv.value("names", str)["a"] = "x"
    kv.checkpoint(tmp_path / "c")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"state": "visit"}, "no state 'visit'. It has 'names', 'visits'"),
        ({}, "has the states 'names', 'visits'. Say which one"),
        ({"state": "visits", "version": 9}, "has no checkpoint 9"),
        ({"state": "visits", "version": "new"}, "the option version is 'new', which is no int"),
        ({"state": "visits", "partitions": 0}, "there cannot be 0 partitions"),
        ({"state": "visits", "partition": 2}, "'partition' is no option"),
        ({"state": "visits", "ttl": 5}, "stored without a time to live"),
        ({"state": "visits", "ttl": "long"}, "no number of seconds"),
        ({"state": "visits", "stamps": "yes"}, "Pass true or false"),
        ({"state": "visits", "text": "str"}, "These may: datetime"),
        ({"state": "visits", "batch_rows": 0}, "a batch cannot have 0 rows"),
    ]
    for options, message in cases:
        with pytest.raises(StateKitError) as caught:
            Reading.of({"path": str(tmp_path / "c"), **{k: str(v) for k, v in options.items()}})
        assert message in str(caught.value)
    # What Spark makes of them has our text in it.
    with pytest.raises(Exception, match="no state 'visit'"):
        load(spark, tmp_path / "c", state="visit")
    with pytest.raises(Exception, match="there is no checkpoint in"):
        load(spark, tmp_path / "d")
    with pytest.raises(Exception, match="no place of checkpoints is given"):
        spark.read.format("statekit").load()


def test_a_schema_of_the_users_own_is_refused(spark: Any, tmp_path: Path) -> None:
    kv = small()
    kv.value("n", int)["a"] = 1
    kv.checkpoint(tmp_path)
    reader = spark.read.format("statekit")
    with pytest.raises(Exception, match=r"Leave \.schema"):
        reader.schema("key string, value string").load(str(tmp_path)).collect()
    own = load(spark, tmp_path).schema
    assert rows(reader.schema(own).load(str(tmp_path))) == {"a": 1}


def test_what_older_versions_lack_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "3.5.4")
    with pytest.raises(MissingPackageError, match=r"PySpark 3\.5 has no data sources in Python"):
        sks.register(None)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(MissingPackageError, match=r"pip install statekit\[spark\]"):
        sks.register(None)


def test_types_that_a_version_lacks_can_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    from pyspark.errors import PySparkTypeError

    from statekit.spark import reader

    def older(kind: Any) -> Any:  # what PySpark 4.0 says of a time
        raise PySparkTypeError("UNSUPPORTED_DATA_TYPE_FOR_ARROW_CONVERSION", {})

    monkeypatch.setattr(reader, "from_arrow_type", older)
    with pytest.raises(ArgumentError, match=r'option\("text", "time"\)'):
        reader.spark_schema(pa.schema([("value", pa.list_(pa.time64("us")))]))


def test_a_checkpoint_is_held_while_it_is_read_and_its_removal_before_is_said(
    spark: Any, tmp_path: Path
) -> None:
    from statekit.spark.reader import StateSource

    kv = small()
    state = kv.value("n", int)
    state.update({str(at): at for at in range(100)})
    first = kv.checkpoint(tmp_path)
    frame = load(spark, tmp_path)
    source = StateSource({"path": str(tmp_path), "batch_rows": "10", "partitions": "1"})
    reader = source.reader(source.schema())
    (partition,) = reader.partitions()
    reading = reader.read(partition)
    found = [next(reading)]
    state.update({str(at): -at for at in range(100)})
    kv.checkpoint(tmp_path)
    assert sk.collect(tmp_path, keep=1).in_use == (1,)  # a task is in the midst of it
    found += reading
    assert {row["key"]: row["value"] for one in found for row in one.to_pylist()} == {
        str(at): at for at in range(100)
    }
    with first.pin():
        assert sk.collect(tmp_path, keep=1).in_use == (1,)
        assert frame.where("value = 7").count() == 1
    assert sk.collect(tmp_path, keep=1).removed == (1,)
    with pytest.raises(Exception, match=r"checkpoint 1 .*was removed after load.*Call load"):
        frame.collect()
    with pytest.raises(sk.StateKitError, match=r"checkpoint 1 .* is gone"):
        first.pin()


def test_a_reading_is_pickled_with_its_checkpoint(tmp_path: Path) -> None:
    kv = small()
    kv.value("n", int).update({str(at): at for at in range(100)})
    kv.checkpoint(tmp_path)
    reading = pickle.loads(pickle.dumps(Reading.of({"path": str(tmp_path), "partitions": "3"})))
    shares = reading.shares(None)
    assert len(shares) == 3
    found = [
        row for share in shares for batch in reading.of_groups(share) for row in batch.to_pylist()
    ]
    assert {row["key"]: row["value"] for row in found} == {str(at): at for at in range(100)}
    assert len(found) == 100
