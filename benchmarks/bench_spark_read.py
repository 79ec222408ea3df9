"""Reading a million keys of state as a DataFrame: statekit against Spark's own reader.

    python benchmarks/bench_spark_read.py [--only ints|strings] [--keys N] [--rounds N]
                                          [--partitions N]

The same entries are in a checkpoint of statekit and in the state store of a streaming query
(RocksDB, groupBy().agg(max)). Both are read with write.format("noop"), by turns in one JVM, the
planning of the query and the start-up of the readers included. Also measured: the same checkpoint
without Spark. The state store has Spark's default configuration, so 200 partitions, which is what
the rows are compared by. With few partitions (--partitions 2) it is several times as fast; but the
number is chosen once, when a query first starts, and bounds its parallelism for ever.

About 5 minutes for each kind. Writes results/spark_read.json.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "spark"))

from compare import Report, Row, medians, ratio  # noqa: E402
from session import spark_session  # noqa: E402

import statekit as sk  # noqa: E402
import statekit.spark as sks  # noqa: E402

WARM_UP = 3
KINDS = {"ints": int, "strings": str}  # strings of 64 bytes
DEFAULT_PARTITIONS = 200  # spark.sql.shuffle.partitions


def values(kind: str, keys: int) -> Any:
    numbers = np.arange(keys) * 7
    if kind == "ints":
        return numbers
    return [f"{number:064d}" for number in numbers.tolist()]


def make_checkpoint(place: Path, kind: str, keys: int) -> sk.Checkpoint:
    kv = sk.open("memory:")
    kv.value("s", KINDS[kind], key=int).put_many(np.arange(keys), values(kind, keys))
    return kv.checkpoint(place)


def make_query(spark: Any, place: Path, kind: str, keys: int) -> Path:
    """The checkpoint of a query whose state is the same entries."""
    from pyspark.sql.functions import max as max_of

    rows = place / "rows"
    rows.mkdir(parents=True)
    table = pa.table({"key": np.arange(keys), "value": pa.array(values(kind, keys))})
    pq.write_table(table, rows / "part.parquet")
    schema = spark.read.parquet(str(rows)).schema
    stream = spark.readStream.schema(schema).parquet(str(rows))
    query = (
        stream.groupBy("key")
        .agg(max_of("value").alias("value"))
        .writeStream.outputMode("update")
        .format("noop")
        .option("checkpointLocation", str(place / "query"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return place / "query"


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def to_nowhere(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def compare(spark: Any, kind: str, keys: int, rounds: int, partitions: int, report: Report) -> None:
    place = Path(tempfile.mkdtemp(prefix="statekit-bench-"))
    checkpoint = make_checkpoint(place / "statekit", kind, keys)
    query = make_query(spark, place, kind, keys)
    contenders: dict[str, Callable[[], object]] = {
        "statekit": lambda: to_nowhere(spark.read.format("statekit").load(str(place / "statekit"))),
        "statestore": lambda: to_nowhere(spark.read.format("statestore").load(str(query))),
        "statekit without Spark": lambda: sum(map(len, checkpoint.to_arrow("s"))),
    }
    counts = {
        "statekit": spark.read.format("statekit").load(str(place / "statekit")).count(),
        "statestore": spark.read.format("statestore").load(str(query)).count(),
    }
    assert set(counts.values()) == {keys}, counts
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for at in range(WARM_UP + rounds):
        for name, call in contenders.items():
            seconds = timed(call)
            if at >= WARM_UP:
                taken[name].append(seconds)
    spread = [a / b for a, b in zip(taken["statestore"], taken["statekit"], strict=True)]
    figures = {f"{name} s": seconds for name, seconds in medians(taken).items()}
    figures |= {"least": min(spread), "most": max(spread)}
    report.add(
        Row(
            f"reading {keys:,} keys as a DataFrame, {kind}, vs statestore of {partitions} "
            "partitions",
            ratio(taken, "statestore", "statekit"),
            "x",
            10.0 if partitions == DEFAULT_PARTITIONS else None,
            figures=figures,
        )
    )
    shutil.rmtree(place)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--partitions", type=int, default=DEFAULT_PARTITIONS, help="of the state store"
    )
    parser.add_argument("--only", nargs="+", choices=[*KINDS], default=[*KINDS])
    options = parser.parse_args()
    spark = spark_session(
        spark__sql__streaming__stateStore__providerClass=(
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        spark__sql__shuffle__partitions=options.partitions,
    )
    sks.register(spark)
    report = Report("spark_read")
    report.series["pyspark"] = spark.version
    for kind in options.only:
        compare(spark, kind, options.keys, options.rounds, options.partitions, report)
    report.write(keep=True)
    spark.stop()


if __name__ == "__main__":
    main()
