"""The command `bench`: how many operations per second each type of state does on this machine."""

import operator
import platform
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import click

import statekit
from statekit.cli.options import json_option
from statekit.cli.output import print_json, print_line, print_table, progress

_LIST_MAX = 64  # a list with this many items is cleared


class _Case(NamedTuple):
    state: str
    operation: str
    single: Callable[[str], Any]  # for one key
    batch: Callable[[list[str]], Any] | None  # for many, in one call


@click.command()
@click.option(
    "--keys",
    type=click.IntRange(1, 10_000_000),
    default=100_000,
    show_default=True,
    metavar="N",
    help="Different keys.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.001, 60),
    default=0.1,
    show_default=True,
    metavar="S",
    help="For each figure.",
)
@json_option
def bench(keys: int, seconds: float, as_json: bool) -> None:
    """Measure each type of state on this machine.

    Operations a second of one thread, in memory. "single" is one key a call, "batch" is 10,000 keys
    a call, given as Python lists; with NumPy or Arrow columns batches are faster still.

    \b
    Example:
      statekit bench
    """
    names = [f"user-{number}" for number in range(keys)]
    found = []
    with statekit.open("memory:") as kv:
        cases = _cases(kv, names)
        with progress("measuring", len(cases), in_bytes=False) as advance:
            for case in cases:
                single = _single_rate(case.single, names, seconds)
                batch = None if case.batch is None else _batch_rate(case.batch, names, seconds)
                found.append((case, single, batch))
                advance(1)
    if as_json:
        print_json(
            [
                {"state": one.state, "operation": one.operation, "single": single, "batch": batch}
                for one, single, batch in found
            ]
        )
        return
    rows = [
        [one.state, one.operation, f"{single:,.0f}", "-" if batch is None else f"{batch:,.0f}"]
        for one, single, batch in found
    ]
    print_table(["state", "operation", "single/s", "batch/s"], rows, "llrr")
    print_line()
    print_line(f"{keys:,} keys, Python {platform.python_version()}, {platform.machine()}")


def _cases(kv: statekit.KVProvider, names: list[str]) -> list[_Case]:
    count = kv.value("count", int, default=0)
    text = kv.value("text", str)
    clicks = kv.list("clicks", int)
    prefs = kv.map("prefs", str, float)
    tags = kv.state("tags", set[str])
    total = kv.reduce("total", int, operator.add)
    timers = kv.timers("timers")
    count.put_many(names, [1] * len(names))
    text.put_many(names, ["some text"] * len(names))
    prefs.update_many(names, ["volume"] * len(names), [0.5] * len(names))

    def append(key: str) -> None:
        view = clicks[key]
        view.append(7)
        if len(view) >= _LIST_MAX:
            view.clear()

    return [
        _Case("value[int]", "get", count.get, count.get_many),
        _Case(
            "value[int]",
            "put",
            lambda key: count.__setitem__(key, 7),
            lambda many: count.put_many(many, [7] * len(many)),
        ),
        _Case("value[int]", "add", lambda key: count.add(key, 1), count.add_many),
        _Case("value[str]", "get", text.get, text.get_many),
        _Case(
            "value[str]",
            "put",
            lambda key: text.__setitem__(key, "other text"),
            lambda many: text.put_many(many, ["other text"] * len(many)),
        ),
        _Case(
            "list[int]",
            "append",
            append,
            lambda many: clicks.append_many(many, [7] * len(many)),
        ),
        _Case("list[int]", "read all", lambda key: clicks[key].copy(), clicks.get_many),
        _Case(
            "map[str, float]",
            "get",
            lambda key: prefs[key].get("volume"),
            None,
        ),
        _Case(
            "map[str, float]",
            "put",
            lambda key: prefs[key].__setitem__("volume", 0.7),
            lambda many: prefs.update_many(many, ["volume"] * len(many), [0.7] * len(many)),
        ),
        _Case("set[str]", "add", lambda key: tags[key].add("new"), None),
        _Case("set[str]", "contains", lambda key: "new" in tags[key], None),
        _Case(
            "reduce[int]",
            "add",
            lambda key: total.add(key, 1),
            lambda many: total.add_many(many, [1] * len(many)),
        ),
        _Case("timers", "set", lambda key: timers.set(key, 1000), None),
    ]


_CALLS = 1000  # between two looks at the clock
_BATCH = 10_000


def _single_rate(call: Callable[[str], Any], names: list[str], seconds: float) -> float:
    chunks = [names[at : at + _CALLS] for at in range(0, len(names), _CALLS)]
    return _rate(lambda chunk: [call(name) for name in chunk], chunks, seconds)


def _batch_rate(call: Callable[[list[str]], Any], names: list[str], seconds: float) -> float:
    return _rate(call, [names[at : at + _BATCH] for at in range(0, len(names), _BATCH)], seconds)


def _rate(call: Callable[[list[str]], Any], chunks: list[list[str]], seconds: float) -> float:
    done = 0
    began = perf_counter()
    while True:
        for chunk in chunks:
            call(chunk)
            done += len(chunk)
            spent = perf_counter() - began
            if spent >= seconds:
                return done / spent
