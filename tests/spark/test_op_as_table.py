"""The state of a StatefulOp as a DataFrame."""

from typing import Any

import pytest
from streams import Job

import statekit.spark as sks

pyspark = pytest.importorskip("pyspark")
if int(pyspark.__version__.partition(".")[0]) < 4:
    pytest.skip("data sources in Python came with PySpark 4.0", allow_module_level=True)


def test_each_batch_is_a_version_that_can_be_read_as_a_table(spark: Any, job: Job) -> None:
    sks.register(spark)
    models = []
    for batch, users in enumerate(["aab", "bcc", "a"]):
        job.plan(batch)
        job.run(batch, users, tasks=batch % 2 + 1)
        models.append(dict(job.counts))
    for version, model in enumerate(models, 1):
        frame = spark.read.format("statekit").option("state", "count").option("version", version)
        rows = frame.load(str(job.state)).collect()
        assert {row.key: row.value for row in rows} == model
    newest = spark.read.format("statekit").option("state", "count").load(str(job.state))
    assert [tuple(row) for row in newest.where("key = 'a'").collect()] == [("a", models[-1]["a"])]
