"""What a miss costs: a key that is not there, and an entry that is at home and not in memory.

    python benchmarks/bench_misses.py [--quick]

Writes results/misses.json. Contenders take turns. Every entry at home is read once: a second time
it would be in memory. Against it stands RocksDB's own get of as many other rows of that home.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from compare import Contender, Report, Row, measure, medians, ratio

import statekit as sk

KEYS = 1000  # in memory: they stay in the caches of the processor
KEYS_AT_HOME = 5000  # of one turn
ROUNDS_AT_HOME = 11
US_MAX = 4.0


def here(report: Report, count: int, rounds: int) -> None:
    """Questions about keys that are missing, in memory, against the get of a number."""
    kv = sk.open("memory:")
    numbers, lists = kv.value("numbers", int, default=0), kv.list("lists", int)
    there = [f"user-{i:07d}" for i in range(KEYS)]
    missing = [f"none-{i:07d}" for i in range(KEYS)]
    for number, key in enumerate(there):
        numbers[key] = number
        lists[key] = [number, number + 1]

    def each(call: Callable[[str], Any], keys: list[str]) -> Callable[[Any], None]:
        def run(_: Any) -> None:
            for _ in range(count):
                for key in keys:
                    call(key)

        return run

    cases = {
        "hit": each(numbers.__getitem__, there),
        "missing int with a default": each(numbers.__getitem__, missing),
        "in, of a key that is there": each(numbers.__contains__, there),
        "in, of a missing key": each(numbers.__contains__, missing),
        "discard of a missing key": each(numbers.discard, missing),
        "list get": each(lists.get, there),
        "list get of a missing key": each(lists.get, missing),
    }
    found = measure(
        [Contender(name, run, count=count * KEYS) for name, run in cases.items()], rounds
    )
    for name in list(cases)[1:]:
        report.add(
            Row(
                f"{name}, vs the get of an int",
                ratio(found, name, "hit"),
                "x the time",
                1.5,
                at_most=True,
                figures={
                    f"{one} ns": ns for one, ns in medians(found).items() if one in (name, "hit")
                },
            )
        )
    kv.close()


def at_home(report: Report, rounds: int) -> None:
    """The first get of an entry after the home was opened, less RocksDB's get of such a row."""
    total = 2 * KEYS_AT_HOME * rounds
    keys = [f"user-{i:07d}" for i in range(total)]
    with tempfile.TemporaryDirectory() as folder:
        url = f"rocksdb:{folder}/home?memory=512MiB&sync=0"
        with sk.open(url) as kv:
            declared = _declare(kv)
            for number, key in enumerate(keys):
                for put, _ in declared.values():
                    put(key, number)
        random.Random(7).shuffle(keys)
        with sk.open(url) as kv:
            for name, (_, get) in _declare(kv).items():
                ours, bare = _turns(kv, name, get, keys, rounds)
                over = [a - b for a, b in zip(ours, bare, strict=True)]
                report.add(
                    Row(
                        f"{name} at home: time above RocksDB's own get",
                        statistics.median(over) / 1000,
                        " us",
                        US_MAX,
                        at_most=True,
                        figures={
                            "ours us": statistics.median(ours) / 1000,
                            "RocksDB us": statistics.median(bare) / 1000,
                        },
                    )
                )


def _declare(kv: Any) -> dict[str, tuple[Callable[[str, int], Any], Callable[[str], Any]]]:
    """How an entry of each state is put and got."""
    ints, texts = kv.value("an int", int), kv.value("100 bytes", bytes)
    maps, lists = kv.map("an element of a map", str, float), kv.list("an item of a list", int)
    fields = {f"field-{i}": float(i) for i in range(10)}
    return {
        "an int": (ints.__setitem__, ints.__getitem__),
        "100 bytes": (lambda key, number: texts.put(key, b"%100d" % number), texts.__getitem__),
        "an element of a map": (
            lambda key, _: maps.__setitem__(key, fields),
            lambda key: maps[key]["field-7"],
        ),
        "an item of a list": (
            lambda key, number: lists.__setitem__(key, [number] * 10),
            lambda key: lists[key][3],
        ),
    }


def _turns(
    kv: Any, name: str, get: Callable[[str], Any], keys: list[str], rounds: int
) -> tuple[list[float], list[float]]:
    """Nanoseconds of our get and of RocksDB's, by round. No key is asked for twice."""
    raw = kv[name]._raw
    residence = kv._residence
    number, home = residence.numbers[name], residence.ledger.home
    db, prefixes = home._db, home._prefixes
    starts = range(0, len(keys), KEYS_AT_HOME)
    parts = iter([keys[start : start + KEYS_AT_HOME] for start in starts])

    def names() -> list[bytes]:
        encoded = [raw.codec.encode(key) for key in next(parts)]
        return [prefixes[raw.leaf_of_encoded(key) << 16 | number] + key for key in encoded]

    def ours(some: list[str]) -> None:
        for key in some:
            get(key)

    def bare(some: list[bytes]) -> None:
        ask = db.get
        for row in some:
            ask(row)

    found = measure(
        [
            Contender("ours", ours, lambda: next(parts), KEYS_AT_HOME),
            Contender("bare", bare, names, KEYS_AT_HOME),
        ],
        rounds,
    )
    return found["ours"], found["bare"]


def main() -> None:
    is_quick = "--quick" in sys.argv[1:]
    report = Report("misses_quick" if is_quick else "misses")
    here(report, 5 if is_quick else 20, 9 if is_quick else 51)
    at_home(report, 5 if is_quick else ROUNDS_AT_HOME)
    report.write()


if __name__ == "__main__":
    main()
