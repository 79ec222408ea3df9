"""A job of bench_engine.py: key-count without the count. It moves the batches, and nothing else."""

from typing import Any

import pyarrow as pa

from statekit.engine.job import Job, KeyedOperator
from statekit.engine.workloads import workload
from statekit.engine.workloads.base import DUE


class Move(KeyedOperator):
    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """As large as what key-count gives."""
        return batch.append_column("count", batch.column("seq"))


def move(folder: str, **parameters: Any) -> Job:
    work = workload("key_count", **parameters)
    return (
        Job("move")
        .source(work.read(folder), parallelism=work.sources)
        .key_by("key", key=int)
        .process(Move, parallelism=work.workers, name="count")
        .sink(folder, due=DUE)
    )
