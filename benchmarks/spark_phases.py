"""Where the time of a batch of a StatefulOp goes, without Spark: CPU of both tasks, by phase.

    python benchmarks/spark_phases.py [--keys N] [--touched N] [--subgroups N] [--batches N]

A million keys with texts of 64 bytes are stored, and each batch sets 20,000 of them. Nothing is
compared with anything: it tells where to look. CPU time, so that other work on the machine matters
little. The figures are medians over batches; "most" shows what a batch costs that writes much anew.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import statekit as sk
from statekit.checkpoint.parts import Part, publish
from statekit.spark import State
from statekit.spark import task as spark_task
from statekit.spark.output import attachments_of, rows_to_table, write_output
from statekit.spark.rows import Grouped

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "spark"))
from test_task import batch

GROUPS, TASKS = 128, 2


def put(key: Any, rows: Any, st: Any) -> Any:
    st.text.set(f"{rows['n'][-1]:064d}")
    yield key, 1


class Phases:
    """CPU milliseconds of each phase of a batch."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.spent[name] += (now - self._last) * 1e3
        self._last = now


def rows_of(numbers: Any, ranges: tuple[range, ...]) -> list[pa.Table]:
    """What the tasks are sent."""
    users = [f"user-{n:08d}" for n in numbers]
    groups = [sk.leaf_of(str, user, GROUPS, 1) for user in users]
    found = []
    for part in ranges:
        mine = [at for at, group in enumerate(groups) if group in part]
        columns = {"user": [users[at] for at in mine], "n": np.asarray(numbers)[mine]}
        found.append(pa.table(columns))
    return found


def run_task(one: Any, groups: range, table: pa.Table, phases: Phases) -> Any:
    """run_range(), taken apart."""
    storage = spark_task._storage(one)
    kv = spark_task._provider(one, groups, storage, {})
    report = spark_task.Report(groups.start)
    run = spark_task._Run(one, kv, report, storage)
    phases.lap("provider")
    grouped = Grouped(table, one.key)
    phases.lap("grouping")
    kv["text"].get_many(grouped.column)
    phases.lap("bringing")
    run._call_keys(grouped)
    phases.lap("function, writing back")
    made = rows_to_table(run.made, one.output)
    report.output = write_output(made, one.place, None, one.number, f"{groups.start:05d}")
    phases.lap("output")
    report.part = kv.write_part(one.place, number=one.number).to_json()
    phases.lap("part")
    kv.close()
    phases.lap("closing")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--touched", type=int, default=20_000)
    parser.add_argument("--subgroups", type=int, default=1)
    parser.add_argument("--batches", type=int, default=30)
    options = parser.parse_args()
    dice = np.random.default_rng(1)
    ranges = tuple(sk.assign(GROUPS, TASKS))
    changes: dict[str, Any] = {
        "states": {"text": State(str)},
        "functions": spark_task.Functions(on_key=put),
        "key_groups": GROUPS,
        "subgroups": options.subgroups,
        "ranges": ranges,
    }
    base: Any = None
    spent: list[dict[str, float]] = []
    written = []
    with tempfile.TemporaryDirectory(prefix="statekit-phases-") as folder:
        for number in range(1, options.batches + 2):
            chosen = dice.integers(0, options.keys, options.touched)
            tables = rows_of(np.arange(options.keys) if number == 1 else chosen, ranges)
            one = batch(Path(folder), base, number, **changes)
            phases = Phases()
            reports = [
                run_task(one, groups, table, phases)
                for groups, table in zip(ranges, tables, strict=True)
            ]
            base = publish(
                folder,
                [Part.from_json(report.part) for report in reports],
                number=number,
                attachments=attachments_of(report.output for report in reports),
            )
            phases.lap("publishing")
            if number > 1:
                spent.append({**phases.spent, "all": sum(phases.spent.values())})
                written.append(base.new_bytes)
    print(f"{options.keys:,} keys, {options.touched:,} touched, {GROUPS} x {options.subgroups}")
    for name in spent[0]:
        times = [one[name] for one in spent]
        print(f"  {name:24} {statistics.median(times):7.1f} ms   most {max(times):7.1f}")
    mean = statistics.mean(written) / 1e6
    print(f"  {'written':24} {mean:7.1f} MB on average, most {max(written) / 1e6:.1f}")


if __name__ == "__main__":
    main()
