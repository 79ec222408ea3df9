"""The state of a StatefulOp as a DataFrame."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from streams import Job

import statekit as sk
import statekit.spark as sks
from statekit.spark import geometry

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


def test_tables_stay_what_they_are_while_leaves_are_cut_and_old_versions_go(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sks.register(spark)
    monkeypatch.setattr(geometry, "LARGE_BYTES", 10)
    job, model = Job(spark, tmp_path), Counter[str]()

    def load() -> Any:
        return spark.read.format("statekit").load(str(job.state))

    def rows(frame: Any) -> dict[str, int]:
        return {row.key: row.value for row in frame.collect()}

    job.plan(0)
    job.run(0, "abcdefgh" * 3)
    model.update("abcdefgh" * 3)
    old, then = load(), dict(model)
    with sk.checkpoints(job.state)[-1].pin():
        for batch, users in enumerate(("abz", "xy"), 1):
            job.plan(batch)
            job.run(batch, users, tasks=3)
            model.update(users)
            assert sk.collect(job.state, keep=1).in_use == (1,)
            assert rows(old) == then
            new = load()
            assert rows(new) == model
            assert rows(new.where("key = 'a'")) == {"a": model["a"]}
    assert sk.checkpoints(job.state)[0].subgroups < sk.checkpoints(job.state)[-1].subgroups
    sk.collect(job.state, keep=1)
    with pytest.raises(Exception, match=r"checkpoint 1 of .* was removed after load\(\)"):
        rows(old)
    assert rows(new) == model
