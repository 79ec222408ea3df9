"""A short tour: count a stream, rescale it, checkpoint it while it changes, restore it, spill it.

Checks every result against a plain Python Counter and says what happened and how fast.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

import statekit as sk

KEYS = 1_000_000
EVENTS = 5_000_000
SPILLED_KEYS = 300_000


@dataclass
class Click:
    url: str
    at: int


@contextmanager
def timed(what: str, count: int = 0, unit: str = "keys") -> Iterator[None]:
    began = time.perf_counter()
    yield
    took = time.perf_counter() - began
    rate = f"{count / took / 1e6:8.2f} M {unit}/s" if count else ""
    print(f"  {what:<58}{took * 1000:9.2f} ms {rate}", flush=True)


def check(what: str, wrong: int) -> None:
    print(f"  {what}: {wrong} differ")
    if wrong:
        raise SystemExit("the state is wrong")


def count_and_rescale() -> None:
    users = pa.array([f"user-{i:07d}" for i in range(KEYS)])
    # A few users are busy, most are not.
    drawn = np.minimum(np.random.default_rng(1).zipf(1.2, EVENTS) - 1, KEYS - 1)
    events = users.take(pa.array(drawn))
    if isinstance(events, pa.ChunkedArray):
        events = events.combine_chunks()

    kv = sk.open("memory:")  # 128 key-groups of 16 sub-groups: 2,048 leaves
    visits = kv.value("visits", int, default=0)
    print("\ncount a stream")
    with timed("put_many: every user with 0 visits", KEYS):
        visits.put_many(users, np.zeros(KEYS, dtype=np.int64))
    with timed("add_many: one visit per event", EVENTS, "events"):
        visits.add_many(events)
    held = kv.metrics().states["visits"]
    print(f"  {held.entries:,} entries in {held.bytes / held.entries:.0f} bytes each")

    print("\nsplit between two workers, go on counting, merge")
    with timed("split: half of the key-groups move to another provider"):
        (worker,) = kv.split([range(64, 128)])
    there = worker["visits"]
    print(f"  {len(visits):,} entries here, {len(there):,} there")
    first = users.slice(0, 1000).to_pylist()
    for user in first:  # each key goes to its owner
        kv.owner_of(user)["visits"].add(user)
    with timed("merge: they come back"):
        kv.merge(worker)

    expected = Counter(drawn.tolist())
    expected.update(range(1000))
    counted = visits.get_many(users).to_list()
    check(
        f"{KEYS:,} counts compared with collections.Counter",
        sum(counted[i] != expected[i] for i in range(KEYS)),
    )


def checkpoint_and_restore() -> None:
    print("\ncheckpoint while counting, restore at another parallelism")
    expected = Counter[int]()
    with tempfile.TemporaryDirectory() as path:
        place = f"{path}/worker-0"
        kv = sk.open("memory:")
        counts = kv.value("counts", int, default=0, key=int)

        def count(keys: np.ndarray) -> None:
            counts.add_many(keys)
            expected.update(keys.tolist())

        count(np.arange(KEYS))
        with timed("full checkpoint", KEYS):
            full = kv.checkpoint(place)
        frozen = len(counts)
        with timed("checkpoint_async: how long it holds us up"):
            job = kv.checkpoint_async(place, metadata={"offset": KEYS})
        batches = 0
        while not job.done:  # the state stays in use
            count(np.arange(batches, KEYS, 100))
            batches += 1
        job.wait()
        print(f"  {batches} batches were counted while it was written")
        with timed("incremental checkpoint after these"):
            some = kv.checkpoint(place, metadata={"offset": KEYS + batches})
        print(f"  {full.new_bytes / 1e6:.1f} MB in full, {some.new_bytes / 1e6:.1f} MB more now")
        kv.close()

        with timed("restore, lazily, and read the first key"):
            back = sk.restore(place)
            back.value("counts", int, default=0, key=int)[0]
        back.wait_loaded()
        found = dict(back["counts"].items())
        check(
            f"{KEYS:,} counts compared with collections.Counter",
            sum(found.get(key) != expected[key] for key in range(KEYS)),
        )
        back.close()
        with timed("the checkpoint before, restored by three workers"):
            parts = [
                sk.restore(place, at=1, key_groups=part, lazy=False) for part in sk.assign(128, 3)
            ]
        held = [len(part.value("counts", int, key=int)) for part in parts]
        print(f"  they have {', '.join(f'{n:,}' for n in held)} entries")
        check("entries in all", frozen - sum(held))
        for part in parts:
            part.close()


def spill_and_reopen() -> None:
    print("\nmore than memory holds: a RocksDB home with 16 MiB of memory")
    rng = np.random.default_rng(2)
    busy = rng.zipf(1.1, 500_000) % SPILLED_KEYS
    with tempfile.TemporaryDirectory() as path:
        with sk.open(f"rocksdb:{path}/state?memory=16MiB") as kv:
            last = kv.value("last", Click, key=int)
            with timed("put_many: a dataclass for every key", SPILLED_KEYS):
                last.put_many(range(SPILLED_KEYS), [Click("/", 0)] * SPILLED_KEYS)
            with timed("one key at a time: where each user was last", len(busy), "events"):
                for at, user in enumerate(busy.tolist()):
                    last[user] = Click(f"/{at % 100}", at)
            figures = kv.metrics()
            spilled = figures.states["last"]
            print(
                f"  {figures.bytes / 2**20:.0f} MiB in memory, {spilled.spills:,} rows written "
                f"home, {spilled.fetches:,} fetched"
            )
        expected = {user: Click(f"/{at % 100}", at) for at, user in enumerate(busy.tolist())}
        with sk.open(f"rocksdb:{path}/state") as kv:
            last = kv.value("last", Click, key=int)
            with timed("reopen, and read everything", SPILLED_KEYS):
                found = dict(last.items())
        check(
            f"{SPILLED_KEYS:,} records compared with a dict",
            sum(found[k] != expected.get(k, Click("/", 0)) for k in range(SPILLED_KEYS)),
        )


def nest_and_time() -> None:
    print("\nnested state and timers")
    kv = sk.open("memory:")
    carts = kv.state("carts", dict[str, list[Click]])
    expiry = kv.timers("expiry")
    with timed("append to a list in a map, set a timer", 100_000, "records"):
        for at in range(100_000):
            user = f"user-{at % 1000}"
            carts[user]["clicks"].append(Click("/item", at))
            expiry.move(user, at + 500)
    due = [timer.due for timer in expiry.pop_due(100_000)]
    print(f"  {len(due)} timers were due, in order: {due == sorted(due)}")
    wrong = sum(
        [click.at for click in carts[f"user-{u}"]["clicks"]] != list(range(u, 100_000, 1000))
        for u in range(1000)
    )
    check("1,000 lists compared with ranges", wrong)


def main() -> None:
    print(f"statekit {sk.__version__}: {KEYS:,} keys, {EVENTS:,} events")
    count_and_rescale()
    checkpoint_and_restore()
    spill_and_reopen()
    nest_and_time()


if __name__ == "__main__":
    main()
