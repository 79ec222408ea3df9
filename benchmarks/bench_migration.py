"""Moving state between live processes: what it costs, and how long records wait meanwhile.

    python benchmarks/bench_migration.py [--quick] [--only WORD] [--rounds N] [--add] [--dir PATH]
        what is promised beside what was measured; writes results/migration.json and .png.
        --quick: small sizes, into migration_quick.*. --only: the parts with the word in their
        name; the other results stay as they were. --dir: where checkpoints go (a real disk).
        --rounds: of each part, instead of its own number. --add: rounds of `flow` are added to
        those that are in the results already, and what is promised is compared with all of them.

        The parts `flow-SIZE-RATE` hand over half of the key-groups while records flow, with every
        strategy by turns (handover.py). One round of one takes some three minutes, with 1 GB.

Two processes on loopback. Contenders take turns in one run, and medians are reported. What is
"bare" is gRPC for Python with a handler that moves bytes of the same number and does nothing else.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from compare import Contender, Report, Row, measure, medians, ratio
from handover_rows import FLOWS, QUICK_FLOWS, Costs, Flows
from migration_worker import (
    COUNT_BYTES,
    ENTRY_BYTES,
    KEY_GROUPS,
    BareChannel,
    Engine,
    Load,
    Meter,
    Remote,
    Source,
    Waits,
    fill,
)

import statekit as sk

LEAVES = 2048  # of a provider, unless told
LEAF_BYTES = 64 << 10
STRATEGIES = ("prioritised", "on_demand", "order_unaware", "all_at_once")
STOP = "stop, checkpoint, restore"
# What a worker of an engine in Python can take: 20 us per record, with a function of its user. (The
# loop of migration_worker.py alone could do some twenty times as much.)
RECORDS_PER_SECOND = 50_000


@dataclass(frozen=True)
class Sizes:
    moved: int = 500_000_000  # bytes of state
    counted: int = 1_000_000_000  # bytes of counters
    changed: int = 200_000_000
    leaves: int = LEAVES  # fetched one by one
    steady: int = 1_000_000  # keys
    rounds: int = 3
    seconds: float = 8.0  # of load
    is_quick: bool = False


QUICK = Sizes(20_000_000, 24_000_000, 20_000_000, 200, 50_000, 1, 2.0, True)


class Bench:
    def __init__(self, sizes: Sizes, folder: Path, report: Report) -> None:
        self.sizes = sizes
        self.folder = folder
        self.report = report

    # ---- Bytes

    def fetch(self) -> None:
        """One leaf on demand beside a bare call."""
        n = LEAVES * LEAF_BYTES // ENTRY_BYTES
        keys = key_of_each_leaf(n)[: self.sizes.leaves]
        ratios, ours, bares = [], [], []
        with Remote(Source) as source:
            bare = BareChannel(source.serve_bytes())
            for _ in range(self.sizes.rounds):
                with target() as kv:
                    kv.fetch_from(source.fill(n), key_groups=KEY_GROUPS, strategy="on_demand")
                    users = kv.value("users", bytes, key=int)
                    took: list[float] = []
                    raw: list[float] = []
                    for key in keys.tolist():
                        began = perf_counter()
                        users[key]
                        fetched = perf_counter()
                        bare.get(LEAF_BYTES)
                        took.append(fetched - began)
                        raw.append(perf_counter() - fetched)
                ours.append(1e6 * statistics.median(took))
                bares.append(1e6 * statistics.median(raw))
                ratios.append(ours[-1] / bares[-1])
            bare.close()
        self.report.add(
            Row(
                "on-demand fetch of one leaf of 64 KiB, p50, vs a bare gRPC call of as many bytes",
                statistics.median(ratios),
                "x",
                1.6,
                at_most=True,
                figures={
                    "fetch us": statistics.median(ours),
                    "bare us": statistics.median(bares),
                },
            )
        )

    def background(self) -> None:
        """All leaves with no other load, beside a bare stream."""
        size = self.sizes.moved
        ratios, ours, bares = [], [], []
        with Remote(Source) as source:
            bare = BareChannel(source.serve_bytes())
            for _ in range(self.sizes.rounds):
                address = source.fill(size // ENTRY_BYTES)
                with target() as kv:
                    began = perf_counter()
                    migration = kv.fetch_from(address, key_groups=KEY_GROUPS)
                    migration.wait()
                    took = perf_counter() - began
                    moved = migration.progress.bytes
                began = perf_counter()
                streamed = bare.stream(moved // LEAVES, LEAVES)
                raw = perf_counter() - began
                ours.append(moved / took / 1e6)
                bares.append(streamed / raw / 1e6)
                ratios.append(ours[-1] / bares[-1])
            bare.close()
        self.report.add(
            Row(
                f"background migration of {size / 1e6:.0f} MB, bytes/s vs a bare gRPC stream in "
                "pieces of the same size",
                statistics.median(ratios),
                "x",
                0.6,
                figures={
                    "migration MB/s": statistics.median(ours),
                    "bare MB/s": statistics.median(bares),
                },
            )
        )

    def delta(self) -> None:
        """Bytes over the wire when both sides can read a checkpoint."""
        n = self.sizes.changed // ENTRY_BYTES
        changed = np.random.default_rng(1).choice(n, n // 100, replace=False)
        with Remote(Source) as source, tempfile.TemporaryDirectory(dir=self.folder) as place:
            everything = self._moved(source.fill(n), n)
            address = source.fill(n)
            source.checkpoint(place)
            source.change(changed)
            few = self._moved(address, n, base=place)
        self.report.add(
            Row(
                "delta hand-off, 1 % of the keys changed since the base, bytes over the wire vs "
                "full",
                100 * few / everything,
                " %",
                3,
                at_most=True,
                figures={"bytes": few, "full bytes": everything},
            )
        )

    def _moved(self, address: str, n: int, **options: str) -> int:
        """Bytes over the wire, both ways, counted by a Meter in between."""
        meter = Meter(address)
        with target() as kv:
            kv.fetch_from(meter.address, key_groups=KEY_GROUPS, **options).wait()
            assert len(kv.value("users", bytes, key=int)) == n
        meter.close()
        return meter.bytes

    # ---- Operations

    def steady(self) -> None:
        """A provider that serves beside one that does not, and one that has taken over its state
        beside one that restored it.

        Which memory a provider happens to get matters more than what is measured here. So the
        providers of the first pair change roles, those of the second pair are decoded in the same
        way, and all are made anew in each round.
        """
        n = self.sizes.steady
        found: dict[tuple[str, str], list[float]] = {}
        figures: dict[str, list[float]] = {}
        with Remote(Source) as source, tempfile.TemporaryDirectory(dir=self.folder) as place:
            source.fill(n, True)
            source.checkpoint(place)
            for _ in range(3 * self.sizes.rounds):
                with sk.open("memory:") as one, sk.open("memory:") as two:
                    for kv in (one, two):
                        fill(kv, n, is_count=True)
                    for plain, serving in ((one, two), (two, one)):
                        with serving.serve():
                            self._compare(plain, serving, "serves", found, figures)
                with target() as moved, sk.restore(place, lazy=False) as restored:
                    moved.fetch_from(source.fill(n, True), key_groups=KEY_GROUPS).wait()
                    self._compare(restored, moved, "has taken over", found, figures)
        for (what, name), ratios in found.items():
            self.report.add(
                Row(
                    f"{what} of a provider that {name}, throughput vs one that does or did not",
                    statistics.median(ratios),
                    "x",
                    0.98,
                    figures={
                        key: statistics.median(times)
                        for key, times in figures.items()
                        if key.startswith(f"{what}, ")
                    },
                )
            )

    def _compare(
        self,
        plain: sk.KVProvider,
        other: sk.KVProvider,
        name: str,
        found: dict[tuple[str, str], list[float]],
        figures: dict[str, list[float]],
    ) -> None:
        n = self.sizes.steady
        drawn = np.random.default_rng(3).integers(0, n, n // 5)
        singles = drawn[: len(drawn) // 4].tolist()
        for what, count, run in (
            ("add", len(singles), lambda state: [state.add(key, 1) for key in singles]),
            ("add_many", len(drawn), lambda state: state.add_many(drawn)),
        ):
            contenders = [
                Contender(one, run, lambda kv=kv: kv.value("counts", int, key=int), count)
                for one, kv in (("plain", plain), (name, other))
            ]
            times = measure(contenders, 5)
            found.setdefault((what, name), []).append(ratio(times, "plain", name))
            for one, took in medians(times).items():
                figures.setdefault(f"{what}, {one} ns", []).append(took)

    # ---- Records

    def load(self) -> None:
        """Counting under constant load from the moment of the hand-over on."""
        n = self.sizes.counted // COUNT_BYTES
        with Remote(Engine) as engine:
            capacity = engine.capacity(Load(n, 1e6, self.sizes.seconds / 10, 1))
        rate = min(RECORDS_PER_SECOND, capacity / 4)
        print(f"     the loop can do {capacity:,.0f} records/s, it gets {rate:,.0f}", flush=True)
        found: dict[str, list[Waits]] = {name: [] for name in (*STRATEGIES, STOP)}
        for number in range(self.sizes.rounds):
            load = Load(n, rate, self.sizes.seconds, number)
            for strategy, waits in found.items():
                waits.append(self._wait(strategy, load))
                print(f"     {strategy}: {waits[-1]}", flush=True)
        longest = {
            name: statistics.median(one.longest_ms for one in waits)
            for name, waits in found.items()
        }
        figures = {f"{name} ms": wait for name, wait in longest.items()}
        ours = longest["prioritised"]
        for other, share in (("all_at_once", 10), (STOP, 20), ("order_unaware", 3)):
            self.report.add(
                Row(
                    f"key-count under constant load, Zipf 1.0, {n * COUNT_BYTES / 1e6:.0f} MB: "
                    f"longest wait of a record, prioritised vs {other}",
                    ours / longest[other],
                    "x",
                    1 / share,
                    at_most=True,
                    figures=figures,
                )
            )
        p99 = {
            name: statistics.median(one.p99_ms for one in waits) for name, waits in found.items()
        }
        waits: dict[str, Any] = {
            "records_per_second": rate,
            "bytes": n * COUNT_BYTES,
            "p99_ms": p99,
            "longest_ms": longest,
            "runs": {name: [asdict(one) for one in waits] for name, waits in found.items()},
        }
        self.report.series["waits"] = waits

    def _wait(self, strategy: str, load: Load) -> Waits:
        with (
            Remote(Source) as source,
            Remote(Engine) as engine,
            tempfile.TemporaryDirectory(dir=self.folder) as place,
        ):
            address = source.fill(load.keys, True)
            engine.prepare(load)
            if strategy != STOP:
                return engine.take_over(address, strategy)
            began = monotonic()
            source.checkpoint(place)
            return engine.restore(place, began)


@contextmanager
def target() -> Iterator[sk.KVProvider]:
    """A provider that owns nothing yet."""
    with sk.open("memory:", owned=()) as kv:
        yield kv


def key_of_each_leaf(n: int) -> np.ndarray:
    """A key below n for each leaf."""
    with sk.open("memory:", key_groups=LEAVES, subgroups=1) as kv:  # then a key-group is a leaf
        leaves = np.asarray(kv.key_groups_of(np.arange(n), key=int))
    return np.unique(leaves, return_index=True)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    report = Report("migration_quick" if options.quick else "migration")
    sizes = QUICK if options.quick else Sizes()
    if options.rounds:
        sizes = replace(sizes, rounds=options.rounds)
    bench = Bench(sizes, options.dir, report)
    costs = Costs(report, options.quick, options.rounds)
    flows = Flows(report, options.dir, options.rounds, options.add)
    parts: dict[str, Callable[[], None]] = {
        "fetch": bench.fetch,
        "background": bench.background,
        "delta": bench.delta,
        "steady": bench.steady,
        "load": bench.load,
        "small": costs.small,
        "copy": costs.copy,
        "quiet": costs.quiet,
    }
    for name, setting in (QUICK_FLOWS if options.quick else FLOWS).items():
        parts[name] = partial(flows.measure, name, setting)
    for name, part in parts.items():
        if options.only in name:
            print(f"     measuring {name} ...", flush=True)
            part()
            # Each by itself: an hour's results are not lost with the last part.
            report.write(keep=bool(options.only) or name != next(iter(parts)))


if __name__ == "__main__":
    main()
