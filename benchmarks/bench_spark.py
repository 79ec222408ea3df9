"""State on Spark: a StatefulOp against what Spark has, batch by batch.

    python benchmarks/bench_spark.py [--quick] [--only row ...]

All contenders are queries of one JVM that take turns: a batch of one, then a batch of the next.
Measured is what Spark says of the whole trigger (triggerExecution), from looking for new files to
the record that the batch is done. Spark's own state is in RocksDB with changelog checkpoints.
Writes results/spark.json after each row, and results/spark_growth.png.

    row            minutes, about
    count          2                key count, against groupBy().count() and no state at all
    count_python   14               the same against Spark's Python APIs, some of them 25 s a batch
    nested         7                a list append and a map put for each record
    large          1                a million keys are stored, 20,000 of them touched
    rescale        1                from 2 tasks to 5
    written        2                bytes of state, written and kept
    growth         5                10,000 touched keys, while the state grows to 5 million
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from compare import RESULTS, Report, Row, medians, ratio

import statekit as sk
import statekit.spark as sks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "spark"))
from session import spark_session

RECORDS, KEYS = 200_000, 20_000
TASKS = 2
SCHEMA = "user string, item string, n long"
PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class Stream:
    """A contender: a query over files of its own."""

    def __init__(self, name: str, place: Path, spark: Any, start: Callable[[Any, Path], Any]):
        self.name = name
        self.place = place / name.replace(" ", "-").replace("/", "-")
        self.inputs = self.place / "in"
        self.inputs.mkdir(parents=True)
        frame = (
            spark.readStream.schema(SCHEMA)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(self.inputs))
        )
        self.query = start(frame, self.place)
        self.count = 0

    def run(self, batch: Path) -> float:
        """Milliseconds of the trigger that processes one more file."""
        os.utime(batch)
        os.link(batch, self.inputs / f"{self.count:06d}.parquet")
        self.count += 1
        self.query.processAllAvailable()
        last = [one for one in self.query.recentProgress if one["numInputRows"]][-1]
        return float(last["durationMs"]["triggerExecution"])


# ---- Contenders


def writer(frame: Any, place: Path, mode: str = "append") -> Any:
    return frame.writeStream.outputMode(mode).option("checkpointLocation", str(place / "cp"))


def noop(df: Any, _: int) -> None:
    df.write.format("noop").mode("overwrite").save()


def with_op(sink: Any = noop, parallelism: Any = TASKS, **arguments: Any) -> Any:
    def start(frame: Any, place: Path) -> Any:
        op = sks.StatefulOp(key="user", path=place / "state", **arguments)
        function = op.foreach_batch(sink, checkpoint=place / "cp", parallelism=parallelism)
        return writer(frame, place).foreachBatch(function).start()

    return start


def with_spark(make: Callable[[Any], Any]) -> Any:
    """A query that ends in Spark's own sink of nothing."""
    return lambda frame, place: writer(make(frame), place, "update").format("noop").start()


def count_key(key: Any, rows: Any, st: Any) -> Any:
    yield key, st.count.add(len(rows))


def count_batch(keys: Any, table: Any, state: Any) -> Any:
    counted = keys.value_counts()
    users, numbers = counted.field("values"), counted.field("counts")
    found = state.count.add_many(users, numbers, returning=True)
    return {"user": users, "n": found.to_arrow()}


def count_in_pandas_with_state(frame: Any) -> Any:
    import pandas as pd

    def count(key: Any, pdfs: Iterable[Any], state: Any) -> Iterator[Any]:
        n = state.get[0] if state.exists else 0
        n += sum(map(len, pdfs))
        state.update((n,))
        yield pd.DataFrame({"user": [key[0]], "n": [n]})

    return frame.groupBy("user").applyInPandasWithState(
        count, "user string, n long", "n long", "update", "NoTimeout"
    )


def processor(kind: str) -> Any:
    from pyspark.sql.streaming import StatefulProcessor

    class Counting(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.count = handle.getValueState("count", "n long")

        def handleInputRows(self, key: Any, rows: Any, timers: Any) -> Any:  # noqa: N802
            n = self.count.get()[0] if self.count.exists() else 0
            if kind == "pandas":
                import pandas as pd

                n += sum(map(len, rows))
                self.count.update((n,))
                yield pd.DataFrame({"user": [key[0]], "n": [n]})
            else:
                from pyspark.sql import Row as SparkRow

                n += sum(1 for _ in rows)
                self.count.update((n,))
                yield SparkRow(user=key[0], n=n)

        def close(self) -> None:
            pass

    return Counting()


def count_with_state(frame: Any, kind: str = "row") -> Any:
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    output = StructType([StructField("user", StringType()), StructField("n", LongType())])
    grouped = frame.groupBy("user")
    name = "transformWithStateInPandas" if kind == "pandas" else "transformWithState"
    return getattr(grouped, name)(processor(kind), output, "Update", "None")


def nested_key(key: Any, rows: Any, st: Any) -> Any:
    st["items"].extend(rows["n"])
    st.by_item.update(zip(rows["item"], rows["n"], strict=True))
    yield key, len(rows)


def nested_with_state(frame: Any) -> Any:
    from pyspark.sql import Row as SparkRow
    from pyspark.sql.streaming import StatefulProcessor
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    class Nested(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.items = handle.getListState("items", "n long")
            self.by_item = handle.getMapState("by_item", "item string", "n long")

        def handleInputRows(self, key: Any, rows: Any, timers: Any) -> Any:  # noqa: N802
            n = 0
            for row in rows:
                self.items.appendValue((row.n,))
                self.by_item.updateValue((row.item,), (row.n,))
                n += 1
            yield SparkRow(user=key[0], n=n)

        def close(self) -> None:
            pass

    output = StructType([StructField("user", StringType()), StructField("n", LongType())])
    return frame.groupBy("user").transformWithState(Nested(), output, "Update", "None")


def stateless(frame: Any, place: Path) -> Any:
    """The same pipeline without any state: what is left is Spark's."""

    def through(df: Any, _: int) -> None:
        def tell(pieces: Any) -> Any:
            yield pa.RecordBatch.from_pydict({"n": [sum(piece.num_rows for piece in pieces)]})

        df.repartition(TASKS, "user").mapInArrow(tell, "n long").collect()

    return writer(frame, place).foreachBatch(through).start()


PER_KEY = "statekit per key"
COUNT = {"output": "user string, n long", "state": {"count": int}}


# ---- Rows


class Bench:
    def __init__(self, spark: Any, place: Path, report: Report, is_quick: bool) -> None:
        self.spark, self.place, self.report, self.is_quick = spark, place, report, is_quick
        self.warm, self.rounds = (1, 2) if is_quick else (3, 10)
        self.share = 10 if is_quick else 1
        self.dice = np.random.default_rng(1)
        self.made = 0

    def batch(self, keys: int = KEYS, records: int = RECORDS) -> Path:
        """A file of records with random keys. The same for all contenders."""
        keys, records = keys // self.share, records // self.share
        return self.file(self.dice.integers(0, keys, records))

    def file(self, users: Any) -> Path:
        """A file with a record for each of these users."""
        records = len(users)
        table = pa.table(
            {
                "user": pa.array([f"user-{user:08d}" for user in users.tolist()]),
                "item": pa.array([f"item-{n % 7}" for n in range(records)]),
                "n": pa.array(self.dice.integers(0, 1000, records)),
            }
        )
        path = self.place / f"batch-{self.made}.parquet"
        self.made += 1
        pq.write_table(table, path)
        return path

    def measure(self, starts: dict[str, Any], folder: str, **batch: Any) -> dict[str, list[float]]:
        streams = [
            Stream(name, self.place / folder, self.spark, start) for name, start in starts.items()
        ]
        times: dict[str, list[float]] = {one.name: [] for one in streams}
        for at in range(self.warm + self.rounds):
            path = self.batch(**batch)
            for one in streams:
                took = one.run(path)
                if at >= self.warm:
                    times[one.name].append(took)
        for one in streams:
            one.query.stop()
        return times

    def add(self, what: str, times: dict[str, list[float]], slow: str, fast: str, least: float):
        figures = {
            f"{name} ms": value for name, value in medians(times).items() if name in (slow, fast)
        }
        spread = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
        figures |= {"least": min(spread), "most": max(spread)}
        self.report.add(Row(what, ratio(times, slow, fast), "x", least, figures=figures))

    def count(self) -> None:
        """Key count, 200 k records over 20 k keys a batch."""
        starts = {
            PER_KEY: with_op(function=count_key, **COUNT),
            "statekit vectorised": with_op(on_batch=count_batch, **COUNT),
            "statekit attachments": with_op(None, function=count_key, **COUNT),
            "groupBy.count": with_spark(lambda frame: frame.groupBy("user").count()),
            "stateless": stateless,
        }
        times = self.measure(starts, "count")
        self.report.series["key count ms"] = times
        self.add(
            "key count, function per key, vs groupBy.count", times, "groupBy.count", PER_KEY, 0.85
        )
        for name, least in (("statekit vectorised", 0.9), ("statekit attachments", 1.0)):
            what = f"key count, {name}, vs groupBy.count"
            self.add(what, times, "groupBy.count", name, least)
        self.add(
            "key count, function per key, vs no state at all", times, "stateless", PER_KEY, 0.0
        )

    def count_python(self) -> None:
        """The same against what Spark has for Python functions."""
        others = {
            "transformWithStateInPandas": (lambda frame: count_with_state(frame, "pandas"), 15.0),
            "applyInPandasWithState": (count_in_pandas_with_state, 15.0),
            "transformWithState": (count_with_state, 5.0),
        }
        starts = {PER_KEY: with_op(function=count_key, **COUNT)}
        starts |= {name: with_spark(make) for name, (make, _) in others.items()}
        times = self.measure(starts, "count-python")
        self.report.series["key count by Python functions ms"] = times
        for name, (_, least) in others.items():
            self.add(f"key count, function per key, vs {name}", times, name, PER_KEY, least)

    def nested(self) -> None:
        """One list append and one map put per record."""
        starts = {
            "statekit": with_op(
                function=nested_key,
                output="user string, n long",
                state={"items": list[int], "by_item": dict[str, int]},
            ),
            "transformWithState": with_spark(nested_with_state),
        }
        times = self.measure(starts, "nested")
        what = "one list append and one map put per record, vs Row transformWithState"
        self.add(what, times, "transformWithState", "statekit", 15.0)

    def large(self) -> None:
        """1 M keys of 64 bytes are stored, 20 k of them are touched."""

        def put(key: Any, rows: Any, st: Any) -> Any:
            st.text.set(f"{rows['n'][-1]:064d}")
            yield key, 1

        def put_batch(keys: Any, table: Any, state: Any) -> Any:
            texts = [f"{n:064d}" for n in table.column("n").to_pylist()]
            state.text.put_many(keys, texts)
            return {"user": keys, "n": pa.array([1] * len(keys), pa.int64())}

        output: dict[str, Any] = {"output": "user string, n long", "state": {"text": str}}
        starts = {
            "statekit per key": with_op(function=put, **output),
            "statekit vectorised": with_op(on_batch=put_batch, **output),
            "built-in": with_spark(
                lambda frame: frame.groupBy("user").agg({"item": "max", "n": "last"})
            ),
        }
        folder = "large"
        streams = [
            Stream(name, self.place / folder, self.spark, start) for name, start in starts.items()
        ]
        users = pa.array([f"user-{n:08d}" for n in range(1_000_000 // self.share)])
        every = self.place / "every.parquet"
        texts = pa.array(["x" * 56] * len(users))
        pq.write_table(pa.table({"user": users, "item": texts, "n": range(len(users))}), every)
        times: dict[str, list[float]] = {one.name: [] for one in streams}
        for one in streams:
            one.run(every)
        for at in range(self.warm + self.rounds):
            path = self.batch(keys=1_000_000, records=20_000)
            for one in streams:
                took = one.run(path)
                if at >= self.warm:
                    times[one.name].append(took)
        for one in streams:
            one.query.stop()
        what = "1 M keys of 64 B stored, 20 k touched, vs built-in with RocksDB"
        self.add(f"{what}: per key", times, "built-in", "statekit per key", 1.2)
        self.add(f"{what}: vectorised", times, "built-in", "statekit vectorised", 1.5)

    def rescale(self) -> None:
        """The first batch after the parallelism changed from 2 to 5."""
        tasks = {"n": 2}
        parallelism = lambda _: tasks["n"]  # noqa: E731
        start = with_op(function=count_key, parallelism=parallelism, **COUNT)
        stream = Stream("rescale", self.place, self.spark, start)
        ordinary, first = [], []
        for at in range(self.warm + self.rounds):
            tasks["n"] = 2
            stream.run(self.batch())
            before = stream.run(self.batch())
            tasks["n"] = 5
            after = stream.run(self.batch())
            if at >= self.warm:
                ordinary.append(before)
                first.append(after)
        stream.query.stop()
        spread = [a / b for a, b in zip(first, ordinary, strict=True)]
        value = statistics.median(spread)
        figures = {"first ms": statistics.median(first), "before ms": statistics.median(ordinary)}
        figures |= {"least": min(spread), "most": max(spread)}
        self.report.series["parallelism 2 to 5 ms"] = {"first": first, "before": ordinary}
        self.report.add(
            Row("first batch after parallelism 2 to 5 vs the one before", value, "x the time", 2.0,
                at_most=True, figures=figures)
        )  # fmt: skip

    def written(self) -> None:
        """Bytes of state written per batch, and kept after 50 batches."""
        arguments = {**COUNT, "compression": "zstd"}
        starts = {
            "statekit": with_op(lambda df, batch: None, function=count_key, **arguments),
            "built-in": with_spark(lambda frame: frame.groupBy("user").count()),
        }
        streams = [
            Stream(name, self.place / "written", self.spark, start)
            for name, start in starts.items()
        ]
        written = {one.name: 0 for one in streams}
        for _ in range(50 // self.share):
            path = self.batch()
            for one in streams:
                before = _sizes(one.place)
                one.run(path)
                after = _sizes(one.place)
                written[one.name] += sum(
                    size for name, size in after.items() if before.get(name) != size
                )
        kept = {one.name: sum(_sizes(one.place).values()) for one in streams}
        for one in streams:
            one.query.stop()
        for what, found in (("written in 50 batches", written), ("kept after them", kept)):
            self.report.add(
                Row(f"bytes of state {what}, vs RocksDB with changelog",
                    found["statekit"] / found["built-in"], "x", 1.0, at_most=True,
                    figures={f"{name} MB": size / 1e6 for name, size in found.items()})
            )  # fmt: skip

    def growth(self) -> None:
        """The same 10 k keys' worth of work, while the state grows."""
        touched, rounds = 10_000, 2 * self.rounds
        starts = {
            "statekit": with_op(function=count_key, **COUNT),
            "groupBy.count": with_spark(lambda frame: frame.groupBy("user").count()),
        }
        streams = [
            Stream(name, self.place / "growth", self.spark, start) for name, start in starts.items()
        ]
        stored = 0
        found: dict[str, dict[int, list[float]]] = {name: {} for name in starts}
        for keys in (10_000, 100_000, 1_000_000, 5_000_000):
            while stored < keys // self.share:
                upto = min(keys // self.share, stored + 1_000_000)
                path = self.file(np.arange(stored, upto))
                stored = upto
                for one in streams:
                    one.run(path)
            for at in range(self.warm + rounds):
                some = self.dice.choice(stored, touched // self.share, replace=False)
                path = self.file(self.dice.choice(some, RECORDS // self.share))
                for one in streams:
                    took = one.run(path)
                    if at >= self.warm:
                        found[one.name].setdefault(keys, []).append(took)
        for one in streams:
            one.query.stop()
        series = {
            name: {str(keys): times for keys, times in by_keys.items()}
            for name, by_keys in found.items()
        }
        self.report.series["batch ms as the state grows"] = series
        for name, by_keys in found.items():
            first, *_, last = (statistics.mean(times) for times in by_keys.values())
            figures = {f"{keys:,} keys, ms": statistics.mean(t) for keys, t in by_keys.items()}
            figures |= {"at 5 million: median": statistics.median([*by_keys.values()][-1])}
            figures |= {"most": max([*by_keys.values()][-1])}
            # Means: a batch that compacts counts as well.
            self.report.add(
                Row(f"batch of 10 k keys, state of 5 million vs 10 thousand: {name}", last / first,
                    "x the time", 1.5 if name == "statekit" else None, at_most=True,
                    figures=figures)
            )  # fmt: skip
        if not self.is_quick:
            _plot(found, RESULTS / "spark_growth.png")


def _plot(found: dict[str, dict[int, list[float]]], beside: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130)
    for (name, by_keys), colour in zip(found.items(), ("#08519c", "#d95f0e"), strict=True):
        sizes = [*by_keys]
        axes.plot(
            sizes, [statistics.mean(by_keys[n]) for n in sizes], "o-", color=colour, label=name
        )
        low = [min(by_keys[n]) for n in sizes]
        high = [max(by_keys[n]) for n in sizes]
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("keys stored")
    axes.set_ylabel("ms a batch (mean, least to most)")
    axes.set_title("200 k records over 10 k keys a batch", loc="left", fontsize=11)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(beside)


def _sizes(place: Path) -> dict[str, int]:
    """State files: not the input, the output, or what Spark writes for any query."""
    found = {}
    for path in [*(place / "state").rglob("*"), *(place / "cp" / "state").rglob("*")]:
        try:
            if path.is_file() and path.suffix != ".attachment" and not path.name.endswith(".crc"):
                found[str(path)] = path.stat().st_size
        except FileNotFoundError:
            continue  # it is being cleaned up
    return found


ROWS = ("count", "large", "rescale", "written", "growth", "nested", "count_python")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rounds and a tenth of the records, to try it out"
    )
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, help="all unless named")
    options = parser.parse_args()
    spark = spark_session(
        f"local[{TASKS}]",
        spark__driver__memory="3g",
        spark__sql__streaming__stateStore__providerClass=PROVIDER,
        spark__sql__streaming__stateStore__rocksdb__changelogCheckpointing__enabled="true",
        spark__sql__streaming__pollingDelay="500ms",  # queries that wait must not be in the way
        spark__sql__shuffle__partitions=TASKS,
    )
    name = "spark_quick" if options.quick else "spark"
    with tempfile.TemporaryDirectory(prefix="statekit-spark-") as folder:
        for row in options.only:
            started = time.monotonic()
            report = Report(name)
            report.series["pyspark"] = spark.version
            report.series["statekit"] = sk.__version__
            place = Path(folder, row)
            place.mkdir()
            getattr(Bench(spark, place, report, options.quick), row)()
            print(f"{row}: {time.monotonic() - started:.0f} s", flush=True)
            report.write(keep=True)
            shutil.rmtree(place, ignore_errors=True)
        spark.stop()


if __name__ == "__main__":
    main()
