"""The states of the golden checkpoints: how they are declared, changed and read.

This file belongs to the checkpoints that were made with it. What is here is never changed; a new
version of the format gets states of its own if it needs others.
"""

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import statekit as sk

KEYS = [f"key-{i}" for i in range(40)]
LONG = 10_000_000_000  # seconds: what has this time to live does not expire


@dataclasses.dataclass
class Order:
    item: str
    price: float
    tags: list[str] = dataclasses.field(default_factory=list)


class Point(NamedTuple):
    y: int
    x: int = 0


DECLARE: dict[str, Callable[[sk.KVProvider], Any]] = {
    "int": lambda kv: kv.value("int", int),
    "float": lambda kv: kv.value("float", float),
    "str": lambda kv: kv.value("str", str),
    "dataclass": lambda kv: kv.value("dataclass", Order),
    "tuple": lambda kv: kv.value("tuple", Point, key=tuple[str, int]),
    "datetime": lambda kv: kv.value("datetime", datetime, key=int),
    "list": lambda kv: kv.list("list", str),
    "map": lambda kv: kv.map("map", str, int, key=bytes),
    "set": lambda kv: kv.state("set", set[int]),
    "nested": lambda kv: kv.state("nested", dict[str, list[dict[str, int]]]),
    "processing": lambda kv: kv.value("processing", str, ttl=LONG),
    "event": lambda kv: kv.value("event", int, ttl=sk.TTL(100, time="event")),
    "timers": lambda kv: kv.timers("timers"),
}


def declare(kv: sk.KVProvider) -> dict[str, Any]:
    return {name: make(kv) for name, make in DECLARE.items()}


def first(kv: sk.KVProvider) -> None:
    """What is there at the first checkpoint."""
    states = declare(kv)
    kv.advance_watermark(1_000_000)
    for i, key in enumerate(KEYS):
        states["int"][key] = i * 10**15 - 5
        states["float"][key] = i / 7
        states["str"][key] = "näme " * (i % 5)
        states["dataclass"][key] = Order(f"item {i}", i / 2, ["a"] * (i % 3))
        states["tuple"][key, i] = Point(i, -i)
        states["datetime"][i - 20] = datetime.fromtimestamp(i * 10**7, UTC)
        states["list"][key] = [f"{key}/{part}" for part in range(i % 4)]
        states["map"][key.encode()] = {f"m{part}": part * i for part in range(i % 4)}
        states["set"][key] = set(range(i % 6))
        states["nested"][key] = {"a": [{"x": i}], "b": []}
        states["processing"][key] = key.upper()
        states["event"][key] = i
        states["timers"].set(key, 2_000_000 + i)


def second(kv: sk.KVProvider) -> None:
    """What changes before the second: little, so that it is written as deltas."""
    states = declare(kv)
    kv.advance_watermark(1_050_000)
    for i, key in enumerate(KEYS[:3]):
        states["int"][key] = -i
        del states["str"][key]
        states["list"][key].append("more")
        states["nested"][key]["b"].append({"y": i})
        states["event"][key] = 100 + i
        states["timers"].cancel(key, 2_000_000 + i)
    states["float"]["new"] = float("inf")


def read(kv: sk.KVProvider) -> dict[str, list[list[str]]]:
    """All of it, as JSON can hold it."""
    return {
        name: sorted([repr(key), repr(_ordered(value))] for key, value in state.items())
        for name, state in declare(kv).items()
    }


def _ordered(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
