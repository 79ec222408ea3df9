"""Reading a state of a checkpoint as Arrow, and a live one: what an entry costs, by type.

    python benchmarks/bench_arrow.py [--keys N] [--rounds N]

The best of some rounds, in one thread: of the time on the clock, and of that of the processor.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

import statekit as sk

RESULTS = Path(__file__).resolve().parent / "results" / "arrow.json"


@dataclass
class Click:
    url: str
    at: datetime
    ms: int
    tags: list[str]
    price: Decimal


NOW = datetime(2026, 1, 1, tzinfo=UTC)
MAKERS: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "int": (int, lambda at: at),
    "str of 64 bytes": (str, lambda at: f"{at:064d}"),
    "list[float] of 3": (list[float], lambda at: [0.5, 1.5, float(at)]),
    "dict[str, int] of 2": (dict[str, int], lambda at: {"a": at, "b": 2}),
    "dataclass of 5 fields": (
        Click,
        lambda at: Click("/home", NOW, at, ["a", "b"], Decimal("1.5")),
    ),
    "set[int] of 2": (set[int], lambda at: {at, -1}),
    "Any": (Any, lambda at: {"a": at}),
}


def best(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    taken = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in taken), min(cpu for _, cpu in taken)


def measure(name: str, keys: int, rounds: int) -> dict[str, Any]:
    hint, make = MAKERS[name]
    kv = sk.open("memory:")
    state = kv.value("s", hint, key=int)
    state.put_many(np.arange(keys), [make(at) for at in range(keys)])
    with tempfile.TemporaryDirectory() as place:
        checkpoint = kv.checkpoint(place)
        assert sum(map(len, checkpoint.to_arrow("s"))) == keys
        stored = best(lambda: sum(map(len, checkpoint.to_arrow("s"))), rounds)
        live = best(lambda: len(state.to_arrow()), rounds)
    found = {"type": name, "keys": keys}
    for source, (wall, cpu) in (("checkpoint", stored), ("live", live)):
        found[source] = {"wall_s": round(wall, 4), "cpu_s": round(cpu, 4)}
    figures = [f"{1e9 * one / keys:5.0f}" for one in (*stored, *live)]
    print(
        f"{name:24} ns an entry (of the processor): checkpoint {figures[0]} ({figures[1]}), "
        f"live {figures[2]} ({figures[3]})",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found = [measure(name, options.keys, options.rounds) for name in MAKERS]
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
