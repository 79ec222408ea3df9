"""The YCSB core workloads A to D and F, from their published definition.

    records     "user" and the FNV hash of a number; ten fields of 100 bytes each
    A           half reads, half updates           keys: scrambled Zipf, constant 0.99
    B           95 % reads, 5 % updates            the same
    C           reads                              the same
    D           95 % reads, 5 % inserts            keys: the latest are read most
    F           half reads, half read-modify-writes   as A

A read is of all fields; an update and a modification write one field. E, which scans ranges of
keys, is not among them: keyed state is not in the order of its keys.

Run by bench_ycsb.py, in a process of its own for each store and round:

    python benchmarks/ycsb.py STORE BUDGET_BYTES OPERATIONS

with records of four times the budget. Prints JSON: ns per operation of each workload, and how far
resident memory grew, with what the accesses take. Files are on disk; the page cache of the system,
which nobody pays for, is the same for all. lmdb is not here: its memory is the page cache.
"""

import ctypes
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from beyond_memory import memory_figure, tuned_rocksdict
from msgpack import packb
from replay import Slate, Store, of_provider, of_rocksdict

import statekit as sk

READ, UPDATE, INSERT, MODIFY = range(4)
FIELDS = [f"field{i}" for i in range(10)]
FIELD_BYTES = 100
RECORD_BYTES = 1100  # packed
ZIPF = 0.99
TIMES_BUDGET = 4
# The share of what is not a read, and what it is. D is last, because it adds records.
WORKLOADS = {"A": (0.5, UPDATE), "B": (0.05, UPDATE), "C": (0.0, UPDATE), "F": (0.5, MODIFY),
    "D": (0.05, INSERT)}  # fmt: skip
_STEP = 10_000  # drawn at a time
_LOADED = 1_000  # records written at a time

_noise = np.random.default_rng(1).bytes(1 << 20)


def key_of(number: int) -> str:
    code = 0xCBF29CE484222325
    for byte in number.to_bytes(8, "little"):
        code = (code ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"user{code}"


def field_of(number: int) -> bytes:
    at = number * 997 % (len(_noise) - FIELD_BYTES)
    return _noise[at : at + FIELD_BYTES]


def record_of(number: int) -> dict[str, bytes]:
    return {name: field_of(10 * number + i) for i, name in enumerate(FIELDS)}


class Trace:
    """Endless accesses of one workload: (operation, key, value). For an update or a modification
    the value is (field, its bytes), for an insert the record."""

    def __init__(self, workload: str, keys: list[str], seed: int) -> None:
        self._writes, self._operation = WORKLOADS[workload]
        self._latest = workload == "D"
        self._keys = keys
        self._random = np.random.default_rng(seed)
        self._cumulated = np.cumsum(1 / np.arange(1, len(keys) + 1) ** ZIPF)
        self._scattered = np.random.default_rng(0).permutation(len(keys))

    def __iter__(self) -> Iterator[tuple[int, str, Any]]:
        keys, random = list(self._keys), self._random
        while True:
            drawn = random.random(_STEP) * self._cumulated[-1]
            ranks = np.searchsorted(self._cumulated, drawn)
            if not self._latest:
                ranks = self._scattered[ranks]
            writes = random.random(_STEP) < self._writes
            fields = random.integers(0, len(FIELDS), _STEP)
            for at, rank in enumerate(ranks.tolist()):
                if self._latest:
                    rank = len(keys) - 1 - rank
                key = str(keys[rank].encode(), "ascii")  # an object of its own
                if not writes[at]:
                    yield READ, key, None
                elif self._operation == INSERT:
                    number = len(keys)
                    keys.append(key_of(number))
                    yield INSERT, keys[-1], record_of(number)
                else:
                    field = FIELDS[fields[at]]
                    yield self._operation, key, (field, field_of(rank + at))


NATIVE_MAP = {
    READ: "x = s.copy(k)",
    UPDATE: "s[k][v[0]] = v[1]",
    INSERT: "s[k] = v",
    MODIFY: "x = s.copy(k); s[k][v[0]] = v[1]",
}


def whole(read: str, write: str, pack: str = "packb({})", unpack: str = "unpackb({})") -> Any:
    """For a store of whole records: to write one field is to write the record."""
    change = f"x = {unpack.format(read)}; x[v[0]] = v[1]; {write.format(pack.format('x'))}"
    return {
        READ: f"x = {unpack.format(read)}",
        UPDATE: change,
        INSERT: write.format(pack.format("v")),
        MODIFY: change,
    }


NATIVE_VALUE = whole("s[k]", "s[k] = {}", "{}", "{}")
# A dict may keep the records as they are, and then nothing is written back.
OBJECTS = {READ: "x = d[k]", UPDATE: "d[k][v[0]] = v[1]", INSERT: "d[k] = v",
    MODIFY: "x = d[k]; x[v[0]] = v[1]"}  # fmt: skip
ROCKS = whole("d[k.encode()]", "d[k.encode()] = {}")


def provider(name: str, url: str, is_map: bool) -> Store:
    kv = sk.open(url)
    if is_map:
        return of_provider(name, kv, NATIVE_MAP, {"s": kv.map("records", str, bytes)})
    return of_provider(name, kv, NATIVE_VALUE, {"s": kv.value("records", dict[str, bytes])})


def load(store: Store, keys: list[str]) -> None:
    """Writes the records: one a call, but for slatedb, where that would take minutes."""
    for first in range(0, len(keys), _LOADED):
        numbers = range(first, min(first + _LOADED, len(keys)))
        if isinstance(store, Slate):
            store.put_many([(keys[at].encode(), packb(record_of(at))) for at in numbers])
        else:
            store.replay([(INSERT, keys[at], record_of(at)) for at in numbers], store.begin())


# ---- Beyond memory


def _statekit(folder: str, budget: int, is_map: bool) -> Store:
    return provider("statekit", f"rocksdb:{folder}/state?memory={budget}&sync=0", is_map)


def _rocksdict(folder: str, budget: int) -> Store:
    return of_rocksdict(tuned_rocksdict(f"{folder}/state", budget), ROCKS)


def _sqlite(folder: str, budget: int) -> Store:
    db = sqlite3.connect(f"{folder}/state", isolation_level=None)
    db.executescript(
        f"PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; PRAGMA cache_size=-{budget // 1024};"
        "CREATE TABLE t (k TEXT PRIMARY KEY, v BLOB) WITHOUT ROWID"
    )
    read = 'execute("SELECT v FROM t WHERE k=?", (k,)).fetchone()[0]'
    write = 'execute("REPLACE INTO t VALUES (?, ?)", (k, {}))'

    def begin() -> dict[str, Any]:
        if db.in_transaction:
            db.execute("COMMIT")
        db.execute("BEGIN")
        return {"execute": db.execute}

    return Store("sqlite3", whole(read, write), begin, db.close)


def _slatedb(folder: str, budget: int) -> Store:
    return Slate(folder, whole(Slate.find, Slate.write), budget)


BEYOND: dict[str, Callable[[str, int], Store]] = {
    "statekit": lambda folder, budget: _statekit(folder, budget, False),
    "statekit, map": lambda folder, budget: _statekit(folder, budget, True),
    "rocksdict": _rocksdict,
    "sqlite3": _sqlite,
    "slatedb": _slatedb,
}


def main() -> None:
    name, budget, operations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    keys = [key_of(number) for number in range(TIMES_BUDGET * budget // RECORD_BYTES)]
    sk.open("memory:").value("warm", bytes)["k"] = b"v"
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_figure("VmRSS")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = BEYOND[name](folder, budget)
        operations //= store.share
        began = time.perf_counter()
        load(store, keys)
        figures["load s"] = time.perf_counter() - began
        growth = 0
        for workload in WORKLOADS:
            trace = iter(Trace(workload, keys, ord(workload)))
            for is_timed in (False, True):  # the first half warms caches up
                accesses = list(islice(trace, operations))
                names = store.begin()
                start = time.perf_counter_ns()
                store.replay(accesses, names)
                if is_timed:
                    figures[workload] = (time.perf_counter_ns() - start) / operations
                growth = max(growth, memory_figure("VmRSS") - before)
        figures["growth"] = growth
        store.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
