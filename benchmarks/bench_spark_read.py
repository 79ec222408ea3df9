"""Reading a million keys of state as a DataFrame: statekit against Spark's own reader.

    python benchmarks/bench_spark_read.py [--keys N] [--rounds N] [--partitions N]

The same entries are in a checkpoint of statekit and in the state store of a streaming query
(RocksDB, groupBy().agg(max)). Both are read with write.format("noop"), by turns in one JVM, the
planning of the query and the start-up of the readers included. Also measured: the same checkpoint
without Spark. The state store has Spark's default of 200 partitions unless told; with fewer it is
faster (and cannot be changed once a query has started).
"""

import argparse
import json
import statistics
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

from session import spark_session  # noqa: E402

import statekit as sk  # noqa: E402
import statekit.spark as sks  # noqa: E402

WARM_UP = 3
KINDS = {"ints": int, "64-byte strings": str}


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


def compare(spark: Any, kind: str, keys: int, rounds: int) -> dict[str, Any]:
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
    found: dict[str, Any] = {"kind": kind, "keys": keys}
    for name, times in taken.items():
        found[name] = {
            "median_s": round(statistics.median(times), 3),
            "least_s": round(min(times), 3),
            "most_s": round(max(times), 3),
        }
    ratio = statistics.median(taken["statestore"]) / statistics.median(taken["statekit"])
    found["statestore / statekit"] = round(ratio, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--partitions", type=int, default=200, help="of the state store")
    options = parser.parse_args()
    spark = spark_session(
        spark__sql__streaming__stateStore__providerClass=(
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        spark__sql__shuffle__partitions=options.partitions,
    )
    sks.register(spark)
    results = []
    for kind in KINDS:
        found = compare(spark, kind, options.keys, options.rounds)
        found["partitions"] = options.partitions
        results.append(found)
        print(
            f"{options.keys:,} keys, {kind}: statestore / statekit = "
            f"{found['statestore / statekit']}"
        )
        for name in ("statekit", "statestore", "statekit without Spark"):
            one = found[name]
            print(f"  {name:24} {one['median_s']:7.3f} s  ({one['least_s']} to {one['most_s']})")
    out = ROOT / "benchmarks" / "results" / "spark_read.json"
    out.write_text(json.dumps(results, indent=1) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
