"""What statekit is for, in a minute: state moves between two processes that go on counting.

    python examples/demo.py [--quick] [--plot PATH]

One worker counts a stream of records that comes at a constant rate. Then a second worker takes half
of its key-groups over: once in the usual way (stop, write a checkpoint, restore it in both, go on),
once with kv.fetch_from() while records keep coming. Then the second worker is killed and its last
checkpoint is restored, lazily. Each time all counts are compared with NumPy's, key by key.
"""

import argparse
import multiprocessing
import secrets
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import demo_worker
import numpy as np

import statekit as sk

MOVED = range(64, 128)  # key-groups
TICK_S = 0.002
MESSAGE_MAX = 256  # records in one message
REPLY_S = 60.0  # how long a worker may take to answer
SHARE_OF_CAPACITY = 0.1  # the load, as a share of one worker's: three processes share two cores
ZIPF = 1.0  # as in benchmarks/bench_migration.py
SLOT_S = 0.05  # of the plot
CALM_MS = 25.0  # a record that waits longer is held up by the hand-over
STOP, LIVE = "stop, checkpoint, restore", "prioritised"

_SPAWN = multiprocessing.get_context("spawn")  # gRPC does not survive a fork


@dataclass(frozen=True)
class Sizes:
    keys: int = 12_000_000
    measured: int = 300_000  # records, to measure the capacity
    before_s: float = 4.0
    after_s: float = 5.0
    replayed_s: float = 1.5  # between the checkpoint and the kill


QUICK = Sizes(20_000, 20_000, 0.5, 0.7, 0.2)


# ---- The job


class Member:
    """A worker, as the driver sees it."""

    def __init__(self, keys: int, token: str, other: Any) -> None:
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(
            target=demo_worker.run, args=(keys, token, theirs, other), daemon=True
        )
        self.process.start()
        theirs.close()
        other.close()

    def send(self, *message: Any) -> None:
        self.pipe.send(message)


class Job:
    """Two workers, a stream of records, and who has which key-groups."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.token = secrets.token_hex(16)  # by it the workers know each other
        left, right = _SPAWN.Pipe()
        self.workers = [Member(sizes.keys, self.token, left), Member(sizes.keys, self.token, right)]
        with sk.open("memory:") as kv:
            groups = kv.key_groups_of(np.arange(sizes.keys), key=int)
            self.group_of = np.asarray(groups).astype(np.int64)
        self.shares = np.cumsum(1 / np.arange(1, sizes.keys + 1) ** ZIPF)
        self.rate = 0.0

    def draw(self, count: int, seed: int) -> np.ndarray:
        """Keys by Zipf: a few are busy, most are not."""
        drawn = np.random.default_rng(seed).random(count)
        return np.searchsorted(self.shares, drawn * self.shares[-1])

    def measure(self) -> None:
        self.fill()
        keys = self.draw(self.sizes.measured, 0)
        self.workers[0].send("measure", np.arange(len(keys)), keys)
        capacity = self.reply(0, "measured")[0]
        self.rate = round(SHARE_OF_CAPACITY * capacity, -2)
        say(f"one worker can count {capacity:,.0f} records/s; the load is {self.rate:,.0f}/s")

    def fill(self) -> None:
        """All key-groups are the first worker's; all counts are 0."""
        self.workers[0].send("fill", self.sizes.keys)
        self.workers[1].send("fill", 0)
        self.addresses = [self.reply(one, "filled")[0] for one in (0, 1)]

    # ---- The load

    def start(self, seconds: float, seed: int) -> None:
        self.fill()
        self.stream = self.draw(int(self.rate * seconds), seed)
        self.owner = np.zeros(demo_worker.GROUPS, dtype=np.int64)  # by key-group
        self.is_paused = self.is_down = False
        self.sent = 0
        self.began = monotonic()

    def send_due(self) -> None:
        """Sends what has arrived by now; nothing while the job is stopped."""
        due = min(len(self.stream), 1 + int((monotonic() - self.began) * self.rate))
        while self.sent < due and not self.is_paused:
            stop = min(due, self.sent + MESSAGE_MAX)
            self.route(np.arange(self.sent, stop), (0,) if self.is_down else (0, 1))
            self.sent = stop

    def route(self, numbers: np.ndarray, workers: tuple[int, ...]) -> None:
        keys = self.stream[numbers]
        owners = self.owner[self.group_of[keys]]
        for one in workers:
            mine = owners == one
            if mine.any():
                self.workers[one].send("records", numbers[mine], keys[mine])

    def run(self, seconds: float) -> None:
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            self.send_due()
            if sys.stdout.isatty():
                print(f"\r  {self.sent:,} records sent, {left:.1f} s to go ", end="", flush=True)
            sleep(TICK_S)
        if sys.stdout.isatty():
            print("\r" + " " * 50, end="\r")

    def run_until(self, one: int, name: str) -> list[Any]:
        """Goes on sending records until a worker answers."""
        return self.reply(one, name, self.send_due)

    def reply(self, one: int, name: str, meanwhile: Callable[[], None] | None = None) -> list[Any]:
        worker = self.workers[one]
        until = monotonic() + REPLY_S
        while not worker.pipe.poll(TICK_S):
            if meanwhile is not None:
                meanwhile()
            if not worker.process.is_alive() or monotonic() > until:
                raise SystemExit(f"worker {one} has not said {name!r}: it died, or hangs.")
        said, *rest = worker.pipe.recv()
        assert said == name, (said, name)
        return rest

    # ---- What is checked

    def check(self, what: str) -> tuple[np.ndarray, np.ndarray]:
        """Compares every count with NumPy's. Returns what was counted, in that order, and when."""
        counts = np.full(self.sizes.keys, -1)
        numbers, times = [], []
        for worker in self.workers:
            worker.send("report")  # comes after all records that were sent
        for one in (0, 1):
            done, at, keys, found = self.reply(one, "report")
            counts[keys] = found
            numbers.append(done)
            times.append(at)
        expected = np.bincount(self.stream[: self.sent], minlength=self.sizes.keys)
        wrong = int((counts != expected).sum())
        say(
            f"{what}: {self.sent:,} records, {self.sizes.keys:,} keys compared with NumPy: "
            f"{wrong or 'no'} count{'' if wrong == 1 else 's'} differ{'s' if wrong == 1 else ''}"
        )
        if wrong:
            raise SystemExit(f"The counts of {wrong} keys are wrong. This must not be.")
        order = np.argsort(np.concatenate(times), kind="stable")
        return np.concatenate(numbers)[order], np.concatenate(times)[order]

    def check_order(self, numbers: np.ndarray) -> None:
        """Each key's records were counted in the order in which they arrived."""
        keys = self.stream[numbers]
        by_key = np.argsort(keys, kind="stable")
        late = np.diff(numbers[by_key]) < 0
        if wrong := int((late & (np.diff(keys[by_key]) == 0)).sum()):
            raise SystemExit(f"{wrong} records overtook others of their key. This must not be.")

    def close(self) -> None:
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join()


# ---- Handing over


@dataclass
class Outcome:
    """A run. Times are in seconds since the hand-over was asked for."""

    name: str
    here: float  # when all state was where it belongs
    arrived: np.ndarray  # of each record
    done: np.ndarray

    @property
    def waits_ms(self) -> np.ndarray:
        return 1000 * (self.done - self.arrived)

    def slots(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per slot of time: its start, records counted per second, the longest wait in ms."""
        first, last = self.arrived[0], self.arrived[-1]
        edges = np.arange(first, last, SLOT_S)
        counted = np.histogram(self.done, [*edges, edges[-1] + SLOT_S])[0] / SLOT_S
        which = np.minimum(((self.arrived - first) / SLOT_S).astype(int), len(edges) - 1)
        longest = np.zeros(len(edges))
        np.maximum.at(longest, which, self.waits_ms)
        return edges, counted, longest

    def calm(self) -> float:
        """From when on no record was held up any more."""
        starts, _, longest = self.slots()
        calm = starts[(starts >= self.here) & (longest < CALM_MS)]
        return float(calm[0]) if len(calm) else float(self.arrived[-1])

    def phases(self) -> list[tuple[float, float, float]]:
        """Before, during and after: records per second, p99 and longest wait in ms."""
        calm, found = self.calm(), []
        begin = self.arrived[0] * 0.8  # leaves out the start of the process
        for start, stop, counted in ((begin, 0, 0), (0, calm, self.here), (calm, np.inf, np.inf)):
            waits = self.waits_ms[(self.arrived >= start) & (self.arrived < stop)]
            until = min(counted, self.arrived[-1])
            records = np.count_nonzero((self.done >= start) & (self.done < until))
            found.append(
                (
                    records / max(until - start, SLOT_S),
                    float(np.percentile(waits, 99)) if len(waits) else 0.0,
                    float(waits.max()) if len(waits) else 0.0,
                )
            )
        return found


def hand_over(job: Job, name: str, place: str) -> Outcome:
    """Half of the key-groups go from the first worker to the second, in the middle of the load."""
    sizes = job.sizes
    say(f"counting for {sizes.before_s:g} s, all of it in worker 0 ...")
    job.run(sizes.before_s)
    began = monotonic()
    job.send_due()
    here = hand_over_live(job, began) if name == LIVE else hand_over_stopped(job, place, began)
    say(f"counting for {sizes.after_s:g} s more, each worker its half ...")
    job.run(sizes.after_s)
    job.is_paused = True
    numbers, times = job.check("checked")
    job.is_paused = False
    job.check_order(numbers)
    done = np.empty(len(numbers))
    done[numbers] = times - began
    return Outcome(name, here - began, np.arange(len(numbers)) / job.rate + job.began - began, done)


def hand_over_live(job: Job, began: float) -> float:
    job.workers[1].send("take_over", job.addresses[0], MOVED, LIVE)
    took = job.run_until(1, "took")[0]
    job.owner[MOVED.start : MOVED.stop] = 1
    job.workers[0].send("switch")
    here, (leaves, _, size) = job.run_until(1, "here")
    say(
        f"worker 1 owned key-groups {MOVED[0]}-{MOVED[-1]} after {1000 * (took - began):.0f} ms, "
        f"and had their state after {here - began:.2f} s:"
    )
    say(f"{size / 1e6:.0f} MB in {leaves:,} leaves and in single entries that records waited for")
    return float(here)


def hand_over_stopped(job: Job, place: str, began: float) -> float:
    job.is_paused = True
    job.workers[0].send("stop", place)
    stopped = job.run_until(0, "stopped")[0]
    parts = (range(MOVED.start), MOVED)
    for worker, part in zip(job.workers, parts, strict=True):
        worker.send("restore", place, part, False)
    restored = max(job.run_until(one, "restored")[0] for one in (0, 1))
    job.owner[MOVED.start : MOVED.stop] = 1
    job.is_paused = False
    say(
        f"stopped; checkpoint written after {stopped - began:.2f} s, "
        f"restored in both workers after {restored - began:.2f} s"
    )
    return float(restored)


# ---- Killing


def kill_and_restore(job: Job, place: str) -> None:
    """kill -9, then a new process restores the last checkpoint and replays what came after it."""
    job.send_due()
    job.workers[1].send("checkpoint", place, job.sent)  # in the same queue as the records
    number, size, offset = job.run_until(1, "checkpointed")
    say(
        f"worker 1 wrote checkpoint {number} while counting: {size / 1e6:.0f} MB, offset {offset:,}"
    )
    job.run(job.sizes.replayed_s)
    old = job.workers[1]
    old.process.kill()
    old.process.join()
    killed = monotonic()
    job.is_down = True
    say(f"kill -9 of worker 1 at record {job.sent:,} (exit code {old.process.exitcode}) ...")
    _, end = _SPAWN.Pipe()
    job.workers[1] = Member(job.sizes.keys, job.token, end)
    job.workers[1].send("restore", place, MOVED, True)
    at, took = job.run_until(1, "restored")
    missed = np.arange(offset, job.sent)
    job.is_down = False
    for start in range(0, len(missed), MESSAGE_MAX):
        job.route(missed[start : start + MESSAGE_MAX], (1,))
        job.send_due()
    say(
        f"a new process was there after {at - took - killed:.1f} s, usable {1000 * took:.0f} ms "
        "later: it reads state as records ask for it"
    )
    job.run(job.sizes.replayed_s)
    job.is_paused = True
    replayed = int((job.owner[job.group_of[job.stream[missed]]] == 1).sum())
    say(f"{replayed:,} records since the offset were replayed to it")
    job.check("checked again")


# ---- What is shown


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def print_table(outcomes: list[Outcome]) -> None:
    columns = ("records/s", "p99 wait, ms", "longest wait, ms")
    print("\n" + " " * 27 + "".join(f"{title:^27}" for title in columns))
    print(" " * 27 + f"{'before':>8}{'during':>8}{'after':>8}   " * 3)
    for outcome in outcomes:
        phases = outcome.phases()
        line = f"{outcome.name:<27}"
        for column in range(3):
            for phase in phases:
                figure = phase[column]
                line += f"{figure:>8,.0f}" if column == 0 or figure >= 10 else f"{figure:>8.1f}"
            line += "   "
        print(line.rstrip())
    print(
        "\nDuring: from the request until the state is where it belongs (records/s), and until no "
        "record\nis held up any more (waits). A record waits from its arrival until it is counted."
    )


def plot(outcomes: list[Outcome], path: Path, job: Job) -> None:
    try:
        import matplotlib
    except ImportError:
        print("There is no plot: matplotlib is not installed.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 6.4), dpi=120)
    for outcome, color in zip(outcomes, ("#d95f0e", "#08519c"), strict=True):
        starts, counted, longest = outcome.slots()
        worst = outcome.phases()[1][2]
        label = f"{outcome.name}: longest wait {worst:,.0f} ms"
        upper.plot(starts, counted, color=color, label=label)
        lower.plot(starts, longest, color=color)
    upper.set_ylabel("records counted a second")
    upper.set_ylim(bottom=0)
    upper.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    upper.legend(frameon=False)
    upper.set_title(
        f"Half of {job.sizes.keys:,} counters go to another process, under {job.rate:,.0f} "
        f"records/s (Zipf {ZIPF})",
        loc="left",
        fontsize=11,
    )
    lower.set_yscale("log")
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    lower.set_ylabel(f"longest wait of the records\nof {1000 * SLOT_S:.0f} ms, in ms")
    lower.set_xlabel("seconds since the hand-over was asked for")
    for axes in (upper, lower):
        axes.axvline(0, color="#999999", linewidth=0.8, linestyle=":")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    print(f"The plot is in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    default = Path(__file__).resolve().parent.parent / "build" / "demo.png"
    parser.add_argument("--plot", type=Path, default=default, help="where the plot goes")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    began = monotonic()
    print(f"statekit {sk.__version__}: two workers, {sizes.keys:,} counters", flush=True)
    job = Job(sizes)
    job.measure()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate((STOP, LIVE), 1):
            print(f"\n{number}. Hand over half of the key-groups: {name}", flush=True)
            job.start(3 * (sizes.before_s + sizes.after_s) + 10, number)
            outcomes.append(hand_over(job, name, f"{folder}/{number}"))
        print("\n3. Kill a worker, restore it lazily", flush=True)
        kill_and_restore(job, f"{folder}/worker-1")
        job.close()
    print_table(outcomes)
    print()
    plot(outcomes, options.plot, job)
    print(f"All counts were right. {monotonic() - began:.0f} s in all.")


if __name__ == "__main__":
    sys.exit(main())
