"""register(): states of checkpoints as DataFrames. source.py has the options."""

from typing import Any

from statekit.errors import MissingPackageError

_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: Any) -> None:
    """Makes spark.read.format("statekit") known to a session, also one of Spark Connect.

    It also lets Spark hand filters to data sources that are written in Python
    (spark.sql.python.filterPushdown.enabled), from version 4.1 on.
    """
    version = spark_version()
    if version < (4, 0):
        raise MissingPackageError(
            f"PySpark {version[0]}.{version[1]} has no data sources in Python, which came with "
            "4.0. Read the checkpoint without Spark: checkpoint.table(state), or update PySpark."
        )
    from statekit.spark.reader import FilteringSource, StateSource

    if version >= (4, 1):
        spark.conf.set(_PUSHDOWN, "true")
        spark.dataSource.register(FilteringSource)
    else:
        spark.dataSource.register(StateSource)


def spark_version() -> tuple[int, int]:
    """That of the PySpark that is installed."""
    try:
        import pyspark
    except ImportError as error:
        raise MissingPackageError(
            f"statekit.spark needs pyspark, which cannot be imported ({error}). "
            "Run: pip install statekit[spark]"
        ) from error
    major, minor = pyspark.__version__.split(".")[:2]
    return int(major), int(minor)
