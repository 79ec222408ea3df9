"""YCSB A to D and F, records of 1 KB, one key a call, against other stores.

    python benchmarks/bench_ycsb.py [--quick] [--only WORD]
        what is promised beside what was measured; writes results/ycsb.json.
        --quick: small sizes, into ycsb_quick.json. --only: "memory" or "beyond", or workloads by
        their letters (--only AC); the other results stay as they were.

The workloads are in ycsb.py. In memory, all stores replay the same accesses, part by part, in turns
(replay.py); files are in memory. Beyond memory, each store has records of four times its memory,
and runs in a process of its own in each round (ycsb.py), with its files on disk.

    statekit       typed values: kv.value("records", dict[str, bytes])
    statekit, map  the fields one by one: kv.map("records", str, bytes); a write of one field is
                   done in place
    dict           the records themselves, in memory only
    all others     records packed with msgpack; to write one field is to write the record
    slatedb        replays a fiftieth; its records are loaded in batches; beyond memory, one round
    no store       the loop alone, which is in all other figures
"""

import gc
import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from beyond_memory import tuned_rocksdict
from compare import Report, Row, arguments, measure, medians, ratio
from contenders import Lmdb, PackedDict, PlainDict, Sqlite, scratch_folder
from replay import Parts, Slate, Store, nothing, of_keeper, of_rocksdict
from ycsb import (
    BEYOND,
    OBJECTS,
    READ,
    ROCKS,
    WORKLOADS,
    Trace,
    key_of,
    load,
    provider,
    record_of,
    whole,
)

HERE = Path(__file__).parent
MEMORY = 512 << 20  # of rocksdict where the state is to fit into memory


@dataclass(frozen=True)
class Sizes:
    records: int = 100_000
    part: int = 50_000  # operations of a round
    rounds: int = 7
    budget: int = 64 << 20  # beyond memory
    operations: int = 30_000
    rounds_beyond: int = 5


QUICK = Sizes(2_000, 2_000, 3, 8 << 20, 1_000, 1)


def stores(folder: str) -> list[Store]:
    def of(cls: type) -> dict[int, str]:
        made: dict[int, str] = whole(cls.find, cls.write)  # type: ignore[attr-defined]
        return made

    return [
        nothing(OBJECTS),
        provider("statekit", "memory:", False),
        provider("statekit, map", "memory:", True),
        of_keeper(PlainDict, OBJECTS, folder),
        of_keeper(PackedDict, of(PackedDict), folder),
        of_keeper(Lmdb, of(Lmdb), folder),
        of_keeper(Sqlite, of(Sqlite), folder),
        of_rocksdict(tuned_rocksdict(f"{folder}/rocksdict", MEMORY), ROCKS),
        Slate(folder, of(Slate), MEMORY),
    ]


def check(folder: str) -> None:
    """After the same accesses, each store reads what a dict of dicts reads."""
    keys = [key_of(number) for number in range(200)]
    traces = [Trace(workload, keys, 1) for workload in WORKLOADS]
    accesses = [access for trace in traces for access in islice(trace, 400)]
    records = {key: record_of(number) for number, key in enumerate(keys)}
    for _, key, value in accesses:
        if isinstance(value, dict):
            records[key] = value
        elif value is not None:
            records[key] = records[key] | {value[0]: value[1]}
    reads = [(READ, key, None) for key in records]
    for store in stores(folder)[1:]:
        load(store, keys)
        store.replay(accesses, store.begin())
        found = store.replay(reads, store.begin(), checked=True)
        if found != list(records.values()):
            raise AssertionError(f"{store.name} reads other records than were written")
        store.close()


def in_memory(report: Report, sizes: Sizes, chosen: str) -> None:
    keys = [key_of(number) for number in range(sizes.records)]
    with scratch_folder() as folder:
        Path(f"{folder}/check").mkdir()
        check(f"{folder}/check")
        found = stores(folder)
        for store in found[1:]:
            load(store, keys)
        gc.freeze()
        for workload in chosen:
            parts = {
                share: Parts(iter(Trace(workload, keys, ord(workload))), sizes.part // share)
                for share in {store.share for store in found}
            }
            contenders = [
                store.contender(parts[store.share].give(), sizes.part // store.share)
                for store in found
            ]
            times = measure(contenders, sizes.rounds)
            add(report, f"{workload} in memory", times, "lmdb", 1.2)
        gc.unfreeze()
        for store in found:
            store.close()


def beyond_memory(report: Report, sizes: Sizes, chosen: str) -> None:
    times: dict[str, dict[str, list[float]]] = {workload: {} for workload in chosen}
    grown: dict[str, list[float]] = {}
    for at in range(sizes.rounds_beyond):
        for name in BEYOND:
            if name == "slatedb" and at > 0:
                continue  # it is not compared, and takes longest
            command = [sys.executable, str(HERE / "ycsb.py"), name, str(sizes.budget)]
            answer = subprocess.check_output([*command, str(sizes.operations)])
            figures = json.loads(answer)
            for workload in chosen:
                times[workload].setdefault(name, []).append(figures[workload])
            grown.setdefault(name, []).append(figures["growth"] / sizes.budget)
    for workload in chosen:
        add(report, f"{workload} beyond memory", times[workload], "rocksdict", 1.0)
    report.series["memory grown beyond memory, budgets"] = medians(grown)
    shown = ", ".join(f"{name} {budgets:.2f}" for name, budgets in medians(grown).items())
    print(f"     resident memory grew by, in budgets: {shown}")


def add(
    report: Report, what: str, times: dict[str, list[float]], against: str, floor: float
) -> None:
    found = medians(times)
    report.series.setdefault("ns per operation", {})[what] = found
    shown = ", ".join(f"{name} {1e6 / ns:,.0f}" for name, ns in found.items())
    print(f"     {what}, k operations/s: {shown}", flush=True)
    for ours, bound in (("statekit", floor), ("statekit, map", None)):
        report.add(
            Row(
                f"{what}: {ours} vs {against}",
                ratio(times, against, ours),
                "x",
                bound,
                figures={f"{name} ns": ns for name, ns in found.items() if name in (ours, against)},
            )
        )


def main() -> None:
    given = arguments(__doc__ or "")
    sizes = QUICK if given.quick else Sizes()
    report = Report("ycsb_quick" if given.quick else "ycsb")
    is_place = given.only in ("memory", "beyond")
    chosen = "".join(one for one in WORKLOADS if is_place or not given.only or one in given.only)
    if given.only != "beyond":
        in_memory(report, sizes, chosen)
    if given.only != "memory":
        beyond_memory(report, sizes, chosen)
    report.write(keep=bool(given.only))


if __name__ == "__main__":
    main()
