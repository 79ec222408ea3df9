"""Keyed state on Spark: needs statekit[spark].

op.py           StatefulOp: a function with typed state under each key of a stream
batches.py      one micro-batch in the driver, exactly once
query.py        what the checkpoint of a query says of a batch
routing.py      which task has which key, computed by the JVM
task.py         one range of key-groups in a worker
rows.py         the rows of a key
cursor.py       the states of a key
due.py          which timers a batch must read
geometry.py     into how many leaves the state is cut
output.py       output rows as files, and their reader
dataframes.py   register(): states of checkpoints as DataFrames
reader.py       the data source, as PySpark 4 wants it
source.py       its options, and who reads which key-groups

Spark is imported when it is used, and not before.
"""

from statekit.spark.cursor import Fired, State, Timers
from statekit.spark.dataframes import register
from statekit.spark.op import StatefulOp
from statekit.spark.output import read_output
from statekit.spark.rows import Rows

__all__ = ["Fired", "Rows", "State", "StatefulOp", "Timers", "read_output", "register"]
