"""What is read of a query's checkpoint, also where only Spark can read it."""

from pathlib import Path
from typing import Any

import pytest
from streams import Query

from statekit.errors import StatefulOpError
from statekit.spark.query import read_batch


def test_a_checkpoint_that_only_spark_reaches_is_read_as_a_local_one(
    spark: Any, tmp_path: Path
) -> None:
    """Also if its name has letters that Spark takes for a pattern, or writes otherwise."""
    spark.conf.set("fs.viewfs.mounttable.far.link./data", f"file://{tmp_path}")
    for name in ("a b", "a%20b{c}[d]*"):
        query = Query(tmp_path / name)
        for batch in (3, 4, 13):
            query.plan(batch, watermark=5)
            local = read_batch(spark, str(tmp_path / name), batch)
            assert (local.watermark, local.before is None) == (5, batch != 4)
            assert read_batch(spark, f"viewfs://far/data/{name}", batch) == local
    with pytest.raises(
        StatefulOpError, match=r"far/data/none/metadata' cannot be read.*checkpoint"
    ):
        read_batch(spark, "viewfs://far/data/none", 3)


def test_a_batch_without_a_watermark_has_none(tmp_path: Path) -> None:
    query = Query(tmp_path / "cp", "id of it")
    query.plan(0)
    query.plan(1, stamp=1)
    first, second = (read_batch(None, f"file:{tmp_path}/cp/", batch) for batch in (0, 1))
    assert (first.query, first.batch, first.watermark) == ("id of it", 0, None)
    assert first.digest != second.digest
    assert (first.before, second.before) == (None, first.digest)
