"""StatefulOp on real streams: every answer against a plain-Python oracle."""

import random
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StructField, StructType
from streams import Files, Query, Sink, contents, count, run_all

import statekit as sk
import statekit.spark as sks
from statekit.errors import ArgumentError, KeyTypeError, StatefulOpError
from statekit.spark.routing import markers_of, murmur3_int, plan_routing, route

START = datetime(2026, 1, 1, tzinfo=UTC)


def counting(place: Path, **changes: Any) -> sks.StatefulOp:
    arguments: dict[str, Any] = {
        "key": "user",
        "output": "user string, n long",
        "state": {"count": int},
        "path": place / "state",
        "key_groups": 16,
        **changes,
    }
    function = arguments.pop("function", count)
    return sks.StatefulOp(function, **arguments)


# ---- Routing


def test_the_jvm_computes_the_key_group_that_statekit_computes(spark: Any) -> None:
    numbers = [0, 1, -1, 127, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 42]
    texts = ["", "a", "ä", "日本語", "x" * 100, "a\0b", "key", "Z", "9"]
    rows = [(n, t, t.encode(), int(n % 100)) for n, t in zip(numbers, texts, strict=True)]
    df = spark.createDataFrame(rows, "n long, t string, b binary, small int")

    def tell(pieces: Any) -> Any:
        from pyspark import TaskContext

        at = TaskContext.get().partitionId()
        for piece in pieces:
            yield piece.append_column("at", pa.array([at] * piece.num_rows, pa.int32()))

    for key, hint, groups, tasks in (
        (("n",), int, 128, 3),
        (("t",), str, 16, 4),
        (("b",), bytes, 1, 1),
        (("t", "n"), tuple[str, int], 4096, 3),
        (("n", "b", "small"), tuple[int, bytes, int], 128, 5),
    ):
        routing = plan_routing(df.schema, key)
        routed = route(df, routing, groups, tasks)
        schema = StructType([*routed.schema.fields, StructField("at", IntegerType())])
        found = routed.mapInArrow(tell, schema).collect()
        assert len(found) == len(rows)
        shares = sk.assign(groups, tasks)
        for row in found:
            one = tuple(bytes(row[k]) if k == "b" else row[k] for k in key)
            group = sk.leaf_of(hint, one if len(key) > 1 else one[0], groups, 1)
            assert group in shares[row["at"]]


def test_murmur3_is_sparks_hash(spark: Any) -> None:
    found = spark.range(200).selectExpr("cast(id as int) id", "hash(cast(id as int)) h").collect()
    assert {row.id: row.h for row in found} == {n: murmur3_int(n) for n in range(200)}


@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_spark_without_repartition_by_id_sends_rows_to_the_same_tasks(
    spark: Any, tasks: int
) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    markers = F.array(*(F.lit(one) for one in markers_of(tasks)))
    df = spark.range(tasks * 3).withColumn("want", (F.col("id") % tasks).cast("int"))
    sent = df.repartition(tasks, F.element_at(markers, F.col("want") + 1))
    for row in sent.withColumn("at", F.spark_partition_id()).collect():
        assert row["at"] == row["want"]


def test_columns_that_are_no_keys_are_refused_and_the_message_says_what_to_do(spark: Any) -> None:
    schema = "t timestamp, f double, d decimal(10,2), e decimal(18,0), s short, a array<int>"
    df = spark.createDataFrame([], schema)
    for name in ("t", "f", "d", "a"):
        with pytest.raises(KeyTypeError, match=rf"column '{name}' is of type .*cast"):
            plan_routing(df.schema, [name])
    assert plan_routing(df.schema, ["e", "s"]).key_type == "(ii)"
    with pytest.raises(KeyTypeError, match=r"no column 'x' to be the key. The batch has t, f"):
        plan_routing(df.schema, ["x"])


# ---- A stream


def test_a_stream_is_counted_exactly_over_a_restart_and_changing_parallelism(
    spark: Any, tmp_path: Path
) -> None:
    source = Files(tmp_path / "in", "user string, v long")
    op, sink, oracle, expected = counting(tmp_path), Sink(), Counter(), []
    dice = random.Random(1)

    def add_file() -> None:
        users = [f"user-{dice.randrange(40)}" for _ in range(100)]
        source.add(user=users, v=list(range(100)))
        oracle.update(users)
        expected.append(sorted((user, oracle[user]) for user in set(users)))

    tasks = {0: 2, 1: 5, 2: 3, 3: 1, 4: 16, 5: 2}
    for _ in range(2):  # the second time is a restart
        for _ in range(3):
            add_file()
        function = op.foreach_batch(
            sink, checkpoint=tmp_path / "cp", parallelism=lambda batch: tasks[batch]
        )
        run_all(source.stream(spark), function, tmp_path / "cp")
    assert sink.calls == list(enumerate(expected))
    assert contents(tmp_path / "state", "count", int) == oracle
    versions = sk.checkpoints(tmp_path / "state")
    assert [one.number for one in versions] == [1, 2, 3, 4, 5, 6]  # batch b is version b + 1
    assert [one.metadata["spark"]["parallelism"] for one in versions] == [*tasks.values()]


def test_every_kind_of_state_in_both_forms_gives_what_plain_python_gives(
    spark: Any, tmp_path: Path
) -> None:
    source = Files(tmp_path / "in", "shop string, item int, price double")
    dice = random.Random(2)
    files = []
    for _ in range(3):
        rows = [
            (f"s{dice.randrange(3)}", dice.randrange(4), dice.randrange(100) / 4) for _ in range(80)
        ]
        files.append(rows)
        shops, items, prices = zip(*rows, strict=True)
        source.add(shop=shops, item=pa.array(items, pa.int32()), price=prices)

    def on_key(key: Any, rows: Any, st: Any) -> Any:
        shop, item = key
        for row in rows:
            st.total.add(row.price)
            st.prices.append(row.price)
            st.by_price[str(row.price)] = st.by_price.get(str(row.price), 0) + 1
            st.seen.add(row.price)
        st.last.set((shop, rows["price"][-1]))
        yield shop, item, st.total.get(), len(st.prices), len(st.seen), st.last.get()[1]

    oracle: dict[Any, list[float]] = defaultdict(list)
    expected = []
    for rows in files:
        for shop, item, price in rows:
            oracle[shop, item].append(price)
        touched = {(shop, item) for shop, item, _ in rows}
        expected.append(
            sorted(
                (*key, sum(oracle[key]), len(oracle[key]), len(set(oracle[key])), oracle[key][-1])
                for key in touched
            )
        )

    op = sks.StatefulOp(
        on_key,
        key=["shop", "item"],
        output="shop string, item long, total double, n long, kinds long, last double",
        state={
            "total": float,
            "prices": list[float],
            "by_price": dict[str, int],
            "seen": set[float],
            "last": tuple[str, float],
        },
        path=tmp_path / "state",
        key_groups=8,
    )
    sink = Sink()
    function = op.foreach_batch(sink, checkpoint=tmp_path / "cp", parallelism=3)
    run_all(source.stream(spark), function, tmp_path / "cp")
    assert sink.calls == list(enumerate(expected))
    by_price = contents(tmp_path / "state", "by_price", dict[str, int], tuple[str, int])
    assert by_price == {
        key: Counter(str(price) for price in prices) for key, prices in oracle.items()
    }

    def on_batch(keys: Any, table: Any, state: Any) -> Any:
        state.total.add_many(keys, table.column("price"))
        shop, item = keys
        yield {"shop": shop, "item": item, "total": state.total.get_many(keys).to_arrow()}

    vectorised = sks.StatefulOp(
        on_batch=on_batch,
        key=["shop", "item"],
        output="shop string, item long, total double",
        state={"total": float},
        path=tmp_path / "state2",
        key_groups=8,
    )
    sink = Sink()
    function = vectorised.foreach_batch(sink, checkpoint=tmp_path / "cp2", parallelism=2)
    run_all(source.stream(spark), function, tmp_path / "cp2")
    for batch, rows in sink.calls:
        assert {row[:3] for row in rows} == {row[:3] for row in expected[batch]}
        assert len(rows) == len(files[batch])


# ---- Event time


def test_timers_and_ttl_follow_sparks_watermark_and_timers_fire_on_batches_without_rows(
    spark: Any, tmp_path: Path
) -> None:
    source = Files(tmp_path / "in", "user string, at timestamp")

    def add_file(*rows: tuple[str, int]) -> None:
        times = [START + timedelta(seconds=second) for _, second in rows]
        source.add(user=[user for user, _ in rows], at=times)

    def on_key(user: str, rows: Any, st: Any) -> Any:
        st.end.move(max(rows["at"]) + timedelta(seconds=10))
        st.fresh.add(len(rows))
        yield "seen", user, st.count.add(len(rows)), st.fresh.get()

    def on_timer(user: str, timer: Any, st: Any) -> Any:
        assert timer.name == "end"
        assert st.watermark >= timer.due
        yield "over", user, st.count.get(), (timer.due - int(START.timestamp() * 1000)) // 1000
        st.count.clear()

    op = sks.StatefulOp(
        on_key,
        on_timer=on_timer,
        key="user",
        output="what string, user string, n long, m long",
        state={
            "count": int,
            "end": sks.Timers,
            "fresh": sks.State(int, ttl=sk.TTL(timedelta(seconds=100), time="event")),
        },
        path=tmp_path / "state",
        key_groups=8,
        event_time="at",
    )
    # Rows of these times move the watermark, and are not in the batch. (A filter on another column
    # Spark would move to before the watermark.)
    unseen = "at between '2026-01-01 00:00:50' and '2026-01-01 00:01:00'"
    stream = source.stream(spark).withWatermark("at", "5 seconds").where(f"not {unseen}")
    add_file(("a", 0), ("a", 3), ("b", 8))  # 0: watermark none
    add_file(("a", 12), ("b", 3))  # 1: watermark 3: b at 3 is late
    add_file(("nobody", 50))  # 2: watermark 7, and no rows
    add_file(("nobody", 60))  # 3: watermark 45: a and b are over; no rows
    add_file(("b", 400))  # 4: watermark 55
    add_file(("a", 410), ("b", 398))  # 5: watermark 395: the fresh count of both has expired
    sink = Sink()
    function = op.foreach_batch(sink, checkpoint=tmp_path / "cp", parallelism=2)
    run_all(stream, function, tmp_path / "cp")
    assert sink.batches == {
        0: [("seen", "a", 2, 2), ("seen", "b", 1, 1)],
        1: [("seen", "a", 3, 3)],
        2: [],
        3: [("over", "a", 3, 22), ("over", "b", 1, 18)],
        4: [("seen", "b", 1, 2)],
        5: [("seen", "a", 1, 1), ("seen", "b", 2, 1)],
    }


def test_late_rows_are_kept_if_asked(spark: Any, tmp_path: Path) -> None:
    query, sink = Query(tmp_path / "cp"), Sink()
    op = counting(tmp_path, event_time="at", late="keep")
    function = op.foreach_batch(sink, checkpoint=tmp_path / "cp")
    query.plan(0, watermark=10_000)
    rows = [("a", datetime.fromtimestamp(1, UTC)), ("a", datetime.fromtimestamp(20, UTC))]
    function(spark.createDataFrame(rows, "user string, at timestamp"), 0)
    assert sink.calls == [(0, [("a", 2)])]


# ---- What a function may be, and what it may not


class Classed:
    """The class form."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.opened = 0

    def open(self) -> None:
        self.opened += 1

    def on_key(self, key: str, rows: Any, st: Any) -> Any:
        assert self.opened == 1
        yield key, st.count.add(self.step * len(rows))

    def close(self) -> None:
        self.opened -= 1


def apply(op: sks.StatefulOp, spark: Any, place: Path, rows: Any, schema: str) -> list[Any]:
    """The first batch of a query."""
    query, sink = Query(place / "cp"), Sink()
    query.plan(0)
    function = op.foreach_batch(sink, checkpoint=place / "cp", parallelism=2)
    function(spark.createDataFrame(rows, schema), 0)
    return sink.calls[0][1]


def test_the_class_form_is_opened_before_it_is_called(spark: Any, tmp_path: Path) -> None:
    op = counting(tmp_path, function=Classed(3))
    assert apply(op, spark, tmp_path, [("a",), ("a",), ("b",)], "user string") == [
        ("a", 6),
        ("b", 3),
    ]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("int", [1, 2, 1]),
        ("binary", [b"x", b"", b"x"]),
        ("decimal(18,0)", [Decimal(5), Decimal(10**17), Decimal(5)]),
        ("long", [2**63 - 1, -(2**63), -1]),
    ],
)
def test_keys_of_other_types_are_taken_exactly(
    spark: Any, tmp_path: Path, kind: str, values: list[Any]
) -> None:
    output = "user binary, n long" if kind == "binary" else "user long, n long"
    op = counting(tmp_path, output=output)
    found = apply(op, spark, tmp_path, [(value,) for value in values], f"user {kind}")
    assert {(bytes(k) if kind == "binary" else k, n) for k, n in found} == {
        (value, values.count(value)) for value in values
    }


def test_null_keys_are_refused_with_their_number_or_left_out_if_asked(
    spark: Any, tmp_path: Path
) -> None:
    rows = [("a",), (None,), ("b",), (None,)]
    with pytest.raises(StatefulOpError, match=r"2 of \d rows .*null in their key \(user\)"):
        apply(counting(tmp_path), spark, tmp_path, rows, "user string")
    assert not sk.checkpoints(tmp_path / "state")
    dropping = counting(tmp_path, null_keys="drop")
    found = apply(dropping, spark, tmp_path / "again", rows, "user string")
    assert found == [("a", 1), ("b", 1)]


WRONG = {
    "row": (lambda key, rows, st: [key], r"gave 'a', of type str, as a row"),
    "value": (lambda key, rows, st: [(key, "x")], r"column 'n' is 'x', of type str, and not int64"),
    "width": (lambda key, rows, st: [(key,)], r"which has 1 columns and not 2"),
    "no rows": (lambda key, rows, st: 5, r"on_key of key 'a' gave 5. It must yield rows"),
    "a tuple for rows": (lambda key, rows, st: (key, 1), r"gave 'a', of type str, as a row"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_output_is_explained_without_sparks_stack(
    spark: Any, tmp_path: Path, what: str
) -> None:
    function, message = WRONG[what]
    with pytest.raises(StatefulOpError, match=message):
        apply(counting(tmp_path, function=function), spark, tmp_path, [("a",)], "user string")


def test_wrong_tables_of_a_vectorised_function_are_explained(spark: Any, tmp_path: Path) -> None:
    for at, (given, message) in enumerate(
        [
            (lambda keys, table, state: 5, "gave 5, of type int"),
            (lambda keys, table, state: {"user": keys}, r"columns \(user\) that does not fit"),
            (lambda keys, table, state: {"user": keys, "n": keys}, "n long|int64"),
        ]
    ):
        place = tmp_path / str(at)
        op = counting(place, function=None, on_batch=given)
        with pytest.raises(StatefulOpError, match=message):
            apply(op, spark, place, [("a",)], "user string")


def test_a_function_that_cannot_be_pickled_is_explained(spark: Any, tmp_path: Path) -> None:
    def on_key(key: Any, rows: Any, st: Any) -> Any:
        yield key, spark.range(1).count()

    with pytest.raises(StatefulOpError, match=r"cannot be sent to the executors.*open\(\)"):
        apply(counting(tmp_path, function=on_key), spark, tmp_path, [("a",)], "user string")


def test_an_error_of_the_function_names_its_key(spark: Any, tmp_path: Path) -> None:
    def on_key(key: Any, rows: Any, st: Any) -> Any:
        raise ZeroDivisionError("of mine")

    with pytest.raises(Exception, match=r"(?s)of mine.*on_key of key 'a'"):
        apply(counting(tmp_path, function=on_key), spark, tmp_path, [("a",)], "user string")


def test_another_version_on_an_executor_is_explained(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statekit.spark.shipping.__version__", "9.9.9")
    with pytest.raises(Exception, match=r"statekit 0\.1\.0 is installed on .*driver has 9\.9\.9"):
        apply(counting(tmp_path), spark, tmp_path, [("a",)], "user string")


def test_arguments_are_checked_when_the_op_is_made(tmp_path: Path) -> None:
    for changes, message in (
        ({"key": []}, "names no column"),
        ({"key": 3}, "key=3 names no column"),
        ({"state": {"count": complex}}, "complex"),
        ({"state": 5}, "no dict of states"),
        ({"key_groups": 100}, "power of two"),
        ({"late": "error"}, "late='error' is neither drop nor keep"),
        ({"null_keys": "keep"}, "null_keys='keep'"),
        ({"keep": 1}, "Keep 2 versions or more"),
        ({"function": None}, "one function"),
        ({"on_batch": count}, "one function"),
        ({"function": Classed}, "Pass an object of it"),
        ({"on_timer": count}, "no state of timers"),
        ({"output_path": tmp_path / "state"}, "both"),
    ):
        with pytest.raises(sk.StateKitError, match=message):
            counting(tmp_path, **changes)
    with pytest.raises(ArgumentError, match="nothing that could be accepted"):
        counting(tmp_path).foreach_batch(checkpoint="x", accept="everything")


@pytest.mark.parametrize("wrong", [0, 17, "2", 2.0])
def test_parallelism_is_at_most_the_number_of_key_groups(
    spark: Any, tmp_path: Path, wrong: Any
) -> None:
    Query(tmp_path / "cp").plan(0)
    function = counting(tmp_path).foreach_batch(checkpoint=tmp_path / "cp", parallelism=wrong)
    with pytest.raises(ArgumentError, match="from 1 to 16"):
        function(spark.createDataFrame([("a",)], "user string"), 0)


def test_a_schema_that_is_none_is_explained(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="output='user strin' is no schema"):
        apply(counting(tmp_path, output="user strin"), spark, tmp_path, [("a",)], "user string")
