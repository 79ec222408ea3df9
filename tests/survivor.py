"""A program with a provider in each place that docs/survives.md tells of, and many ways to end it.

    python survivor.py FOLDER REDIS WAY [with]

Every provider is at version 1, which is committed or in a checkpoint. Then all of it is changed to
version 2, which is more than memory holds. The provider named "async" has asked for a checkpoint of
version 2. Then the program ends, in one of WAYS; if a signal is to end it, it says "ready" and
waits. With "with", all of that happens inside of with statements.
"""

import gc
import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import Any

import statekit as sk

KEYS = [f"key-{at}" for at in range(400)]
PLACES = ("memory", "rocksdb", "rocksdb-at", "redis", "redis-at", "checkpoint", "async")
POSITION = {"version": 1}


def url_of(place: str, folder: str, redis: str) -> str:
    scheme = place.partition("-")[0]
    if scheme == "rocksdb":
        return f"rocksdb:{folder}/{place}?memory=2MiB"
    return f"{redis}?prefix={place}&memory=2MiB" if scheme == "redis" else "memory:"


def contents_of(version: int) -> dict[str, dict[str, Any]]:
    """What a provider has: the oracle."""
    keys = KEYS if version == 1 else KEYS[1:]  # the first one is deleted
    return {
        "counts": dict.fromkeys(keys, version),
        "texts": dict.fromkeys(keys, b"%d" % version * 5000),
        "timers": dict.fromkeys(keys, (version,)),
    }


def contents(kv: sk.KVProvider) -> dict[str, dict[str, Any]]:
    """What a provider really has."""
    states = (kv.value("counts", int), kv.value("texts", bytes), kv.timers("timers"))
    return {
        name: dict(state.items())
        for name, state in zip(("counts", "texts", "timers"), states, strict=True)
    }


def change(kv: sk.KVProvider, version: int) -> None:
    counts, texts = kv.value("counts", int), kv.value("texts", bytes)
    timers = kv.timers("timers")
    for state in (counts, texts, timers):
        if version > 1:
            state.discard(KEYS[0])
    for key, text in contents_of(version)["texts"].items():
        counts[key], texts[key] = version, text
        timers.move(key, version)


def prepare(place: str, folder: str, redis: str) -> sk.KVProvider:
    kv = sk.open(url_of(place, folder, redis), key_groups=4, subgroups=4)
    change(kv, 1)
    if place in ("rocksdb", "redis"):
        kv.flush()
    elif place in ("rocksdb-at", "redis-at"):
        kv.commit(POSITION)
    elif place != "memory":
        kv.checkpoint(f"{folder}/{place}", metadata=POSITION)
    change(kv, 2)
    if place.partition("-")[0] in ("rocksdb", "redis"):
        assert kv.metrics().states["texts"].spills > len(KEYS), "all of it fitted into memory"
    if place == "async":
        kv.checkpoint_async(f"{folder}/{place}", metadata={"version": 2})
    return kv


def wait() -> None:
    print("ready", flush=True)
    while True:
        time.sleep(0.1)  # signal.pause() misses one that comes just before it


def exit_with_3() -> None:
    sys.exit(3)


def fail() -> None:
    raise RuntimeError("as the test wants")


WAYS = {"end": lambda: None, "exit": exit_with_3, "exception": fail, "signal": wait}


def main(folder: str, redis: str, way: str, is_with: bool) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to ignored
    kept = [prepare(place, folder, redis) for place in PLACES]
    if way == "close":
        for kv in kept:
            kv.close()
    elif way == "del":
        kept.clear()
        gc.collect()
        os.kill(os.getpid(), signal.SIGKILL)  # by the program itself, so that nothing runs after it
    elif is_with:
        with ExitStack() as stack:
            for kv in kept:
                stack.enter_context(kv)
            WAYS[way]()
    else:
        sys.modules[__name__].kept = kept  # type: ignore[attr-defined]  # to the very end
        WAYS[way]()


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:] == ["with"])
