"""A short tour of the store: load a million keys, count a stream, split and merge.

Checks every result against a plain Python Counter and says what happened and how fast.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import numpy as np
import pyarrow as pa

import statekit as sk

KEYS = 1_000_000
EVENTS = 5_000_000


@contextmanager
def timed(what: str, count: int = 0, unit: str = "keys") -> Iterator[None]:
    began = time.perf_counter()
    yield
    took = time.perf_counter() - began
    rate = f"{count / took / 1e6:8.1f} M {unit}/s" if count else ""
    print(f"  {what:<58}{took * 1000:9.2f} ms {rate}", flush=True)


def main() -> None:
    print(f"statekit {sk.__version__}: {KEYS:,} keys, {EVENTS:,} events")
    users = pa.array([f"user-{i:07d}" for i in range(KEYS)])
    # A few users are busy, most are not.
    drawn = np.minimum(np.random.default_rng(1).zipf(1.2, EVENTS) - 1, KEYS - 1)
    events = users.take(pa.array(drawn))
    if isinstance(events, pa.ChunkedArray):
        events = events.combine_chunks()

    store = sk.Store()  # 128 key-groups of 16 sub-groups: 2,048 leaves
    visits = store.state("visits", "i64")

    print("\nload and count")
    with timed("put_many: every user with 0 visits", KEYS):
        visits.put_many(users, np.zeros(KEYS, dtype=np.int64))
    with timed("add_many: one visit per event", EVENTS, "events"):
        visits.add_many(events)
    stats = store.stats(visits)
    print(f"  {stats.entries:,} entries in {stats.bytes / stats.entries:.0f} bytes each")

    print("\nsplit between two workers, go on counting, merge")
    half = store.leaves // 2
    other = sk.Store()
    other.mark(0, other.leaves, "away")  # it owns nothing yet
    with timed("split: half of the leaves move to another store"):
        other.attach(store.detach(0, half))
    visits_there = other.state("visits", "i64")
    split = {"here": store.stats(visits).entries, "there": other.stats(visits_there).entries}
    print(f"  {split['here']:,} entries here, {split['there']:,} there")
    # Each worker takes the events whose keys it owns: that is what the routing hash is for.
    first = users.slice(0, 1000)
    is_there = np.array([sk.leaf_of(str, user) < half for user in first.to_pylist()])
    visits_there.add_many(first.filter(pa.array(is_there)))
    visits.add_many(first.filter(pa.array(~is_there)))
    with timed("merge: they come back"):
        store.attach(other.detach(0, half))

    print("\nsnapshot while counting goes on")
    with timed("take the snapshot"):
        snapshot = store.snapshot()
    sizes: list[int] = []
    writer = Thread(target=lambda: sizes.extend(len(blocks) for _, blocks in snapshot))
    with timed("write it out, and count all events again meanwhile", EVENTS, "events"), snapshot:
        writer.start()
        visits.add_many(events)
        writer.join()
    print(f"  {sum(sizes) / 1e6:.1f} MB, as of the moment the snapshot was taken")

    print("\ncheck")
    expected = Counter(drawn.tolist())
    expected.update(range(1000))
    expected.update(drawn.tolist())
    counted = visits.get_many(users).values.tolist()
    wrong = sum(counted[i] != expected[i] for i in range(KEYS))
    print(f"  {KEYS:,} counts compared with collections.Counter: {wrong} differ")
    if wrong:
        raise SystemExit("the counts are wrong")


if __name__ == "__main__":
    main()
