"""The Spark job: history first, then the stream. It may be killed at any moment, and run again.

    python job.py PLACE FILES      PLACE has history/*.csv and FILES live/*.csv; demo.py fills it

It prints a line of JSON for each batch. At its end it reads its own results back, as DataFrames,
and writes them as Parquet: PLACE/result-readings, PLACE/result-<state>.
"""

import json
import sys
import time

from pyspark.sql import SparkSession
from sensors import INPUT, STATE, make_op

import statekit.spark as sks

PARALLELISM = (2, 5, 3)  # for the first, second and last third of the live files


def run(spark: SparkSession, place: str, files: int) -> None:
    op = make_op(place)
    history = spark.read.schema(INPUT).csv(f"{place}/history")
    op.backfill(history, "history", parallelism=2)  # nothing, if it was done
    say(kind="backfill")

    def parallelism(batch: int) -> int:
        return PARALLELISM[min(len(PARALLELISM) - 1, batch * len(PARALLELISM) // files)]

    checkpoint = f"{place}/checkpoint"
    live = spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).csv(f"{place}/live")
    query = (
        live.writeStream.foreachBatch(
            op.foreach_batch(
                checkpoint=checkpoint,
                parallelism=parallelism,
                on_progress=lambda progress: say(kind="batch", **progress.as_dict()),
            )
        )
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def read_back(spark: SparkSession, place: str) -> None:
    sks.register(spark)
    sks.read_output(f"{place}/readings").write.parquet(f"{place}/result-readings")
    for name in STATE:
        state = spark.read.format("statekit").option("state", name).load(f"{place}/state")
        state.write.parquet(f"{place}/result-{name}")


def say(**line: object) -> None:
    print(json.dumps({"at": time.time(), **line}), flush=True)


def main() -> None:
    place, files = sys.argv[1], int(sys.argv[2])
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("sensors")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    run(spark, place, files)
    read_back(spark, place)
    say(kind="end")
    spark.stop()


if __name__ == "__main__":
    main()
