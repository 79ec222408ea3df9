"""State of four times the memory budget comes into a RocksDB home, while it is written to.

    python benchmarks/arriving_memory.py [BUDGET_MIB [TIMES]]

It comes from another process (fetch_from) and from a checkpoint (restore(lazy=True)), each into a
process of its own. A thread writes all the time: it adds to counters, which is reading and writing,
and puts values without reading them. What is there afterwards is compared with arrays, key by key.

It measures memory and not time. Prints JSON, and writes it to benchmarks/results/arriving.json: how
far the resident memory of the process that takes the state over grew at most (VmHWM of the kernel,
so that no peak is missed) beyond what it was after the imports and the making of the arrays.
"""

import json
import multiprocessing
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc  # noqa: F401  (before anything is measured, as all that is imported when it is needed)
import numpy as np
import pyarrow as pa
import rocksdict  # noqa: F401
from beyond_memory import memory_figure

import statekit as sk
import statekit.homes.rocksdb
import statekit.remote.channel
import statekit.remote.server

VALUE_BYTES = 100
ENTRY_BYTES = VALUE_BYTES + 8  # of user data: a key is an int
BATCH, CHUNK = 50, 10_000  # a batch has keys of as many leaves
PROMISED_SHARE, PROMISED_BYTES = 1.3, 64 << 20
RESULTS = Path(__file__).parent / "results" / "arriving.json"
_SPAWN = multiprocessing.get_context("spawn")


def values_of(keys: np.ndarray, versions: np.ndarray) -> pa.Array:
    """The value of each key at its version: both numbers, and bytes that follow from them."""
    rows = np.empty((len(keys), VALUE_BYTES // 4), np.uint32)
    rows[:, 0], rows[:, 1] = keys, versions
    rows[:, 2:] = (keys[:, None] * 2654435761 + versions[:, None] * 40503) & 0xFFFFFFFF
    offsets = np.arange(0, (len(keys) + 1) * VALUE_BYTES, VALUE_BYTES, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(rows.tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(keys), buffers)


def declare(kv: sk.KVProvider) -> tuple[Any, Any]:
    return kv.value("values", bytes, key=int), kv.value("counts", int, default=0, key=int)


def old_owner(pipe: Connection, entries: int, place: str) -> None:
    """Has the state in memory, serves it, and has taken a checkpoint of it."""
    with sk.open("memory:") as kv:
        values, counts = declare(kv)
        for start in range(0, entries, CHUNK):
            keys = np.arange(start, min(start + CHUNK, entries))
            values.put_many(keys, values_of(keys, np.zeros(len(keys), np.int64)))
            counts.put_many(keys, keys)
        kv.checkpoint(place)
        pipe.send(kv.serve().address)
        pipe.recv()


def new_owner(pipe: Connection, how: str, where: str, home: str, entries: int) -> None:
    pipe.send(take_over(how, where, home, entries))


def take_over(how: str, where: str, home: str, entries: int) -> dict[str, Any]:
    versions, added = np.zeros(entries, np.int64), np.zeros(entries, np.int64)
    rng = np.random.default_rng(1)
    values_of(np.arange(CHUNK), versions[:CHUNK])  # what numpy and pyarrow need once
    before = memory_figure("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
    began = perf_counter()
    if how == "fetch_from":
        kv = sk.open(home, owned=())
        arrival = kv.fetch_from(where)
        wait = arrival.wait
    else:
        kv = sk.restore(where, home=home, lazy=True)
        wait = kv.wait_loaded
    values, counts = declare(kv)
    usable_s = perf_counter() - began
    is_over = threading.Event()
    batches = 0
    failures: list[BaseException] = []

    def write() -> None:
        nonlocal batches
        try:
            while not is_over.is_set():
                keys = rng.integers(0, entries, BATCH)
                counts.add_many(keys, keys % 7)
                np.add.at(added, keys, keys % 7)
                keys = np.unique(rng.integers(0, entries, BATCH))
                versions[keys] += 1
                values.put_many(keys, values_of(keys, versions[keys]))
                batches += 1
                if batches % 100 == 0:
                    kv.commit({"batches": batches})
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait(3600)
        here_s = perf_counter() - began
        written = batches
    finally:
        is_over.set()
        writer.join()
    kv.commit({"batches": batches})
    if failures:
        raise failures[0]
    during = memory_figure("VmHWM") - before
    wrong = 0
    for start in range(0, entries, CHUNK):
        keys = np.arange(start, min(start + CHUNK, entries))
        expected = values_of(keys, versions[keys])
        wrong += expected.to_pylist() != [bytes(one) for one in values.get_many(keys)]
        wrong += not np.array_equal(np.asarray(counts.get_many(keys)), keys + added[keys])
    found = {
        "usable after s": round(usable_s, 3),
        "all at home after s": round(here_s, 1),
        "batches written meanwhile": written,
        "process before, MiB": before >> 20,
        "grew while it came, MiB": during >> 20,
        "chunks that are wrong": wrong,
    }
    kv.close()
    return found


def apart(target: Any, *arguments: Any) -> tuple[Any, Any]:
    """A process, and the end of its pipe."""
    here, there = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(there, *arguments))
    process.start()
    there.close()
    return process, here


def main(budget: int, times: int) -> dict[str, Any]:
    entries = budget * times // ENTRY_BYTES
    promised = int(PROMISED_SHARE * budget) + PROMISED_BYTES
    results: dict[str, Any] = {
        "budget, MiB": budget >> 20,
        "state, MiB": entries * ENTRY_BYTES >> 20,
        "promised, MiB": promised >> 20,
    }
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/checkpoints"
        old, old_pipe = apart(old_owner, entries, place)
        address = old_pipe.recv()
        for how, where in (("restore", place), ("fetch_from", address)):
            home = f"rocksdb:{folder}/{how}?memory={budget}"
            new, new_pipe = apart(new_owner, how, where, home, entries)
            results[how] = new_pipe.recv()
            new.join()
        old_pipe.send(None)
        old.join()
    return results


if __name__ == "__main__":
    given = [*map(int, sys.argv[1:])]
    found = main((given[0] if given else 64) << 20, given[1] if len(given) > 1 else 4)
    print(json.dumps(found, indent=2))
    if not given:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    for one in ("restore", "fetch_from"):
        assert not found[one]["chunks that are wrong"], "the state is not what was written"
