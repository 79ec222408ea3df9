"""Typed state against dict, msgpack, RocksDB, LMDB and SQLite: five types, four questions.

    python benchmarks/bench_state_types.py [--quick] [--only WORD]
        what is promised beside what was measured; writes results/state_types.json and .png.
        --quick: small sizes, into state_types_quick.json and .png. --only: the parts with the word
        in their name; the other results stay as they were.
    pytest benchmarks/bench_state_types.py --benchmark-only
        every operation of every contender, grouped; STATEKIT_BENCH_KEYS sets the number of keys.

The four questions, for each type of state: updates, queries, repartitioning (split the keys into
two halves and merge them) and checkpoint encoding (all of it as bytes). The contenders are in
contenders.py, state that is larger than memory in beyond_memory.py.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from compare import Contender, Report, Row, measure, medians, ratio
from contenders import (
    DATACLASS_FORMS,
    KEEPERS,
    OPERATIONS,
    STATE_TYPES,
    Keeper,
    PackedDict,
    Profile,
    Statekit,
    StateType,
    fresh_entries,
    make_profile,
    scratch_folder,
    user_keys,
)
from msgpack import packb, unpackb
from plot_state_types import plot

import statekit as sk

Times = dict[str, list[float]]
_OF_ALL = ("split+merge", "encode")  # done on all entries; other operations are about one key


@dataclass(frozen=True)
class Sizes:
    keys: int = 100_000
    sample: int = 10_000  # how many keys, drawn at random, are used in a round
    rounds: int = 7
    batch: int = 1_000_000
    moved: int = 1_000_000
    budget: int = 64 << 20
    beyond_operations: int = 300_000
    beyond_rounds: int = 3


QUICK = Sizes(5_000, 2_000, 3, 100_000, 50_000, 32 << 20, 50_000, 1)


def say(what: str) -> None:
    print(f"     measuring {what} ...", flush=True)


def in_ns(times: Times) -> dict[str, float]:
    return {f"{name} ns": value for name, value in medians(times).items()}


def compared(report: Report, what: str, value: float) -> None:
    """A ratio of times about which nothing is promised."""
    report.series.setdefault("for comparison, x the time", {})[what] = value
    print(f"     {what}: {value:.3g}x the time", flush=True)


# ---- The four questions


def sample_ids(keys: int, sample: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(1).permutation(keys)[:sample].tolist()
    return drawn


def contender_for(
    keeper: Keeper, operation: str, ids: list[int], name: str | None = None
) -> Contender | None:
    """The operation on each of the ids, or on all entries; None if the type does not have it."""
    name = name or keeper.name
    if operation in _OF_ALL:
        whole = keeper.split_and_merge if operation == "split+merge" else keeper.encode
        return Contender(name, lambda _: whole())
    if keeper.statement(operation) is None:
        return None
    pairs = list(fresh_entries(keeper.of, ids))
    writes = operation in ("set", "update")

    def prepare() -> dict[str, Any]:
        if operation == "update":  # undoes the changes of the last round
            before = list(fresh_entries(keeper.of, ids)) if keeper.keeps_objects else pairs
            keeper.run("set", before, keeper.begin(True))
        return keeper.begin(writes)

    return Contender(name, lambda names: keeper.run(operation, pairs, names), prepare, len(ids))


def four_questions(report: Report, sizes: Sizes) -> None:
    table = report.series.setdefault("ns per key", {})
    ids = sample_ids(sizes.keys, sizes.sample)
    for of in STATE_TYPES:
        with scratch_folder() as folder:
            keepers = [keeper(of, folder) for keeper in KEEPERS]
            say(f"{of.name}: loading {sizes.keys:,} keys")
            for keeper in keepers:
                keeper.load(fresh_entries(of, range(sizes.keys)))
            gc.freeze()  # else each round's garbage collection goes over a million objects of dict
            for operation in (*OPERATIONS, *_OF_ALL):
                found = [contender_for(keeper, operation, ids) for keeper in keepers]
                contenders = [contender for contender in found if contender is not None]
                if not contenders:
                    continue
                say(f"{of.name}: {operation}")
                if operation in _OF_ALL:
                    for contender in contenders:
                        contender.count = sizes.keys
                measure(contenders, 1)  # warm
                rounds = 3 if operation in _OF_ALL else sizes.rounds
                times = measure(contenders, rounds)
                table.setdefault(of.name, {})[operation] = medians(times)
                promises_of(report, of, operation, times)
            for keeper in keepers:
                keeper.close()
            gc.unfreeze()


def promises_of(report: Report, of: StateType, operation: str, times: Times) -> None:
    """Adds the rows of one operation on one type."""
    figures = in_ns(times)
    if of.name == "value int" and operation in ("get", "set", "update"):
        verb = "add" if operation == "update" else operation
        value = ratio(times, "statekit", "dict + msgpack")
        what = f"value int: {verb}, vs dict + msgpack"
        report.add(Row(what, value, "x the time", 2, True, figures))
    if operation not in ("get", "set"):
        return
    value = ratio(times, "lmdb", "statekit")
    report.add(Row(f"{of.name}: {operation}, vs lmdb + msgpack", value, "x", 1, False, figures))
    rocks = ("rocksdict raw", "rocksdict pickled")
    value = min(ratio(times, name, "statekit") for name in rocks)
    what = f"{of.name}: {operation}, vs rocksdict (its faster mode)"
    report.add(Row(what, value, "x", 3, False, figures))


def dataclass_forms(report: Report, sizes: Sizes) -> None:
    """A dataclass against each way to keep it with msgpack.

    The promise is about the map of fields: like statekit's form it names the fields, so a class may
    gain, lose and reorder them. An array is shorter and faster, but does not allow that.
    """
    of = STATE_TYPES[1]
    ids = sample_ids(sizes.keys, sizes.sample)
    keepers: dict[str, Keeper] = {"statekit": Statekit(of, ""), "map": PackedDict(of, "")}
    keepers |= {form: PackedDict(variant, "") for form, variant in DATACLASS_FORMS.items()}
    for keeper in keepers.values():
        keeper.load(fresh_entries(of, range(sizes.keys)))
    for operation in ("get", "set"):
        say(f"value dataclass: {operation}, forms of msgpack")
        found = (contender_for(keepers[name], operation, ids, name) for name in keepers)
        contenders = [contender for contender in found if contender is not None]
        measure(contenders, 1)
        times = measure(contenders, sizes.rounds)
        what = f"value dataclass: {operation}, vs dict + msgpack as"
        value = ratio(times, "statekit", "map")
        report.add(Row(f"{what} map", value, "x the time", 1, True, in_ns(times)))
        for form in DATACLASS_FORMS:
            compared(report, f"{what} {form}", ratio(times, "statekit", form))
    keepers["statekit"].close()


# ---- Large containers


def large_containers(report: Report, sizes: Sizes) -> None:
    """One small change in a large value, against decoding it, changing it and encoding it."""
    kv = sk.open("memory:")
    lists, maps = kv.list("lists", int), kv.map("maps", str, int)
    trees = kv.state("trees", dict[str, dict[str, list[Profile]]])
    numbers = list(range(10_000))
    entries = {f"field-{i}": i for i in numbers}
    profiles = [make_profile(i) for i in range(12_000)]
    tree = {"a": {f"b{b}": profiles[b::10] for b in range(10)}}
    lists["k"], maps["k"], trees["k"] = numbers, entries, tree
    packed: dict[str, bytes] = {
        "list": packb(numbers),
        "map": packb(entries),
        "tree": packb(tree, default=vars),
    }
    fresh = iter(user_keys(range(10_000_000)))
    profile = make_profile(7)
    assert len(packed["tree"]) > 1_000_000

    def again(what: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
        def run(_: Any) -> None:
            value = unpackb(packed[what])
            change(value)
            packed[what] = packb(value)

        return run

    def repeat(call: Callable[[], Any]) -> Callable[[Any], None]:
        def run(_: Any) -> None:
            for _ in range(500):
                call()

        return run

    for what, ours, theirs in (
        (
            "append to a list of 10 k elements",
            lambda: lists["k"].append(7),
            again("list", lambda value: value.append(7)),
        ),
        (
            "put into a map of 10 k entries",
            lambda: maps["k"].__setitem__(next(fresh), 7),
            again("map", lambda value: value.__setitem__(next(fresh), 7)),
        ),
        (
            "append at depth 3 of a nested value of 1 MB",
            lambda: trees["k"]["a"]["b3"].append(profile),
            again("tree", lambda value: value["a"]["b3"].append(vars(profile))),
        ),
    ):
        say(what)
        contenders = [
            Contender("statekit", repeat(ours), count=500),
            Contender("decode, change, encode", theirs),
        ]
        times = measure(contenders, 2 * sizes.rounds)
        value = ratio(times, "decode, change, encode", "statekit")
        report.add(Row(f"{what}, vs msgpack of it all", value, "x", 200, False, in_ns(times)))
    kv.close()


# ---- Batches


def batches(report: Report, sizes: Sizes) -> None:
    """Arrow keys against every quick way to do the same with a dict.

    The dict gets its keys as a list of str for free. Each round has new str objects, as in a
    stream. For comparison, there are also objects whose hashes were computed in an earlier round.
    """
    n = sizes.batch
    names = user_keys(np.random.default_rng(2).permutation(n).tolist())
    column, numbers = pa.array(names), np.arange(n)
    as_list = numbers.tolist()
    state = sk.open("memory:").value("counts", int)
    state.put_many(column, numbers)
    counts = Counter(dict(zip(column.to_pylist(), as_list, strict=True)))

    def add_loop(keys: list[str]) -> None:
        for key in keys:
            counts[key] += 1

    def put_loop(keys: list[str]) -> None:
        for key, value in zip(keys, as_list, strict=True):
            counts[key] = value

    ways: dict[str, tuple[float, Callable[[Any], Any], dict[str, Callable[[Any], Any]]]] = {
        "add_many": (
            8,
            lambda _: state.add_many(column),
            {"loop": add_loop, "Counter.update": counts.update},
        ),
        "get_many": (
            4,
            lambda _: state.get_many(column),
            {
                "comprehension": lambda keys: [counts[key] for key in keys],
                "map": lambda keys: list(map(counts.get, keys)),
            },
        ),
        "put_many": (
            4,
            lambda _: state.put_many(column, numbers),
            {"loop": put_loop, "dict.update": lambda keys: dict.update(counts, zip(keys, as_list))},  # noqa: B905
        ),
    }
    for batch, (floor, ours, rivals) in ways.items():
        say(f"{batch} of {n:,} Arrow strings")
        contenders = [Contender(batch, ours, count=n)]
        for name, run in rivals.items():
            contenders.append(Contender(name, run, column.to_pylist, n))
            contenders.append(Contender(f"{name}, hashed", run, lambda: names, n))
        times = measure(contenders, sizes.rounds)
        for suffix, of in (("", "of new strings"), (", hashed", "of strings hashed before")):
            value = min(ratio(times, f"{name}{suffix}", batch) for name in rivals)
            what = f"{batch}, {n:,} Arrow strings, vs the fastest way with a dict {of}"
            report.add(Row(what, value, "x", floor, False, in_ns(times)))


# ---- Larger than memory


def beyond_memory(report: Report, sizes: Sizes) -> None:
    """Runs beyond_memory.py in a process for each contender, in turns."""
    runs: dict[str, list[dict[str, float]]] = {"statekit": [], "rocksdict": []}
    for at in range(sizes.beyond_rounds):
        for name, found in runs.items():
            say(f"larger than memory: {name}, round {at + 1} of {sizes.beyond_rounds}")
            script = Path(__file__).with_name("beyond_memory.py")
            sized = [str(sizes.budget), str(sizes.beyond_operations)]
            command = [sys.executable, str(script), name, *sized]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout))
    report.series["larger than memory"] = runs
    times = {name: [run["ns"] for run in found] for name, found in runs.items()}
    shown = f"{sizes.budget >> 20} MiB"
    what = f"rocksdb: home, {shown} for four times as much, Zipf 1.0 read-modify-write of 100 B"
    value = ratio(times, "rocksdict", "statekit")
    report.add(Row(f"{what}, vs rocksdict", value, "x", 3, False, in_ns(times)))
    growth = {
        f"{name} {which} MiB": statistics.median(run[which] for run in found) / 2**20
        for name, found in runs.items()
        for which in ("growth", "growth in all")
    }
    value = max(run["growth"] for run in runs["statekit"]) / sizes.budget
    what = f"resident memory of the same, vs the {shown} it was given"
    report.add(Row(what, value, "x", 1.3, True, growth))


# ---- Splitting and merging


def one_by_one(source: Any, halves: list[Any], entries: int) -> None:
    """Moves some entries of a state into two others and back, one by one."""
    for key, value in islice(source.items(), entries):
        halves[hash(key) & 1][key] = value
    for half in halves:
        for key, value in half.items():
            source[key] = value


def split_and_merge(report: Report, sizes: Sizes) -> None:
    """Moving entries one by one is measured with a fiftieth of the keys, and scaled."""
    n = sizes.moved
    sample = n // 50
    for of in STATE_TYPES:
        say(f"split and merge: {of.name}, loading {n:,} keys")
        keeper = Statekit(of, "")
        for first in range(0, n, 50_000):
            ids = range(first, min(first + 50_000, n))
            keeper.state.put_many(pa.array(user_keys(ids)), [of.make(i) for i in ids])

        def move(halves: list[Any], source: Any = keeper.state) -> None:
            one_by_one(source, halves, sample)

        def two_empty(of: StateType = of) -> list[Any]:
            return [of.declare(sk.open("memory:")) for _ in range(2)]

        contenders = [
            Contender("split and merge", lambda _, keeper=keeper: keeper.split_and_merge()),
            Contender("one by one", move, two_empty, sample),
        ]
        times = measure(contenders, sizes.rounds)
        times["one by one"] = [per_entry * n for per_entry in times["one by one"]]
        figures = {f"{name} ms": value / 1e6 for name, value in medians(times).items()}
        value = ratio(times, "one by one", "split and merge")
        what = f"{of.name}: split {n:,} keys in two and merge them, vs one by one (scaled)"
        report.add(Row(what, value, "x", 500, False, figures))
        keeper.close()


# ---- With pytest-benchmark


@pytest.fixture(scope="module")
def keepers() -> Iterator[Callable[[StateType, type[Keeper]], Keeper]]:
    """Loaded contenders, each made once; only those of one type of state at a time."""
    n = int(os.environ.get("STATEKIT_BENCH_KEYS", Sizes.keys))
    made: dict[type[Keeper], Keeper] = {}

    def find(of: StateType, kind: type[Keeper]) -> Keeper:
        if any(keeper.of is not of for keeper in made.values()):
            close_all()
        if kind not in made:
            made[kind] = kind(of, folder)
            made[kind].load(fresh_entries(of, range(n)))
        return made[kind]

    def close_all() -> None:
        while made:
            made.popitem()[1].close()

    with scratch_folder() as folder:
        yield find
        close_all()


@pytest.mark.parametrize("kind", KEEPERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("operation", [*OPERATIONS, *_OF_ALL])
@pytest.mark.parametrize("of", STATE_TYPES, ids=lambda of: of.name)
def test_state_type(
    of: StateType, operation: str, kind: type[Keeper], keepers: Any, benchmark: Any
) -> None:
    keeper = keepers(of, kind)
    ids = sample_ids(keeper.keys, min(keeper.keys, 1_000))
    contender = contender_for(keeper, operation, ids)
    if contender is None:
        pytest.skip("a value of this type has no parts")
    whole = operation in _OF_ALL
    per = f"{keeper.keys:,} keys" if whole else f"{len(ids):,} operations"
    benchmark.group = f"{of.name}: {operation}, {per}"

    def setup() -> tuple[tuple[Any], dict[str, Any]]:
        return (contender.prepare(),), {}

    benchmark.pedantic(
        contender.run, setup=setup, rounds=5 if whole else 20, warmup_rounds=1, iterations=1
    )


# ---- Reports


def print_promises(report: Report) -> None:
    print("\nPromised and measured\n")
    width = max(len(row.what) for row in report.rows)
    for row in report.rows:
        promised = f"{'at most' if row.at_most else 'at least'} {row.floor:g}x"
        verdict = "ok" if row.holds else "MISSED"
        print(f"{row.what:<{width}}  {promised:>14}  {row.value:>10,.2f}x  {verdict}")
    for what, value in report.series.get("for comparison, x the time", {}).items():
        print(f"{what:<{width}}  {'':>14}  {value:>10,.2f}x")


def print_questions(report: Report) -> None:
    print("\nNanoseconds per key\n")
    operations = (*OPERATIONS, *_OF_ALL)
    heads = ("get", "set", "update", "get a part", "split+merge", "encode")
    for name, found in report.series["ns per key"].items():
        print(f"{name:<20}" + "".join(f"{head:>13}" for head in heads))
        for keeper in KEEPERS:
            cells = (found.get(operation, {}).get(keeper.name) for operation in operations)
            shown = ("" if cell is None else f"{cell:,.0f}" for cell in cells)
            print(f"  {keeper.name:<18}" + "".join(f"{cell:>13}" for cell in shown))


PARTS = [
    four_questions,
    dataclass_forms,
    large_containers,
    batches,
    beyond_memory,
    split_and_merge,
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", metavar="WORD")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else Sizes()
    report = Report("state_types_quick" if arguments.quick else "state_types")
    report.series["sizes"] = asdict(sizes)
    began = time.perf_counter()
    for part in PARTS:
        if arguments.only in part.__name__:
            part(report, sizes)
    print_promises(report)
    if "ns per key" in report.series:
        print_questions(report)
    print(f"\n{time.perf_counter() - began:.0f} s")
    path = report.write(keep=bool(arguments.only))
    if "ns per key" in report.series:
        plot(report.series["ns per key"], sizes.keys, path)


if __name__ == "__main__":
    main()
