"""One on_key in all forms: foreachBatch, applyInPandasWithState, and both transformWithStates.

The oracle is plain Python over the batches and their watermarks. The forms differ in one thing:
where Spark has the state it runs one batch more at the end of a run, without rows, if the watermark
has moved. So an oracle is given the batches as they are.
"""

from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from streams import Files, run_all

import statekit as sk
import statekit.spark as sks
from statekit.errors import ArgumentError, MissingPackageError

pyspark = pytest.importorskip("pyspark")
VERSION = tuple(map(int, pyspark.__version__.split(".")[:2]))
not_on_35 = pytest.mark.skipif(
    VERSION < (4, 0) and int(pa.__version__.partition(".")[0]) > 15,
    reason="PySpark 3.5's applyInPandasWithState fails with a new pyarrow",
)
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
START = datetime(2026, 1, 1, tzinfo=UTC)
START_MS = int(START.timestamp() * 1000)
DELAY_S, GAP_S, TTL_S = 5, 20, 60

# Files of (shop, item, second, price); each is a batch. None: a null.
RUNS: list[list[list[tuple[str, int | None, int, Any]]]] = [
    [
        [("a", 1, 0, "1.10"), ("a", 1, 3, None), ("b", 2, 8, "2"), ("ä", -(2**63), 1, "0.01")],
        [("a", 1, 12, "3"), ("b", 2, 3, "9")],  # watermark 3: b at 3 is late
        [("flush", 0, 40, "0")],  # watermark 7
    ],  # then a batch without rows where Spark has the state, at watermark 35
    [
        [("b", 2, 41, "4"), ("b", 2, 55, "5")],  # watermark 35: a and ä are over
        [("flush", 0, 55, "0")],  # watermark 50
        [("b", 2, 200, "6"), ("a", 1, 201, "7")],  # watermark 50
        [("flush", 0, 300, "0")],  # watermark 196: b's second session is over: due 75
        [("flush", 0, 301, "0")],  # watermark 295: all are over
    ],
]  # fmt: skip


class Sessions:
    """Every kind of state, timers, TTL and null values; with open()."""

    def open(self) -> None:
        self.is_open = True

    def on_key(self, key: Any, rows: Any, st: Any) -> Any:
        assert self.is_open
        if key[0] == "flush":
            return
        for row in rows:
            if row.price is not None:
                st.spent.set(st.spent.get(Decimal(0)) + row.price)
                st.prices.append(row.price)
                st.by_price[str(row.price)] = st.by_price.get(str(row.price), 0) + 1
        st.last.set(max(rows["at"]))
        st.end.move(max(rows["at"]) + timedelta(seconds=GAP_S))
        st.fresh.add(len(rows))
        yield "seen", *key, st.count.add(len(rows)), st.fresh.get(), len(st.prices), None

    def on_timer(self, key: Any, timer: Any, st: Any) -> Any:
        yield "over", *key, st.count.get(), None, len(st.by_price), st.spent.get(Decimal(0))
        st.count.clear()
        st.prices.clear()
        st.by_price.clear()
        st.spent.clear()


def make_op(path: Path | None, **changes: Any) -> sks.StatefulOp:
    arguments: dict[str, Any] = {
        "key": ["shop", "item"],
        "output": "what string, shop string, item long, n long, fresh long, kinds long, "
        "spent decimal(38,18)",
        "state": {
            "count": int,
            "spent": Decimal,
            "prices": list[Decimal],
            "by_price": dict[str, int],
            "last": datetime,
            "end": sks.Timers(),
            "fresh": sks.State(int, ttl=sk.TTL(TTL_S, time="event")),
        },
        "path": path,
        "event_time": "at",
        **changes,
    }
    return sks.StatefulOp(arguments.pop("function", Sessions()), **arguments)


def oracle(batches: list[tuple[list[Any], int]]) -> list[tuple[Any, ...]]:
    """What must come out, of batches of rows at a watermark (seconds; below 0: none)."""
    found: list[tuple[Any, ...]] = []
    sessions: dict[Any, list[Any]] = defaultdict(list)  # prices and nulls since the last timer
    ends: dict[Any, int] = {}
    fresh: dict[Any, tuple[int, int]] = {}  # count, and watermark when it was touched
    for rows, watermark in batches:
        by_key = defaultdict(list)
        for shop, item, second, price in rows:
            if (watermark <= 0 or second > watermark) and shop != "flush":
                by_key[shop, item].append((second, None if price is None else Decimal(price)))
        for key, values in by_key.items():
            sessions[key] += [price for _, price in values]
            ends[key] = max(second for second, _ in values) + GAP_S
            n, at = fresh.get(key, (0, 0))
            if at and at + TTL_S <= watermark:
                n = 0
            fresh[key] = n + len(values), max(watermark, 0) or at
            priced = [price for price in sessions[key] if price is not None]
            found.append(("seen", *key, len(sessions[key]), n + len(values), len(priced), None))
        if watermark > 0:
            # The first watermark stamps what is there.
            fresh = {key: (n, at or watermark) for key, (n, at) in fresh.items()}
        for key in sorted(key for key, end in ends.items() if end <= watermark):
            priced = [price for price in sessions[key] if price is not None]
            kinds = len({str(price) for price in priced})
            found.append(("over", *key, len(sessions[key]), None, kinds, sum(priced, Decimal(0))))
            sessions[key] = []
            del ends[key]
    return sorted(found, key=repr)


def batches_of(has_more_batches: bool) -> list[tuple[list[Any], int]]:
    found = []
    largest = 0
    for run in RUNS:
        for rows in run:
            found.append((rows, largest - DELAY_S))
            largest = max(largest, *(second for _, _, second, _ in rows))
        if has_more_batches:
            found.append(([], largest - DELAY_S))
    return found


def add_file(source: Files, rows: list[tuple[str, int | None, int, Any]]) -> None:
    source.add(
        shop=[shop for shop, *_ in rows],
        item=[item for _, item, *_ in rows],
        at=[START + timedelta(seconds=second) for _, _, second, _ in rows],
        price=[None if price is None else Decimal(price).quantize(Decimal("0.01"))
               for *_, price in rows],
    )  # fmt: skip


SCHEMA = "shop string, item long, at timestamp, price decimal(10,2)"


def run_form(spark: Any, place: Path, form: str) -> list[tuple[Any, ...]]:
    """All runs of a form, each a restart of the query; its output."""
    source = Files(place / "in", SCHEMA)
    found: list[tuple[Any, ...]] = []

    def sink(df: Any, batch: int) -> None:
        found.extend(map(tuple, df.collect()))

    op = make_op(place / "state" if form == "foreachBatch" else None)
    for run in RUNS:
        for rows in run:
            add_file(source, rows)
        stream = source.stream(spark).withWatermark("at", f"{DELAY_S} seconds")
        function: Any = sink
        if form == "foreachBatch":
            function = op.foreach_batch(sink, checkpoint=place / "cp", parallelism=2)
        elif form == "applyInPandasWithState":
            stream = op.apply_in_pandas_with_state(stream)
        else:
            stream = op.transform_with_state(stream, pandas=form.endswith("Pandas"))
        run_all(stream, function, place / "cp")
    return sorted(found, key=repr)


@pytest.fixture
def rocksdb(spark: Any) -> Any:
    before = spark.conf.get("spark.sql.streaming.stateStore.providerClass")
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    yield
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", before)


def check(spark: Any, place: Path, form: str) -> None:
    expected = oracle(batches_of(form != "foreachBatch"))
    assert len(expected) > 10
    assert run_form(spark, place, form) == [
        (*row[:6], None if row[6] is None else row[6].quantize(Decimal(1).scaleb(-18)))
        for row in expected
    ]


@pytest.mark.parametrize(
    "form", ["foreachBatch", pytest.param("applyInPandasWithState", marks=not_on_35)]
)
def test_one_function_gives_the_oracles_answer_in_every_form(
    spark: Any, tmp_path: Path, form: str
) -> None:
    check(spark, tmp_path, form)


@pytest.mark.skipif(VERSION < (4, 1), reason="transformWithState of Rows came with 4.1")
def test_one_function_gives_the_oracles_answer_with_transform_with_state(
    spark: Any, tmp_path: Path, rocksdb: None
) -> None:
    check(spark, tmp_path, "transformWithState")


@pytest.mark.nightly
@pytest.mark.skipif(VERSION < (4, 0), reason="transformWithState came with 4.0")
def test_one_function_gives_the_oracles_answer_with_transform_with_state_in_pandas(
    spark: Any, tmp_path: Path, rocksdb: None
) -> None:
    check(spark, tmp_path, "transformWithStateInPandas")


# ---- What travels, and what is refused


@not_on_35
def test_values_come_through_as_they_are(spark: Any, tmp_path: Path) -> None:
    """What Spark makes floats, NaNs and times without zone of, if it may."""
    schema = "user string, small tinyint, big long, f double, yes boolean, d date, b binary"
    big = 2**62 + 1
    columns: dict[str, Any] = {
        "user": ["a", "a", "a"],
        "small": pa.array([1, None, -128], pa.int8()),
        "big": [big, None, -(2**63)],
        "f": pa.array([float("nan"), None, -0.0], pa.float64()),
        "yes": [True, None, False],
        "d": [date(1960, 2, 29), None, date(9999, 12, 31)],
        "b": [b"", None, b"\0x"],
    }
    source = Files(tmp_path / "in", schema)
    source.add(**columns)

    def on_key(key: Any, rows: Any, st: Any) -> Any:
        yield key, repr([tuple(row) for row in rows])

    op = sks.StatefulOp(on_key, key="user", output="user string, text string", state={"n": int})
    found: list[Any] = []
    stream = op.apply_in_pandas_with_state(source.stream(spark))
    run_all(stream, lambda df, _: found.extend(map(tuple, df.collect())), tmp_path / "cp")
    expected = [*zip(*(pa.array(column).to_pylist() for column in columns.values()), strict=True)]
    assert found == [("a", repr(expected))]


def test_what_the_forms_cannot_do_is_said_when_they_are_asked(spark: Any, tmp_path: Path) -> None:
    source = Files(tmp_path / "in", "user string, at timestamp, tags array<string>")
    stream = source.stream(spark)
    plain = {"key": "user", "output": "user string", "state": {"n": int}}

    def apply(df: Any, **changes: Any) -> None:
        function = changes.pop("function", lambda key, rows, st: None)
        sks.StatefulOp(function, **{**plain, **changes}).apply_in_pandas_with_state(df)

    with pytest.raises(ArgumentError, match=r"'tags' is of type array<string>.*to_json"):
        apply(stream)
    stream = stream.drop("tags")
    with pytest.raises(ArgumentError, match=r"no watermark. Call withWatermark"):
        apply(stream, state={"end": sks.Timers()}, on_timer=lambda key, timer, st: None)
    with pytest.raises(ArgumentError, match="no watermark"):
        apply(stream, event_time="at")
    with pytest.raises(ArgumentError, match="is no stream"):
        apply(spark.range(1).selectExpr("cast(id as string) user"))
    with pytest.raises(ArgumentError, match="called for one key at a time"):
        apply(stream, function=None, on_batch=lambda keys, table, state: None)
    with pytest.raises(ArgumentError, match="no path where its state is kept"):
        sks.StatefulOp(lambda key, rows, st: None, **plain).backfill(spark.range(1), "x")
    if VERSION >= (4, 1):
        with pytest.raises(ArgumentError, match=r"RocksDB state store, and .*providerClass"):
            sks.StatefulOp(lambda key, rows, st: None, **plain).transform_with_state(stream)


def test_what_a_version_lacks_is_said(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    op = sks.StatefulOp(lambda *_: None, key="a", output="a string", state={"n": int})
    monkeypatch.setattr(pyspark, "__version__", "3.5.4")
    with pytest.raises(MissingPackageError, match=r"3\.5 has no transformWithState, .* with 4\.0"):
        op.transform_with_state(None)
    monkeypatch.setattr(pyspark, "__version__", "4.0.1")
    with pytest.raises(MissingPackageError, match=r"4\.0 has no .* of Rows.*pass pandas=True"):
        op.transform_with_state(None)


@not_on_35
def test_nulls_in_keys_fail_the_query_or_are_left_out(spark: Any, tmp_path: Path) -> None:
    source = Files(tmp_path / "in", "user long")
    source.add(user=[1, None, 0, 1])

    def run(place: Path, **changes: Any) -> list[Any]:
        op = sks.StatefulOp(
            lambda key, rows, st: [(key, st.n.add(len(rows)))],
            key="user",
            output="user long, n long",
            state={"n": int},
            **changes,
        )
        found: list[Any] = []
        stream = op.apply_in_pandas_with_state(source.stream(spark))
        run_all(stream, lambda df, _: found.extend(map(tuple, df.collect())), place)
        return sorted(found)

    with pytest.raises(Exception, match="null in its key"):
        run(tmp_path / "cp1")
    assert run(tmp_path / "cp2", null_keys="drop") == [(0, 1), (1, 2)]
