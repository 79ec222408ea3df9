"""Keyed state on Spark: needs statekit[spark].

dataframes.py   register(): states of checkpoints as DataFrames
reader.py       the data source, as PySpark 4 wants it
source.py       its options, and who reads which key-groups

Spark is imported when it is used, and not before.
"""

from statekit.spark.dataframes import register

__all__ = ["register"]
