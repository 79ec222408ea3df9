"""A query on Spark Connect, with a server of its own: python connect_job.py PLACE.

Prints what the state is and what the output was, as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from session import prepare

SCHEMA = "user string"


def main(place: Path) -> None:
    prepare()
    from pyspark.sql import SparkSession

    # The server reads these when it starts; a session may not set them.
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        "--conf spark.driver.bindAddress=127.0.0.1 --conf spark.driver.host=127.0.0.1 "
        "--conf spark.connect.grpc.binding.address=127.0.0.1 --conf spark.ui.enabled=false "
        f"--conf spark.sql.warehouse.dir={place / 'warehouse'} pyspark-shell"
    )
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    import statekit.spark as sks

    def count(key: Any, rows: Any, st: Any) -> Any:
        yield key, st.count.add(len(rows))

    op = sks.StatefulOp(
        count,
        key="user",
        output="user string, n long",
        state={"count": int},
        path=place / "state",
        output_path=place / "out",
        key_groups=16,
    )
    results = str(place / "sink")

    def sink(df: Any, batch: int) -> None:
        df.write.mode("overwrite").json(f"{results}/{batch}")

    for parallelism in (2, 3):  # the second time is a restart, at another parallelism
        function = op.foreach_batch(sink, checkpoint=place / "cp", parallelism=parallelism)
        (place / "in").mkdir(exist_ok=True)
        (place / "in" / f"{parallelism}.csv").write_text(
            "\n".join("abac" if parallelism < 3 else "ad")
        )
        query = (
            spark.readStream.schema(SCHEMA)
            .csv(str(place / "in"))
            .writeStream.foreachBatch(function)
            .option("checkpointLocation", str(place / "cp"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    found = {
        batch: sorted(
            map(tuple, spark.read.json(f"{results}/{batch}").select("user", "n").collect())
        )
        for batch in (0, 1)
    }
    output = sorted(map(tuple, sks.read_output(place / "out").collect()))
    print(json.dumps({"kind": type(spark).__module__, "sink": found, "output": output}))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
