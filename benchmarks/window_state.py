"""Write-heavy window state of four times the memory budget: each entry is used once, then dropped.

Run by bench_commits.py, in a process of its own for each contender and round:

    python benchmarks/window_state.py statekit|rocksdict BUDGET_BYTES OPERATIONS

A window join keeps the records of both sides, each under a key of its own, until the window has
passed. For each record: get a key that is new, put 64 bytes under it, append 64 bytes to a list
under it, and delete both when the window has moved on. Prints JSON: ns per record, and the growth
of resident memory.
"""

import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from beyond_memory import memory_figure, tuned_rocksdict

import statekit as sk

VALUE = b"v" * 64
ENTRY_BYTES = 2 * (64 + 16)  # what a record adds to the live state: two keys and two values
TIMES_BUDGET = 4
_STEP = 5_000  # records between two looks at resident memory

Step = Callable[[range, int], None]  # records to process, and how many the window has


def open_statekit(path: str, budget: int) -> tuple[Step, Any]:
    kv = sk.open(f"rocksdb:{path}?memory={budget}&sync=0")
    left, right = kv.value("left", bytes), kv.list("right", bytes)

    def process(records: range, window: int) -> None:
        for at in records:
            key = f"order-{at:09d}"
            if left.get(key) is None:
                left[key] = VALUE
            right[key].append(VALUE)
            if at >= window:
                gone = f"order-{at - window:09d}"
                left.drop(gone)
                right.drop(gone)

    return process, kv


def open_rocksdict(path: str, budget: int) -> tuple[Step, Any]:
    db = tuned_rocksdict(path, budget)

    def process(records: range, window: int) -> None:
        for at in records:
            key = b"l%09d" % at
            if db.get(key) is None:
                db[key] = VALUE
            items = b"r%09d" % at
            db[items] = (db.get(items) or b"") + VALUE
            if at >= window:
                db.delete(b"l%09d" % (at - window))
                db.delete(b"r%09d" % (at - window))

    return process, db


def main() -> None:
    name, budget, records = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    window = TIMES_BUDGET * budget // ENTRY_BYTES
    sk.open("memory:").value("warm", bytes)["k"] = b"v"
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_figure("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        process, handle = {"statekit": open_statekit, "rocksdict": open_rocksdict}[name](
            f"{folder}/state", budget
        )
        began = time.perf_counter()
        process(range(window), window)
        filled = time.perf_counter() - began
        took, resident = 0, memory_figure("VmRSS")
        for first in range(window, window + records, _STEP):
            start = time.perf_counter_ns()
            process(range(first, min(first + _STEP, window + records)), window)
            took += time.perf_counter_ns() - start
            resident = max(resident, memory_figure("VmRSS"))
        handle.close()
    figures = {
        "ns": took / records,
        "window": window,
        "growth": resident - before,
        "fill s": filled,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
