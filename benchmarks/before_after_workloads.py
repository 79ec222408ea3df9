"""The figures of the docs that before_after.py compares, and what measures them.

    python benchmarks/before_after_workloads.py WORKLOAD [--quick]

Prints one JSON object, in the last line: statekit's own figures, without those of other contenders.
A workload calls the functions behind the rows (bench_*.py) if these spend little time on other
contenders. If they spend much, it does the same work by itself. It must run with the statekit of
both commits, so it uses the public interface only.

Some sizes are smaller than in the docs, so that a run takes an hour: split and merge (100,000 keys;
the time depends on the number of leaves), state larger than memory (16 MiB, fewer operations), the
load on a new owner (240 MB for 3 s). NOT_MEASURED has what is left out, and why.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MEASURED, STORE = "docs/measured.md", "docs/store.md"
CHECKPOINTS, MIGRATION = "docs/checkpoints.md", "docs/migration.md"
RATES = ("/s", "MB/s")  # units of which more is better

# (page, the beginning of a row or of a sentence): why it is not measured
NOT_MEASURED = {
    (STORE, "5 ns of hashing, 1 ns of locks, 12 ns of tags and slots"): "parts of add_many that no "
    "script measures; add_many itself is measured",
    (STORE, "the plot of the cost per record"): "200 k and 10 M keys are measured, not the sizes "
    "around them",
}


@dataclass(frozen=True)
class Figure:
    name: str
    unit: str
    rows: str  # matches the beginning of those rows of the page that this figure stands for
    page: str
    workload: str

    @property
    def more_is_better(self) -> bool:
        return self.unit in RATES


Workload = Callable[[bool], list[float]]  # takes is_quick; gives a value for each of its figures
FIGURES: list[Figure] = []
WORKLOADS: dict[str, Workload] = {}  # by name


def measures(page: str, *figures: tuple[str, str, str]) -> Callable[[Workload], Workload]:
    """Declares what a workload gives: (name, unit, rows) for each value, in their order."""

    def declare(run: Workload) -> Workload:
        FIGURES.extend(Figure(*figure, page, run.__name__) for figure in figures)
        WORKLOADS[run.__name__] = run
        return run

    return declare


def ns(run: Callable[[Any], Any], count: int, rounds: int, prepare: Any = lambda: None) -> float:
    """Nanoseconds per operation, the median of some rounds."""
    from compare import Contender, measure

    return statistics.median(measure([Contender("", run, prepare, count)], rounds)[""])


# ---- docs/measured.md

_TYPES = ("value int", "value dataclass", "list", "map", "nested")


@measures(
    MEASURED,
    *((f"value int: {verb}", "ns", f"value int: {verb},") for verb in ("get", "set", "add")),
    *((f"{of}: {verb}", "ns", f"{of}: {verb},") for of in _TYPES[1:] for verb in ("get", "set")),
    *((f"{of}: split and merge", "us", f"{of}: split ") for of in _TYPES),
)
def typed_state(is_quick: bool) -> list[float]:
    from bench_state_types import QUICK, Sizes, contender_for, sample_ids
    from contenders import STATE_TYPES, Statekit, fresh_entries

    sizes = QUICK if is_quick else Sizes()
    ids = sample_ids(sizes.keys, sizes.sample)
    found: list[float] = []
    splits: list[float] = []
    for of in STATE_TYPES:
        keeper = Statekit(of, "")
        keeper.load(fresh_entries(of, range(sizes.keys)))
        for operation in ("get", "set", "update") if of.name == "value int" else ("get", "set"):
            one = contender_for(keeper, operation, ids)
            assert one is not None
            ns(one.run, one.count, 1, one.prepare)  # warm
            found.append(ns(one.run, one.count, sizes.rounds, one.prepare))

        def split(_: object, keeper: Statekit = keeper) -> None:
            keeper.split_and_merge()

        splits.append(ns(split, 1, 4 * sizes.rounds) / 1000)
        keeper.close()
    return found + splits


@measures(
    MEASURED,
    ("append to a list of 10 k", "ns", "append to a list of 10 k"),
    ("put into a map of 10 k", "ns", "put into a map of 10 k"),
    ("append at depth 3 of 1 MB", "ns", "append at depth 3"),
)
def large_containers(is_quick: bool) -> list[float]:
    import bench_state_types as bench
    from compare import Report

    report = Report("")
    bench.large_containers(report, bench.Sizes(rounds=2 if is_quick else 10))
    return [row.figures["statekit ns"] for row in report.rows]


@measures(
    MEASURED,
    *((f"{call} of 1 M strings", "ns", call) for call in ("add_many", "get_many", "put_many")),
)
def arrow_batches(is_quick: bool) -> list[float]:
    import numpy as np
    import pyarrow as pa
    from contenders import user_keys

    import statekit as sk

    n = 50_000 if is_quick else 1_000_000
    column = pa.array(user_keys(np.random.default_rng(2).permutation(n).tolist()))
    numbers = np.arange(n)
    state = sk.open("memory:").value("counts", int)
    state.put_many(column, numbers)
    return [
        ns(lambda _: state.add_many(column), n, 9),
        ns(lambda _: state.get_many(column), n, 9),
        ns(lambda _: state.put_many(column, numbers), n, 9),
    ]


@measures(
    MEASURED,
    ("read-modify-write, 4x the memory", "ns", "rocksdb: home"),
    ("resident memory of the same", "B", "resident memory of the same"),
)
def beyond_memory(is_quick: bool) -> list[float]:
    sizes = (8 << 20, 10_000) if is_quick else (16 << 20, 60_000)
    script = Path(__file__).with_name("beyond_memory.py")
    command = [sys.executable, str(script), "statekit", *map(str, sizes)]
    found = json.loads(subprocess.check_output(command))
    return [found["ns"], found["growth"]]


# ---- docs/store.md: it has no table, its rows are those of results/store.json


@measures(
    STORE,
    ("add_many of 2 M strings", "ns", "add_many, 2 M strings"),
    ("add_many of 10 M new integers", "ns", "add_many, 10 M distinct"),
    ("add_many in a store of 10 M", "ns", "add_many, 10 M distinct"),
)
def counting(is_quick: bool) -> list[float]:
    import numpy as np
    import pyarrow as pa
    from bench_store import counts_state, user_keys

    n = 100_000 if is_quick else 10_000_000
    rng = np.random.default_rng(1)
    column = pa.array(user_keys(rng.integers(0, n // 50, n // 5)))
    keys = rng.permutation(n) * 7919
    drawn = rng.choice(keys, n // 10)
    strings = ns(lambda state: state.add_many(column), len(column), 5, counts_state)
    inserted = ns(lambda state: state.add_many(keys), n, 3, lambda: counts_state("i64", int))
    state = counts_state("i64", int)
    state.add_many(keys)
    return [strings, inserted, ns(lambda _: state.add_many(drawn), len(drawn), 5)]


@measures(
    STORE,
    ("get of 100 bytes", "ns", "get of 100-byte values, one key a call"),
    ("get of 100 bytes, batch", "ns", "get of 100-byte values, in a batch"),
    ("put of 100 bytes", "ns", "put of 100-byte values, one key a call"),
    ("put of 100 bytes, batch", "ns", "put of 100-byte values, in a batch"),
)
def values(is_quick: bool) -> list[float]:
    import numpy as np
    import pyarrow as pa
    from bench_store import get_each, put_each, user_keys

    import statekit as sk

    n = 50_000 if is_quick else 1_000_000
    rng = np.random.default_rng(4)
    every = [key.encode() for key in user_keys(range(n))]
    state = sk.Store().state("values", "bytes", bytes)
    state.put_many(every, [rng.bytes(100) for _ in every])
    keys = [every[at] for at in rng.permutation(n)[: n // 20].tolist()]
    pairs = [(key, rng.bytes(100)) for key in keys]
    column, others = pa.array(keys), pa.array([value for _, value in pairs])
    return [
        ns(lambda _: get_each(state.get, keys), len(keys), 9),
        ns(lambda _: state.get_many(column), len(keys), 9),
        ns(lambda _: put_each(state.put, pairs), len(keys), 9),
        ns(lambda _: state.put_many(column, others), len(keys), 9),
    ]


@measures(
    STORE,
    ("memory per entry", "B", "resident memory per entry"),
    ("append to a list of 10", "ns", "append to a list of 1 M"),
    ("append to a list of 1 M", "ns", "append to a list of 1 M"),
    ("put into a map of 10", "ns", "put into a map of 1 M"),
    ("put into a map of 1 M", "ns", "put into a map of 1 M"),
    ("detach and attach", "us", "detach and attach"),
    ("snapshot at 10 k", "us", "taking a snapshot at 1 M keys, vs at 10 k"),
    ("snapshot at 1 M", "us", "taking a snapshot at 1 M keys"),
    ("encoding the largest leaf", "us", "longest put while a snapshot is written"),
    ("longest put beside a snapshot", "us", "longest put while a snapshot is written"),
    ("encode 1 M entries", "ms", "encode all leaves"),
    ("decode 1 M entries", "ms", "decode all leaves"),
)
def leaves(is_quick: bool) -> list[float]:
    import bench_store as bench
    from compare import Report

    bench.ROUNDS = 1 if is_quick else 7
    report = Report("")
    bench.append_and_put_in_large_containers(report)
    bench.detach_and_attach(report)
    bench.taking_snapshots(report)
    bench.longest_put_beside_a_snapshot(report)
    bench.encode_and_decode(report)
    lists, maps, detach, snapshot, _, beside, encode, decode = (row.figures for row in report.rows)
    return [
        float(subprocess.check_output([sys.executable, "-c", bench._MEMORY, "statekit"])),
        *(lists["10 ns"], lists["1 M ns"], maps["10 ns"], maps["1 M ns"]),
        detach["detach + attach us"],
        *(snapshot["10 k us"], snapshot["1 M us"]),
        *(beside["encoding us"], beside["longest put us"]),
        *(encode["encode ms"], decode["decode ms"]),
    ]


# ---- docs/checkpoints.md and docs/migration.md


def parts(bench: Any, is_quick: bool, *names: str, **sizes: Any) -> Iterator[dict[str, float]]:
    """The figures of each row that some parts of a benchmark report."""
    from compare import Report

    report = Report("before_after_quick")
    chosen = bench.QUICK if is_quick else replace(bench.Sizes(), **sizes)
    run = bench.Bench(chosen, Path(tempfile.gettempdir()), report)
    for name in names:
        getattr(run, name)()
    return (row.figures for row in report.rows)


@measures(
    CHECKPOINTS,
    ("full checkpoint", "MB/s", "full checkpoint"),
    ("updates before one is written", "/s", "single-key updates while one is written"),
    ("updates while one is written", "/s", "single-key updates while one is written"),
    ("p99 before one is written", "us", "the same, 99th percentile"),
    ("p99 while one is written", "us", "the same, 99th percentile"),
    ("checkpoint_async, the longest", "ms", "`checkpoint_async` holds up"),
    ("checkpoint_async, the median", "ms", "`checkpoint_async` holds up"),
    ("full, bytes", "B", "incremental after changing 1 %"),
    ("1 % of the keys, bytes", "B", "incremental after changing 1 % of the keys"),
    ("1 % of the leaves, bytes", "B", "incremental after changing 1 % of the leaves"),
)
def writing(is_quick: bool) -> list[float]:
    import bench_checkpoint as bench

    names = ("full", "updates", "hold_up", "incremental")
    full, rate, tail, held, some, few = parts(bench, is_quick, *names, rounds=3, seconds=1.0)
    return [
        full["checkpoint MB/s"],
        *(rate["before/s"], rate["during/s"], tail["before us"], tail["during us"]),
        *(held["longest ms"], held["median ms"]),
        *(some["full bytes"], some["bytes"], few["bytes"]),
    ]


@measures(
    CHECKPOINTS,
    ("first get after a lazy restore", "ms", "first get after a lazy restore"),
    ("full restore of 1 GB", "ms", "first get after a lazy restore"),
    ("rescale", "s", "`statekit rescale`"),
    ("full restore of 10 M entries", "ms", "full restore of 10 M"),
)
def reading(is_quick: bool) -> list[float]:
    import bench_checkpoint as bench
    import numpy as np

    import statekit as sk

    lazy, rescale = parts(bench, is_quick, "lazy", "rescale", rounds=3)
    n, step = 100_000 if is_quick else 10_000_000, 100_000
    with tempfile.TemporaryDirectory() as place:
        with sk.open("memory:") as kv:
            counts = kv.value("counts", int)
            for at in range(0, n, step):
                names = [f"user-{one}" for one in range(at, at + step)]
                counts.put_many(names, np.arange(at, at + step))
            kv.checkpoint(place)
        took = ns(lambda _: sk.restore(place, lazy=False).close(), 1, 3)
    return [lazy["first get ms"], lazy["full restore ms"], rescale["rescale s"], took / 1e6]


def restore_quietly(place: str, **options: Any) -> Any:
    """A lazy restore that loads only what is touched. In older commits that is not public."""
    import statekit as sk
    from statekit.provider import restore as module

    try:
        return sk.restore(place, background=False, **options)
    except TypeError:
        groups = options.get("key_groups")
        plan, mine, source = module._open_source([place], None, None, groups, False)
        return module._restore_here(plan, mine, source, None, True, background=False)


@measures(
    CHECKPOINTS,
    ("10 k of 1 M x 64 B touched", "ms", "10 k of 1 M entries of 64 bytes"),
    ("half opened, 10 k of 1 M ints touched", "ms", "one of two halves of 1 M ints"),
)
def touching(is_quick: bool) -> list[float]:
    import numpy as np

    import statekit as sk

    n, touched = (20_000, 200) if is_quick else (1_000_000, 10_000)
    some = np.random.default_rng(1).choice(n, touched, replace=False)
    found: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        with sk.open("memory:") as kv:
            values = [i.to_bytes(8, "little") * 8 for i in range(n)]
            kv.value("blobs", bytes, key=int).put_many(np.arange(n), values)
            kv.checkpoint(place)

        def touch(kv: Any) -> None:
            assert len(kv.value("blobs", bytes, key=int).get_many(some)) == touched
            kv.close()

        found.append(ns(touch, 1, 5, lambda: restore_quietly(place)) / 1e6)
    with tempfile.TemporaryDirectory() as place:
        with sk.open("memory:", subgroups=1) as kv:
            kv.value("n", int, key=int, default=0).put_many(np.arange(n), np.arange(n))
            kv.checkpoint(place)
            mine = some[np.asarray(kv.key_groups_of(some, key=int)) < 64]

        def work(_: Any) -> None:
            task = restore_quietly(place, key_groups=range(64))
            task.value("n", int, key=int, default=0).add_many(mine)
            task.close()

        found.append(ns(work, 1, 5) / 1e6)
    return found


@measures(
    MIGRATION,
    ("fetch of a leaf, p50", "us", "on-demand fetch of a leaf"),
    ("background migration", "MB/s", "background migration"),
    ("delta hand-off, bytes", "B", "delta hand-off"),
    ("full hand-off, bytes", "B", "delta hand-off"),
    ("add, serves", "ns", "single adds of a provider"),
    ("add, has taken over", "ns", "single adds of a provider"),
    ("add_many, serves", "ns", "the same, batches"),
    ("add_many, has taken over", "ns", "the same, batches"),
)
def moving(is_quick: bool) -> list[float]:
    import bench_migration as bench

    names = ("fetch", "background", "delta", "steady")
    fetch, stream, delta, one, many, *_ = parts(bench, is_quick, *names, rounds=1)
    return [
        fetch["fetch us"],
        stream["migration MB/s"],
        *(delta["bytes"], delta["full bytes"]),
        *(one["add, serves ns"], one["add, has taken over ns"]),
        *(many["add_many, serves ns"], many["add_many, has taken over ns"]),
    ]


@measures(
    MIGRATION,
    ("longest wait, prioritised", "ms", "counting 50,000 records/s|the same, vs "),
    ("longest wait, all_at_once", "ms", "counting 50,000 records/s"),
    ("longest wait, stop and restore", "ms", "the same, vs stop, checkpoint"),
    ("longest wait, gradual", "ms", "the same, vs `order_unaware`"),
)
def waiting(is_quick: bool) -> list[float]:
    import bench_migration as bench
    from compare import Report
    from migration_worker import Load

    run = bench.Bench(bench.QUICK, Path(tempfile.gettempdir()), Report(""))
    load = Load(1_000_000, 50_000, 1.0, 1) if is_quick else Load(10_000_000, 50_000, 3.0, 1)
    strategies = ("prioritised", "all_at_once", bench.STOP, "order_unaware")
    return [run._wait(strategy, load).longest_ms for strategy in strategies]


def main() -> None:
    import statekit

    name, *options = sys.argv[1:]
    found = WORKLOADS[name]("--quick" in options)
    names = [figure.name for figure in FIGURES if figure.workload == name]
    figures = dict(zip(names, found, strict=True))
    print("\n" + json.dumps({"statekit": statekit.__file__, "figures": figures}))


if __name__ == "__main__":
    main()
