"""State of four times the memory budget, read and rewritten under Zipf keys.

Run by bench_state_types.py and bench_commits.py, in a process of its own for each contender and
round:

    python benchmarks/beyond_memory.py statekit|rocksdict BUDGET_BYTES OPERATIONS [COMMIT [TIMES]]

COMMIT: with sync=0 and a commit every COMMIT operations; 0 for no commits at all. TIMES: the size
of the state, in budgets, instead of four.

Prints JSON: ns per read-modify-write, and how far resident memory grew beyond its size after the
imports and the making of the keys: the maximum during the operations, and the maximum in all.
"""

import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow  # noqa: F401  (statekit imports it when it is first given a batch)
import rocksdict

import statekit as sk

KEY_BYTES, VALUE_BYTES = 12, 100
TIMES_BUDGET = 4
_CHUNK = 10_000
_WARM_TIMES = 10  # this many times the operations before measuring: then few keys are new
_STEP = 10_000  # operations between two looks at resident memory


def memory_figure(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def zipf_keys(entries: int, operations: int, seed: int) -> list[str]:
    """Keys with probability ~ 1 / rank; ranks are scattered over the keys."""
    cumulated = np.cumsum(1 / np.arange(1, entries + 1))
    drawn = np.random.default_rng(seed).random(operations) * cumulated[-1]
    scattered = np.random.default_rng(0).permutation(entries)
    return [f"user-{i:07d}" for i in scattered[np.searchsorted(cumulated, drawn)].tolist()]


def chunks(entries: int) -> Iterator[tuple[list[str], list[bytes]]]:
    rng = np.random.default_rng(1)
    for first in range(0, entries, _CHUNK):
        ids = range(first, min(first + _CHUNK, entries))
        noise = rng.bytes(VALUE_BYTES * len(ids))
        values = [noise[at : at + VALUE_BYTES] for at in range(0, len(noise), VALUE_BYTES)]
        yield [f"user-{i:07d}" for i in ids], values


Steps = tuple[Callable[[list[str], list[bytes]], Any], Callable[[list[str]], None], Any]


def open_statekit(path: str, budget: int) -> Steps:
    return _open_home(f"rocksdb:{path}?memory={budget}")


def _open_home(url: str) -> Steps:
    kv = sk.open(url)
    state = kv.value("values", bytes)

    def change(keys: list[str]) -> None:
        for key in keys:
            value = state[key]
            state[key] = value[8:] + value[:8]

    return state.put_many, change, kv


def open_committing(path: str, budget: int, every: int) -> Steps:
    put_many, change, kv = _open_home(f"rocksdb:{path}?memory={budget}&sync=0")

    def change_and_commit(keys: list[str]) -> None:
        for first in range(0, len(keys), every):
            change(keys[first : first + every])
            kv.commit({"offset": first})

    return put_many, change_and_commit if every else change, kv


def tuned_rocksdict(path: str, budget: int) -> Any:
    """RocksDB with the same memory for its block cache and write buffers, all in one cache.

    Tuned like the home of statekit: if filters and indexes are in one piece, they do not fit into a
    cache of this size, and a read takes five times as long.
    """
    cache = rocksdict.Cache(budget)
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    table.set_bloom_filter(10, False)
    table.set_partition_filters(True)
    table.set_index_type(rocksdict.BlockBasedIndexType.two_level_index_search())
    table.set_pin_top_level_index_and_filter(True)
    table.set_format_version(5)
    options = rocksdict.Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_manager(
        rocksdict.WriteBufferManager.new_write_buffer_manager_with_cache(budget // 4, False, cache)
    )
    options.set_write_buffer_size(budget // 8)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_max_background_jobs(2)
    return rocksdict.Rdict(path, options)


def open_rocksdict(path: str, budget: int) -> Steps:
    db = tuned_rocksdict(path, budget)

    def put_many(keys: list[str], values: list[bytes]) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in zip(keys, values, strict=True):
            batch.put(key.encode(), value)
        db.write(batch)

    def change(keys: list[str]) -> None:
        for key in keys:
            k = key.encode()
            value = db[k]
            db[k] = value[8:] + value[:8]

    return put_many, change, db


def main() -> None:
    name, budget, operations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    commit = int(sys.argv[4]) if len(sys.argv) > 4 else None
    times = float(sys.argv[5]) if len(sys.argv) > 5 else TIMES_BUDGET
    entries = int(times * budget) // (KEY_BYTES + VALUE_BYTES)
    warm = zipf_keys(entries, _WARM_TIMES * operations, 2)
    timed = zipf_keys(entries, operations, 3)
    sk.open("memory:").value("warm", bytes).put_many(["k"], [b"v"])
    ctypes.CDLL(None).malloc_trim(0)  # else growth would go unnoticed, in memory that was freed
    before = memory_figure("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/state"
        if commit is not None:
            put_many, change, handle = open_committing(path, budget, commit)
        else:
            opener = {"statekit": open_statekit, "rocksdict": open_rocksdict}[name]
            put_many, change, handle = opener(path, budget)
        began = time.perf_counter()
        for keys, values in chunks(entries):
            put_many(keys, values)
        loaded = time.perf_counter() - began
        change(warm)
        took = 0
        resident = memory_figure("VmRSS")
        for first in range(0, operations, _STEP):
            part = timed[first : first + _STEP]
            start = time.perf_counter_ns()
            change(part)
            took += time.perf_counter_ns() - start
            resident = max(resident, memory_figure("VmRSS"))
        began = time.perf_counter()
        handle.flush()
        flushed = time.perf_counter() - began
        figures = {
            "ns": took / operations,
            "entries": entries,
            "growth": resident - before,
            "growth in all": memory_figure("VmHWM") - before,
            "load s": loaded,
            "flush s": flushed,
        }
        handle.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
