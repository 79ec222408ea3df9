"""Commits against a bare RocksDB: what it costs that a home always has the state of one moment.

    python benchmarks/bench_commits.py [--quick]

Writes results/commits.json. Contenders take turns. Those whose memory is measured run in processes
of their own (beyond_memory.py, window_state.py).
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import rocksdict
from compare import Contender, Report, Row, measure, medians, ratio

import statekit as sk

HERE = Path(__file__).parent
VALUE = b"v" * 64
BUDGET = 16 << 20
COMMIT_EVERY = 10_000
PROVIDERS = 200  # the mean memory of this many is reported


def batches(report: Report, rounds: int) -> None:
    """A commit against one WriteBatch of the same rows."""
    with tempfile.TemporaryDirectory() as folder:
        kv = sk.open(f"rocksdb:{folder}/home?sync=0")
        values = kv.value("values", bytes)
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        bare = rocksdict.Rdict(f"{folder}/bare", options)
        for rows, times, most in ((1, 500, 10.0), (5000, 3, 1.5)):
            keys = [f"user-{i:07d}" for i in range(rows)]
            names = [b"\0\0\0\1\0\0" + key.encode() for key in keys]

            def put(_: Any, keys: list[str] = keys, times: int = times) -> None:
                for _ in range(times):
                    for key in keys:
                        values[key] = VALUE

            def put_and_commit(_: Any, keys: list[str] = keys, times: int = times) -> None:
                for _ in range(times):
                    for key in keys:
                        values[key] = VALUE
                    kv.commit({"offset": 1})

            def write(_: Any, names: list[bytes] = names, times: int = times) -> None:
                for _ in range(times):
                    batch = rocksdict.WriteBatch(raw_mode=True)
                    for name in names:
                        batch.put(name, VALUE)
                    bare.write(batch)

            put_and_commit(None)
            found = measure(
                [
                    Contender("put", put, count=times),
                    Contender("put and commit", put_and_commit, count=times),
                    Contender("WriteBatch", write, count=times),
                ],
                rounds,
            )
            kv.commit()
            found["commit"] = [
                both - alone
                for both, alone in zip(found["put and commit"], found["put"], strict=True)
            ]
            figures = {f"{name} us": ns / 1000 for name, ns in medians(found).items()}
            report.add(
                Row(
                    f"commit of {rows} dirty rows, sync=0, vs one rocksdict WriteBatch of them",
                    ratio(found, "commit", "WriteBatch"),
                    "x the time",
                    most,
                    at_most=True,
                    figures=figures,
                )
            )
        bare.close()
        kv.close()


def run(script: str, *arguments: object) -> dict[str, float]:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def committing(report: Report, rounds: int, operations: int) -> None:
    """Read-modify-write with a commit now and then, against no commits."""
    for times, what in ((4, "4x the memory"), (0.25, "that fits in memory")):
        found: dict[str, list[float]] = {"no commits": [], "commits": []}
        growth = []
        for _ in range(rounds):
            for name, every in (("no commits", 0), ("commits", COMMIT_EVERY)):
                figures = run("beyond_memory.py", "statekit", BUDGET, operations, every, times)
                found[name].append(figures["ns"])
                growth.append(figures["growth"])
        report.add(
            Row(
                f"read-modify-write of state {what}, Zipf 1.0, sync=0, with a commit every "
                f"{COMMIT_EVERY:,} operations, vs none",
                ratio(found, "no commits", "commits"),
                "x the speed",
                0.85 if times > 1 else None,
                figures={f"{name} ns": ns for name, ns in medians(found).items()}
                | {"growth MB": max(growth) / 1e6, "budget MB": BUDGET / 1e6},
            )
        )


def windows(report: Report, rounds: int, records: int) -> None:
    """Window state: every entry is used once and then dropped."""
    found: dict[str, list[float]] = {"statekit": [], "rocksdict": []}
    growth: dict[str, list[float]] = {"statekit": [], "rocksdict": []}
    for _ in range(rounds):
        for name in found:
            figures = run("window_state.py", name, BUDGET, records)
            found[name].append(figures["ns"])
            growth[name].append(figures["growth"] / 1e6)
    report.add(
        Row(
            "window state (get of a new key, put, append, delete), 4x the memory, vs rocksdict "
            "with the same memory",
            ratio(found, "rocksdict", "statekit"),
            "x the speed",
            1.0,
            figures={f"{name} ns a record": ns for name, ns in medians(found).items()}
            | {f"{name} growth MB": max(values) for name, values in growth.items()},
        )
    )


EMPTY = f"""
import statekit as sk
def resident():
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[1]) * 4096
def opened():
    kv = sk.open("memory:")
    kv.value("a", int); kv.list("b", str)
    return kv
kept = [opened() for _ in range(20)]
before = resident()
kept += [opened() for _ in range({PROVIDERS})]
print((resident() - before) / {PROVIDERS} / 1024)
"""


def empty(report: Report, rounds: int) -> None:
    found = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", EMPTY], check=True, capture_output=True, text=True
        )
        found.append(float(done.stdout))
    report.add(
        Row(
            "resident memory of an empty provider with two states, default geometry",
            statistics.median(found),
            " KiB",
            100,
            at_most=True,
            figures={"most KiB": max(found)},
        )
    )


def main() -> None:
    is_quick = "--quick" in sys.argv[1:]
    report = Report("commits")
    empty(report, 3)
    batches(report, 5 if is_quick else 15)
    committing(report, 1 if is_quick else 3, 40_000 if is_quick else 100_000)
    # More records than the window holds: with fewer, what is learned only once would seem free.
    windows(report, 1 if is_quick else 3, 40_000 if is_quick else 600_000)
    report.write()


if __name__ == "__main__":
    main()
