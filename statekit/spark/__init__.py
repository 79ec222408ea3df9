"""Keyed state on Spark: needs statekit[spark].

op.py           StatefulOp: a function with typed state under each key of a stream
batches.py      one micro-batch in the driver, exactly once
standing.py     where the state stands before a batch, and what does not fit together
query.py        what the checkpoint of a query says of a batch
routing.py      which task has which key, computed by the JVM
task.py         one range of key-groups in a worker
rows.py         the rows of a key
cursor.py       the states of a key
due.py          which timers a batch must read
geometry.py     into how many leaves the state is cut
counting.py     how much of the state a task reads
output.py       output rows as files, and their reader
forms.py        where Spark keeps the state: applyInPandasWithState, transformWithState
processor.py    what its workers do for a key
packed.py       all states of a key as one binary value
carried.py      rows on their way through pandas and Row
shipping.py     what travels to workers
progress.py     the figures of a batch: on_progress, Prometheus, query listeners
dataframes.py   register(): states of checkpoints as DataFrames
reader.py       the data source, as PySpark 4 wants it
source.py       its options, and who reads which key-groups

Spark is imported when it is used, and not before.
"""

from statekit.spark.cursor import Fired, State, Timers
from statekit.spark.dataframes import register
from statekit.spark.op import StatefulOp
from statekit.spark.output import read_output
from statekit.spark.progress import BatchMetrics, Progress, listener, read_progress
from statekit.spark.rows import Rows

__all__ = [
    "BatchMetrics",
    "Fired",
    "Progress",
    "Rows",
    "State",
    "StatefulOp",
    "Timers",
    "listener",
    "read_output",
    "read_progress",
    "register",
]
