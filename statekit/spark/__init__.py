"""Keyed state on Spark: needs statekit[spark].

source.py    states of checkpoints as DataFrames: register(), and the options
reader.py    the data source itself, as PySpark 4 wants it

Spark is imported when it is used, and not before.
"""

from statekit.spark.source import register

__all__ = ["register"]
