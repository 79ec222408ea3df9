"""Windowed sums: how much each key has had in each window of event time, of records out of order.

Event n happens at n milliseconds times `step_ms`; of each `disorder` events in a row, any may come
first. Watermarks allow for that, so nothing is late, whatever happens to the job.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from statekit.engine.job import Job
from statekit.engine.windows import count, sliding, total
from statekit.engine.workloads.base import Workload
from statekit.engine.workloads.draws import below

_STRIDE = 953  # a prime: a walk through each group in another order


class WindowedSum(Workload, frozen=True, kw_only=True):
    name: ClassVar[str] = "windowed_sum"
    stage: ClassVar[str] = "sums"
    key: ClassVar[str] = "key"

    keys: int = 1000
    step_ms: int = 1
    disorder: int = 100
    size_ms: int = 1000
    slide_ms: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys < 1 or self.step_ms < 1:
            raise ValueError("pass keys >= 1 and step_ms >= 1")
        if self.disorder < 1 or self.disorder % _STRIDE == 0:
            raise ValueError(f"disorder = {self.disorder}: pass 1 or more, and no {_STRIDE}s")
        sliding(self.size_ms, self.slide_ms)

    def events(self, numbers: Any) -> dict[str, Any]:
        group, at = np.divmod(numbers, self.disorder)
        happened = group * self.disorder + at * _STRIDE % self.disorder
        return {
            "key": below(self.seed, happened, 0, self.keys),
            "at": happened * self.step_ms,
            "amount": below(self.seed, happened, 1, 100),
            "seq": numbers,
        }

    def job(self, folder: "str | Path") -> Job:
        return (
            Job(self.name)
            .source(self.read(folder), parallelism=self.sources)
            .event_time("at", grace_ms=self.disorder * self.step_ms)
            .key_by("key", key=int)
            .window(
                sliding(self.size_ms, self.slide_ms), time="at", parallelism=self.workers,
                aggregates={"records": count(), "amount": total("amount")}, name=self.stage,
            )
            .sink(folder)
        )  # fmt: skip

    def wrong(self, results: pa.Table, records: int) -> str:
        if results["late"].to_numpy().any():
            return "records came late, and none is"
        events = self.events(np.arange(records))
        expected: dict[tuple[int, int], list[int]] = {}
        for key, at, amount in zip(events["key"], events["at"], events["amount"], strict=True):
            start = at // self.slide_ms * self.slide_ms
            while start + self.size_ms > at:
                one = expected.setdefault((int(key), int(start)), [0, 0])
                one[0] += 1
                one[1] += int(amount)
                start -= self.slide_ms
        found: dict[tuple[int, int], list[int]] = {}
        for row in results.to_pylist():
            at = row["key"], row["start"]
            if at in found or row["revision"] != 1 or row["end"] != row["start"] + self.size_ms:
                return f"window {at} fired twice, or is none"
            found[at] = [row["records"], row["amount"]]
        for at in expected.keys() | found.keys():
            if expected.get(at) != found.get(at):
                return f"window {at} has {found.get(at)}, and should have {expected.get(at)}"
        return ""
