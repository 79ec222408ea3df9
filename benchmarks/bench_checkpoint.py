"""Checkpoints: what they cost, what they hold up, and how soon state is back.

    python benchmarks/bench_checkpoint.py [--quick] [--only WORD] [--dir PATH]
        what is promised beside what was measured; writes results/checkpoint.json.
        --quick: small sizes, into checkpoint_quick.json. --only: the parts with the word in their
        name; the other results stay as they were. --dir: where to write (a real disk).

Both sides of each comparison run in turns, in one process, on the same disk. Writing is always
measured up to the return of fsync, reading with a warm page cache on both sides.
"""

import argparse
import gc
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
from compare import Report, Row
from rocksdict import Options, Rdict, WriteBatch

import statekit as sk

VALUE_BYTES = 100
ENTRY_BYTES = VALUE_BYTES + 26  # of an entry in a pack: hash, key, two offsets, MessagePack head
PIECE = 1 << 20


@dataclass(frozen=True)
class Sizes:
    written: int = 500_000_000  # bytes of state
    restored: int = 1_000_000_000
    keys: int = 10_000_000
    rounds: int = 5
    seconds: float = 2.0  # of updates before each checkpoint


QUICK = Sizes(20_000_000, 40_000_000, 200_000, 3, 0.3)


class Bench:
    def __init__(self, sizes: Sizes, folder: Path, report: Report) -> None:
        self.sizes = sizes
        self.folder = folder
        self.report = report

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    # ---- Writing

    def full(self) -> None:
        """A full checkpoint beside plain writes of the same bytes."""
        with filled(self.sizes.written) as kv:
            ratios, ours, plain = [], [], []
            for _ in range(self.sizes.rounds):
                with self.scratch() as place:
                    took, checkpoint = timed(lambda place=place: kv.checkpoint(place, base=None))
                    packs = [path.read_bytes() for path in sorted(place.glob("*.pack"))]
                    size = checkpoint.new_bytes
                with self.scratch() as place:
                    raw, _ = timed(lambda place=place, packs=packs: write_plain(place / "f", packs))
                ratios.append(raw / took)
                ours.append(size / took / 1e6)
                plain.append(size / raw / 1e6)
                del packs
        self.report.add(
            Row(
                f"full checkpoint of {megabytes(self.sizes.written)}, bytes/s vs plain writes and "
                "fsync of the same bytes",
                statistics.median(ratios),
                "x",
                0.6,
                figures={
                    "checkpoint MB/s": statistics.median(ours),
                    "plain MB/s": statistics.median(plain),
                },
            )
        )

    def updates(self) -> None:
        """Single-key updates while a checkpoint is written, and before."""
        rates, tails, figures = [], [], []
        with filled(self.sizes.written) as kv:
            update = Updates(kv, self.sizes.written // ENTRY_BYTES)
            for _ in range(self.sizes.rounds):
                until = perf_counter() + self.sizes.seconds
                before = update.run(lambda until=until: perf_counter() >= until)
                with self.scratch() as place:
                    job = kv.checkpoint_async(place, base=None)
                    during = update.run(lambda job=job: job.done)
                    job.wait()
                rates.append(during.rate / before.rate)
                tails.append(during.p99_us / before.p99_us)
                figures.append((before, during))
        middle = statistics.median
        self.report.add(
            Row(
                "single-key updates while a checkpoint is written, throughput vs before",
                middle(rates),
                "x",
                0.7,
                figures={
                    "before/s": middle(before.rate for before, _ in figures),
                    "during/s": middle(during.rate for _, during in figures),
                    "longest ms": max(during.max_us for _, during in figures) / 1000,
                },
            )
        )
        self.report.add(
            Row(
                "single-key updates while a checkpoint is written, p99 vs before",
                middle(tails),
                "x",
                1.5,
                at_most=True,
                figures={
                    "before us": middle(before.p99_us for before, _ in figures),
                    "during us": middle(during.p99_us for _, during in figures),
                },
            )
        )

    def beside(self) -> None:
        """Updates and a checkpoint beside each other, and what each costs the other at least."""
        size, middle = self.sizes.written, statistics.median
        rates: dict[str, list[float]] = {"own": [], "other": []}
        times: dict[str, list[float]] = {"own": [], "other": [], "alone": []}
        with filled(size) as kv, filled(size) as other:
            update = Updates(kv, size // ENTRY_BYTES)
            for at in range(self.sizes.rounds):
                with self.scratch() as place:
                    job = kv.checkpoint_async(place, base=None)
                    times["alone"].append(timed(job.wait)[0])
                pair = [("own", kv), ("other", other)]
                for name, written in pair if at % 2 else reversed(pair):
                    with self.scratch() as place:
                        began = perf_counter()
                        job = written.checkpoint_async(place, base=None)
                        rates[name].append(update.run(lambda job=job: job.done).rate)
                        job.wait()
                        times[name].append(perf_counter() - began)
        self.report.add(
            Row(
                "single-key updates while a checkpoint is written, throughput vs while another "
                "provider's is",
                middle(own / other for own, other in zip(*rates.values(), strict=True)),
                "x",
                0.93,
                figures={f"{name}/s": middle(values) for name, values in rates.items()},
            )
        )
        self.report.add(
            Row(
                "checkpoint beside single-key updates, time vs without them",
                middle(own / alone for own, _, alone in zip(*times.values(), strict=True)),
                "x",
                1.6,
                at_most=True,
                figures={f"{name} s": middle(values) for name, values in times.items()},
            )
        )

    def hold_up(self) -> None:
        """How long checkpoint_async keeps its caller."""
        kv = sk.open("memory:")
        counts = kv.value("counts", int, key=int)
        put_all(counts, self.sizes.keys)
        took = []
        with self.scratch() as place:
            for at in range(2 * self.sizes.rounds):
                counts.add_many(np.arange(at, self.sizes.keys, 100))
                seconds, job = timed(lambda: kv.checkpoint_async(place))
                took.append(1000 * seconds)
                job.wait()
        kv.close()
        self.report.add(
            Row(
                f"checkpoint_async holds up its caller, at {self.sizes.keys:,} keys",
                max(took),
                " ms",
                5,
                at_most=True,
                figures={"longest ms": max(took), "median ms": statistics.median(took)},
            )
        )

    def incremental(self) -> None:
        """Bytes of an incremental checkpoint."""
        with filled(self.sizes.written) as kv, self.scratch() as place:
            n = self.sizes.written // ENTRY_BYTES
            users = kv["users"]
            full = kv.checkpoint(place)
            changed = np.random.default_rng(1).choice(n, n // 100, replace=False)
            users.put_many(changed, values_of(len(changed), b"u"))
            some = kv.checkpoint(place)
            leaves = kv.key_group_count * kv.subgroups
            wanted = set(range(0, leaves, 100))
            inside = keys_in_leaves(n, leaves, wanted)
            users.put_many(inside, values_of(len(inside), b"l"))
            hot = kv.checkpoint(place)
            everything, few, leaf_wise = written(full), written(some), written(hot)
        for what, size, ceiling in (
            ("1 % of the keys", few, 3.0),
            ("1 % of the leaves", leaf_wise, 1.5),
        ):
            self.report.add(
                Row(
                    f"incremental checkpoint after changing {what}, bytes vs full",
                    100 * size / everything,
                    " %",
                    ceiling,
                    at_most=True,
                    figures={"bytes": size, "full bytes": everything},
                )
            )

    # ---- Reading

    def parts(self) -> None:
        """Two tasks that change a few keys of their half, beside a full checkpoint of it all."""
        n = self.sizes.keys // 10
        some = np.random.default_rng(1).choice(n, n // 100, replace=False)
        times: dict[str, list[float]] = {"open": [], "write": [], "publish": [], "full": []}
        with self.scratch() as place, self.scratch() as other:
            with sk.open("memory:", subgroups=1) as kv:
                kv.value("n", int, key=int, default=0).put_many(np.arange(n), np.arange(n))
                kv.checkpoint(place)
                groups = np.asarray(kv.key_groups_of(some, key=int))
                for _ in range(self.sizes.rounds):
                    times["full"].append(timed(lambda: kv.checkpoint(other, base=None))[0])

            def open_half(half: int) -> sk.KVProvider:
                mine = range(64 * half, 64 * half + 64)
                task = sk.restore(place, key_groups=mine, background=False)
                task.value("n", int, key=int, default=0).add_many(some[groups // 64 == half])
                return task

            for number in range(2, 2 + self.sizes.rounds):
                tasks, parts = [], []
                for half in (0, 1):
                    took, task = timed(partial(open_half, half))
                    times["open"].append(took)
                    tasks.append(task)
                for task in tasks:
                    took, part = timed(partial(task.write_part, place, number=number))
                    times["write"].append(took)
                    parts.append(part)
                publish = partial(sk.publish, place, parts, number=number)
                times["publish"].append(timed(publish)[0])
                for task in tasks:
                    task.close()
        middle = {name: 1000 * statistics.median(values) for name, values in times.items()}
        self.report.add(
            Row(
                f"one of two halves of {n:,} ints opened, 1 % of it changed, its part written, "
                "half of the publishing, vs a full checkpoint of all",
                middle["full"] / (middle["open"] + middle["write"] + middle["publish"] / 2),
                "x",
                1,
                figures={f"{name} ms": value for name, value in middle.items()},
            )
        )

    def lazy(self) -> None:
        """The first get after a lazy restore beside a full restore."""
        n = self.sizes.restored // ENTRY_BYTES
        with self.scratch() as place:
            with filled(self.sizes.restored) as kv:
                kv.checkpoint(place)
            ratios, first, whole = [], [], []
            for at in range(self.sizes.rounds):
                took, kv = timed(lambda: sk.restore(place, lazy=False))
                kv.close()
                del kv
                gc.collect()
                whole.append(took)
                began = perf_counter()
                kv = sk.restore(place)
                value = kv.value("users", bytes, key=int)[at * 7919 % n]
                first.append(perf_counter() - began)
                assert len(value) == VALUE_BYTES
                kv.close()
                del kv
                gc.collect()
                ratios.append(whole[-1] / first[-1])
        self.report.add(
            Row(
                f"first get after a lazy restore of {megabytes(self.sizes.restored)}, vs full "
                "restore",
                statistics.median(ratios),
                "x",
                50,
                figures={
                    "first get ms": 1000 * statistics.median(first),
                    "full restore ms": 1000 * statistics.median(whole),
                },
            )
        )

    def restore(self) -> None:
        """A full restore beside rocksdict and pickle."""
        n = self.sizes.keys
        names = [f"user-{at}" for at in range(n)]
        times: dict[str, list[float]] = {"restore": [], "rocksdict": [], "unpickle": []}
        with self.scratch() as place:
            kv = sk.open("memory:")
            counts = kv.value("counts", int)
            for at in range(0, n, 1_000_000):
                part = names[at : at + 1_000_000]
                counts.put_many(part, np.arange(at, at + len(part)))
            kv.checkpoint(place / "checkpoint")
            kv.close()
            del kv, counts
            with open(place / "dict", "wb") as file:
                pickle.dump(dict(zip(names, range(n), strict=True)), file, protocol=5)
            pairs = [(name.encode(), at.to_bytes(8, "little")) for at, name in enumerate(names)]
            for at in range(min(3, self.sizes.rounds)):
                gc.collect()
                gc.disable()
                took, kv = timed(lambda: sk.restore(place / "checkpoint", lazy=False))
                times["restore"].append(took)
                assert kv.value("counts", int)["user-77"] == 77
                kv.close()
                del kv
                gc.collect()
                took, loaded = timed(lambda: unpickle(place / "dict"))
                times["unpickle"].append(took)
                assert len(loaded) == n
                del loaded
                gc.collect()
                path = place / f"rocks-{at}"
                times["rocksdict"].append(timed(lambda path=path: ingest(path, pairs))[0])
                shutil.rmtree(path)
                gc.enable()
        seconds = {f"{name} s": statistics.median(values) for name, values in times.items()}
        for other, floor in (("rocksdict", 5), ("unpickle", 1.5)):
            what = "rocksdict ingest" if other == "rocksdict" else "unpickling the same dict"
            ratios = [a / b for a, b in zip(times[other], times["restore"], strict=True)]
            self.report.add(
                Row(
                    f"full restore of {n:,} small entries vs {what}",
                    statistics.median(ratios),
                    "x",
                    floor,
                    figures=seconds,
                )
            )

    def rescale(self) -> None:
        """The command line's rescale beside a copy of the files."""
        with self.scratch() as place:
            with filled(self.sizes.restored) as kv:
                parts = kv.split(sk.assign(kv.key_group_count, 2))
                for at, part in enumerate(parts):
                    part.checkpoint(place / "two" / f"worker-{at}")
                    part.close()
            size = sum(path.stat().st_size for path in (place / "two").rglob("*.pack"))
            ratios, ours, copies = [], [], []
            command = [sys.executable, "-m", "statekit.cli", "rescale", str(place / "two")]
            for at in range(self.sizes.rounds):
                out = place / f"three-{at}"
                call = [*command, "--workers", "3", "--out", str(out)]
                took, _ = timed(
                    lambda call=call: subprocess.run(call, check=True, capture_output=True)
                )
                shutil.rmtree(out)
                copied = place / f"copy-{at}"
                raw, _ = timed(lambda copied=copied: copy_tree(place / "two", copied))
                shutil.rmtree(copied)
                ratios.append(took / raw)
                ours.append(took)
                copies.append(raw)
        self.report.add(
            Row(
                f"rescale of {megabytes(size)} from 2 to 3 workers by the command line, vs copying "
                "and syncing the files",
                statistics.median(ratios),
                "x",
                1.5,
                at_most=True,
                figures={
                    "rescale s": statistics.median(ours),
                    "copy s": statistics.median(copies),
                },
            )
        )


# ---- What is measured against


def write_plain(path: Path, packs: list[bytes]) -> None:
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    for pack in packs:
        view = memoryview(pack)
        for at in range(0, len(view), PIECE):
            os.write(file, view[at : at + PIECE])
    os.fsync(file)
    os.close(file)


def copy_tree(source: Path, target: Path) -> None:
    """Copies files and makes the copies durable, as the other side does."""
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        file = os.open(copy, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def unpickle(path: Path) -> dict[str, int]:
    with open(path, "rb") as file:
        return pickle.load(file)


def ingest(path: Path, pairs: list[tuple[bytes, bytes]]) -> None:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.prepare_for_bulk_load()
    database = Rdict(str(path), options)
    for at in range(0, len(pairs), 10_000):
        batch = WriteBatch(raw_mode=True)
        for key, value in pairs[at : at + 10_000]:
            batch.put(key, value)
        database.write(batch)
    database.close()


# ---- State


@contextmanager
def filled(size: int) -> Iterator[sk.KVProvider]:
    """A provider with `size` bytes of state: 100-byte values under int keys."""
    kv = sk.open("memory:")
    put_all(kv.value("users", bytes, key=int), size // ENTRY_BYTES)
    yield kv
    kv.close()
    gc.collect()


def values_of(n: int, letter: bytes) -> list[bytes]:
    return [letter * VALUE_BYTES] * n


def put_all(state: sk.ValueState, n: int) -> None:
    is_number = state.schema.type == "int"
    for at in range(0, n, 500_000):
        keys = np.arange(at, min(n, at + 500_000))
        state.put_many(keys, keys if is_number else values_of(len(keys), b"v"))


def keys_in_leaves(n: int, leaves: int, wanted: set[int]) -> np.ndarray:
    """The keys below n that hash to some leaves."""
    kv = sk.open("memory:", key_groups=leaves, subgroups=1)  # then a key-group is a leaf
    found = np.asarray(kv.key_groups_of(np.arange(n), key=int))
    kv.close()
    return np.flatnonzero(np.isin(found, list(wanted)))


def written(checkpoint: sk.Checkpoint) -> int:
    """Bytes that a checkpoint added: its packs and its manifest."""
    manifest = Path(checkpoint.url) / f"{checkpoint.number:012}.manifest"
    return checkpoint.new_bytes + manifest.stat().st_size


def timed(call: Callable[[], object]) -> tuple[float, object]:
    began = perf_counter()
    result = call()
    return perf_counter() - began, result


def megabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


@dataclass
class Figures:
    rate: float
    p99_us: float
    max_us: float


class Updates:
    """Updates of single keys, drawn at random, each of them timed."""

    def __init__(self, kv: sk.KVProvider, n: int) -> None:
        self.state = kv["users"]
        self.keys = np.random.default_rng(7).integers(0, n, 1 << 20).tolist()
        self.at = 0

    def run(self, is_over: Callable[[], bool]) -> Figures:
        clock, state, value = time.perf_counter_ns, self.state, b"w" * VALUE_BYTES
        took: list[int] = []
        note = took.append
        began = clock()
        while not is_over():
            for key in self.keys[self.at : self.at + 1000]:
                start = clock()
                state[key] = value
                note(clock() - start)
            self.at = (self.at + 1000) % len(self.keys)
        seconds = (clock() - began) / 1e9
        nanoseconds = np.array(took)
        return Figures(
            len(took) / seconds,
            float(np.percentile(nanoseconds, 99)) / 1000,
            float(nanoseconds.max()) / 1000,
        )


PARTS = (
    "full",
    "updates",
    "beside",
    "hold_up",
    "incremental",
    "parts",
    "lazy",
    "restore",
    "rescale",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    report = Report("checkpoint_quick" if options.quick else "checkpoint")
    bench = Bench(QUICK if options.quick else Sizes(), options.dir, report)
    for part in PARTS:
        if options.only in part:
            print(f"     measuring {part} ...", flush=True)
            getattr(bench, part)()
    report.write(keep=bool(options.only))


if __name__ == "__main__":
    main()
