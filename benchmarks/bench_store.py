"""The native store against what it replaces: dict, Arrow, pickle, RocksDB and LMDB.

Prints one line per figure that the project promises, and writes results/store.json and
results/store_growth.png. `--only WORD` runs the parts with the word in their name, without JSON.
"""

import argparse
import contextlib
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from compare import RESULTS, Contender, Report, Row, measure, medians, ratio
from rocksdict import Options, Rdict

import statekit as sk

ROUNDS = 7


def user_keys(ids: Any) -> list[str]:
    return [f"user-{i:07d}" for i in ids]


def counts_state(kind: str = "i64", key_type: Any = str) -> Any:
    return sk.Store().state("counts", kind, key_type)


def dict_loop(keys: list[Any]) -> dict[Any, int]:
    counts: dict[Any, int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return counts


def million() -> tuple[sk.Store, Any]:
    """A store with a million counters under 12-byte keys."""
    store = sk.Store()
    state = store.state("counts", "i64")
    state.put_many(pa.array(user_keys(range(1_000_000))), np.arange(1_000_000))
    return store, state


# ---- Batches


def add_many_strings(report: Report) -> None:
    rng = np.random.default_rng(1)
    keys = user_keys(rng.integers(0, 200_000, 2_000_000))
    column = pa.array(keys)
    n = len(keys)
    times = measure(
        [
            Contender("add_many", lambda state: state.add_many(column), counts_state, n),
            Contender("dict", lambda _: dict_loop(keys), count=n),
            Contender("value_counts", lambda _: pc.value_counts(column), count=n),
        ],
        ROUNDS,
    )
    figures = {f"{name} ns": value for name, value in medians(times).items()}
    what = "add_many, 2 M strings over 200 k keys"
    report.add(
        Row(f"{what}, vs a dict loop", ratio(times, "dict", "add_many"), "x", 8, False, figures)
    )
    vs = ratio(times, "value_counts", "add_many")
    report.add(Row(f"{what}, vs Arrow's value_counts", vs, "x", 3, False, figures))


def add_many_integers(report: Report) -> None:
    keys = np.unique(np.random.default_rng(2).integers(0, 1 << 62, 10_000_000))
    np.random.default_rng(3).shuffle(keys)
    as_list = keys.tolist()
    n = len(keys)
    times = measure(
        [
            Contender("add_many", lambda s: s.add_many(keys), lambda: counts_state("i64", int), n),
            Contender("dict", lambda _: dict_loop(as_list), count=n),
        ],
        3,
    )
    figures = {f"{name} ns": value for name, value in medians(times).items()}
    value = ratio(times, "dict", "add_many")
    report.add(
        Row("add_many, 10 M distinct integers, vs a dict loop", value, "x", 4, False, figures)
    )


# ---- Single keys


@contextlib.contextmanager
def stores_on_disk(entries: list[tuple[bytes, bytes]]) -> Iterator[tuple[Rdict, lmdb.Environment]]:
    with tempfile.TemporaryDirectory() as folder:
        rocks = Rdict(f"{folder}/rocks", Options(raw_mode=True))
        env = lmdb.open(f"{folder}/lmdb", map_size=1 << 30)
        with env.begin(write=True) as txn:
            for key, value in entries:
                rocks[key] = value
                txn.put(key, value)
        rocks.flush()
        yield rocks, env
        rocks.close()
        env.close()


def get_each(get: Callable[[bytes], Any], keys: list[bytes]) -> None:
    for key in keys:
        get(key)


def put_each(put: Callable[[bytes, bytes], Any], pairs: list[tuple[bytes, bytes]]) -> None:
    for key, value in pairs:
        put(key, value)


def get_and_put_bytes(report: Report) -> None:
    """A million values of 100 bytes; 50,000 of them, drawn at random, are read and replaced."""
    rng = np.random.default_rng(4)
    entries = [(key.encode(), rng.bytes(100)) for key in user_keys(range(1_000_000))]
    drawn = rng.permutation(len(entries))[:50_000].tolist()
    keys = [f"user-{i:07d}".encode() for i in drawn]
    pairs = [(key, rng.bytes(100)) for key in keys]
    column, values = pa.array(keys), pa.array([value for _, value in pairs])
    state = sk.Store().state("values", "bytes", bytes)
    state.put_many([key for key, _ in entries], [value for _, value in entries])
    n = len(keys)
    with stores_on_disk(entries) as (rocks, env):
        txns: list[Any] = []

        def begin() -> Any:
            while txns:
                txns.pop().commit()
            txns.append(env.begin(write=True))
            return txns[0]

        gets = measure(
            [
                Contender("statekit", lambda _: get_each(state.get, keys), count=n),
                Contender("statekit batch", lambda _: state.get_many(column), count=n),
                Contender("rocksdict", lambda _: get_each(rocks.get, keys), count=n),
                Contender("rocksdict batch", lambda _: rocks.get(keys), count=n),
                Contender("lmdb", lambda txn: get_each(txn.get, keys), env.begin, n),
            ],
            ROUNDS,
        )
        puts = measure(
            [
                Contender("statekit", lambda _: put_each(state.put, pairs), count=n),
                Contender("statekit batch", lambda _: state.put_many(column, values), count=n),
                Contender("rocksdict", lambda _: put_each(rocks.put, pairs), count=n),
                Contender("lmdb", lambda txn: put_each(txn.put, pairs), begin, n),
            ],
            ROUNDS,
        )
        begin().commit()
    for verb, times, floor in (("get", gets, 3.0), ("put", puts, 8.0)):
        figures = {f"{name} ns": value for name, value in medians(times).items()}
        for ours, calls in (("statekit", "one key a call"), ("statekit batch", "in a batch")):
            what = f"{verb} of 100-byte values, {calls}"
            for theirs, name, least in (
                ("rocksdict", "rocksdict (raw, warm)", floor),
                ("lmdb", "lmdb (one transaction)", 1),
            ):
                value = ratio(times, theirs, ours)
                report.add(Row(f"{what}, vs {name}", value, "x", least, False, figures))


def append_and_put_in_large_containers(report: Report) -> None:
    store = sk.Store()
    packed = [b"\xcd\x30" + bytes([i % 256]) for i in range(1000)]  # integers of two bytes
    lists, maps = store.state("lists", "list"), store.state("maps", "map")
    small = [f"small-{i}" for i in range(1000)]
    ten = b"\x9a" + b"".join(packed[:10])
    ten_entries = b"\x8a" + b"".join(bytes([i]) + b"\x01" for i in range(10))
    lists.append_many(["large"] * 1_000_000, np.arange(1_000_000))
    maps.map_put_many(["large"] * 1_000_000, np.arange(1_000_000), np.arange(1_000_000))

    def refill() -> None:
        for key in small:
            lists.put(key, ten)
            maps.put(key, ten_entries)

    fresh = iter(range(1_000_000, 1 << 40))

    def append_small(_: Any) -> None:
        for key in small:
            lists.append(key, packed[0])

    def append_large(_: Any) -> None:
        for _ in small:
            lists.append("large", packed[0])

    def put_small(_: Any) -> None:
        for key in small:
            maps.set(key, (99,), b"\x02")

    def put_large(_: Any) -> None:
        for _ in small:
            maps.set("large", (next(fresh),), b"\x02")

    for what, in_small, in_large in (
        ("append to a list of 1 M elements, vs of 10", append_small, append_large),
        ("put into a map of 1 M entries, vs of 10", put_small, put_large),
    ):
        times = measure(
            [Contender("10", in_small, refill, 1000), Contender("1 M", in_large, count=1000)],
            5 * ROUNDS,
        )
        figures = {f"{name} ns": value for name, value in medians(times).items()}
        report.add(Row(what, ratio(times, "1 M", "10"), "x the time", 2, True, figures))


# ---- Memory

_MEMORY = """
import sys
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
n = 1_000_000
if sys.argv[1] == "statekit":
    import numpy, pyarrow, statekit
    state = statekit.Store().state("counts", "i64")
    state.add_many(["warm"])
    before = resident()
    for first in range(0, n, 10_000):
        state.add_many([f"user-{i:07d}" for i in range(first, first + 10_000)])
else:
    before = resident()
    state = {f"user-{i:07d}": i + 1_000_000 for i in range(n)}
print((resident() - before) / n)
"""


def memory(report: Report) -> None:
    def bytes_per_entry(what: str) -> float:
        command = [sys.executable, "-c", _MEMORY, what]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    ours, theirs = bytes_per_entry("statekit"), bytes_per_entry("dict")
    figures = {"statekit B": ours, "dict B": theirs}
    what = "resident memory per entry, 1 M of a 12-byte key and a counter"
    report.add(Row(what, ours, " B", 64, True, figures))
    report.add(Row(f"{what}, vs a dict", ours / theirs, "x", 0.5, True, figures))


# ---- Leaves and snapshots


def detach_and_attach(report: Report) -> None:
    store, state = million()
    half = store.leaves // 2
    scanned = [key.decode() for key, _ in store.scan(state, 0, half)]
    keys, values = pa.array(scanned), np.ones(len(scanned), dtype=np.int64)

    def move(_: Any) -> None:
        for _ in range(10):
            store.attach(store.detach(0, half))

    times = measure(
        [
            Contender("detach + attach", move, count=10),
            Contender("put_many", lambda state: state.put_many(keys, values), counts_state),
        ],
        3 * ROUNDS,
    )
    figures = {f"{name} us": value / 1000 for name, value in medians(times).items()}
    value = ratio(times, "put_many", "detach + attach")
    what = "detach and attach half of 1 M keys, vs re-inserting them with put_many"
    report.add(Row(what, value, "x", 500, False, figures))


def taking_snapshots(report: Report) -> None:
    def take(store: sk.Store) -> float:
        took = []
        for _ in range(200):
            began = time.perf_counter_ns()
            snapshot = store.snapshot()
            took.append(time.perf_counter_ns() - began)
            snapshot.close()
        return statistics.median(took) / 1000

    large, _ = million()
    small = sk.Store()
    small.state("counts", "i64").put_many(user_keys(range(10_000)), list(range(10_000)))
    pairs = [(take(small), take(large)) for _ in range(ROUNDS)]
    figures = {
        "10 k us": statistics.median(pair[0] for pair in pairs),
        "1 M us": statistics.median(pair[1] for pair in pairs),
    }
    value = statistics.median(b / a for a, b in pairs)
    what = "taking a snapshot at 1 M keys"
    report.add(Row(f"{what}, vs at 10 k", value, "x the time", 3, True, figures))
    report.add(Row(what, figures["1 M us"], " us", 100, True, figures))


def longest_put_beside_a_snapshot(report: Report) -> None:
    # 64 leaves instead of 2,048: a leaf's encoding must stand out against the 10 to 100 us for
    # which this shared machine takes the processor away now and then.
    store = sk.Store(key_groups=16, subgroups=4)
    state = store.state("counts", "i64")
    keys = user_keys(range(1_000_000))
    state.put_many(pa.array(keys), np.zeros(len(keys), dtype=np.int64))
    sample = [keys[i] for i in np.random.default_rng(4).integers(0, len(keys), 40_000)]

    def largest_encoding() -> int:
        took = []
        for leaf in range(store.leaves):
            began = time.perf_counter_ns()
            store.encode_leaf(leaf)
            took.append(time.perf_counter_ns() - began)
        return max(took)

    def longest_put() -> int:
        longest = 0
        with store.snapshot() as snapshot:
            reader = threading.Thread(target=lambda: sum(len(data) for _, data in snapshot))
            reader.start()
            for key in sample:
                began = time.perf_counter_ns()
                state.put(key, 1)
                longest = max(longest, time.perf_counter_ns() - began)
            reader.join()
        return longest

    pairs = [(largest_encoding(), longest_put()) for _ in range(2 * ROUNDS)]
    figures = {
        "encoding us": statistics.median(pair[0] for pair in pairs) / 1000,
        "longest put us": statistics.median(pair[1] for pair in pairs) / 1000,
    }
    value = statistics.median(b / a for a, b in pairs)
    what = "longest put while a snapshot is written, vs encoding the largest leaf"
    report.add(Row(what, value, "x the time", 3, True, figures))


def encode_and_decode(report: Report) -> None:
    store, state = million()
    as_dict = {key.decode(): value for key, value in store.scan(state)}
    blocks = [store.encode_leaf(leaf) for leaf in range(store.leaves)]
    pickled = pickle.dumps(as_dict)

    def encode(_: Any) -> None:
        for leaf in range(store.leaves):
            store.encode_leaf(leaf)

    def decode(target: sk.Store) -> None:
        for leaf, data in enumerate(blocks):
            target.decode_leaf(leaf, data)

    encoding = measure(
        [Contender("encode", encode), Contender("pickle.dumps", lambda _: pickle.dumps(as_dict))],
        ROUNDS,
    )
    decoding = measure(
        [
            Contender("decode", decode, sk.Store),
            Contender("pickle.loads", lambda _: pickle.loads(pickled)),
        ],
        ROUNDS,
    )
    for times, ours, theirs in (
        (encoding, "encode", "pickle.dumps"),
        (decoding, "decode", "pickle.loads"),
    ):
        figures = {f"{name} ms": value / 1e6 for name, value in medians(times).items()}
        value = ratio(times, theirs, ours)
        what = f"{ours} all leaves, 1 M entries, vs {theirs} of the same dict"
        report.add(Row(what, value, "x", 3, False, figures))


# ---- How cost grows


def growth(report: Report) -> None:
    """Nanoseconds per record of add_many and of a dict loop, from 10 k to 10 M keys."""
    sizes = [10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000]
    rng = np.random.default_rng(5)
    series: dict[str, list[float]] = {"add_many, new keys": [], "add_many": [], "dict": []}
    for size in sizes:
        every = rng.permutation(size) * 7919
        drawn = rng.choice(every, 1_000_000)
        state = counts_state("i64", int)
        counts = dict.fromkeys(every.tolist(), 1)
        as_list = drawn.tolist()

        def loop(_: Any, counts: dict[int, int] = counts, as_list: list[int] = as_list) -> None:
            for key in as_list:
                counts[key] = counts.get(key, 0) + 1

        began = time.perf_counter_ns()
        state.add_many(every)
        series["add_many, new keys"].append((time.perf_counter_ns() - began) / size)
        times = measure(
            [
                Contender("add_many", lambda _, s=state, d=drawn: s.add_many(d), count=len(drawn)),
                Contender("dict", loop, count=len(drawn)),
            ],
            5,
        )
        for name, value in medians(times).items():
            series[name].append(value)
        print(
            f"     {size:>10,} keys: " + ", ".join(f"{k} {v[-1]:.0f} ns" for k, v in series.items())
        )
    report.series["growth"] = {"keys": sizes, "ns per record": series}
    plot_growth(sizes, series)


def plot_growth(sizes: list[int], series: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=150)
    styles = {
        "add_many, new keys": ("#9ecae1", "--"),
        "add_many": ("#08519c", "-"),
        "dict": ("#d95f0e", "-"),
    }
    labels = {
        "add_many, new keys": "statekit add_many, inserting",
        "add_many": "statekit add_many, counting",
        "dict": "dict loop, counting",
    }
    for name, values in series.items():
        color, line = styles[name]
        axes.plot(sizes, values, line, marker="o", markersize=4, color=color, label=labels[name])
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("distinct integer keys in the state")
    axes.set_ylabel("ns per record")
    axes.set_title("Cost of counting one record as the state grows", loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    path = RESULTS / "store_growth.png"
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(path)
    print(f"     plot written to {path}")


PARTS = [
    add_many_strings,
    add_many_integers,
    get_and_put_bytes,
    memory,
    append_and_put_in_large_containers,
    detach_and_attach,
    taking_snapshots,
    longest_put_beside_a_snapshot,
    encode_and_decode,
    growth,
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD")
    only = parser.parse_args().only
    report = Report("store")
    for part in PARTS:
        if only in part.__name__:
            part(report)
    if not only:
        report.write()


if __name__ == "__main__":
    main()
