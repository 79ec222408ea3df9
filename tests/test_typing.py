"""The static types of the public API: what mypy --strict says about a user's program."""

import re
from pathlib import Path

import pytest
from mypy import api

PROGRAM = """
import operator
from dataclasses import dataclass
from typing import Any, Optional
import statekit as sk

@dataclass
class Click:
    url: str
    at: int

kv = sk.open("memory:")
reveal_type(kv)  # KVProvider
visits = kv.value("visits", int, default=0)
reveal_type(visits)  # ValueState[int]
reveal_type(visits["alice"])  # int
reveal_type(visits.get("alice"))  # int | None
reveal_type(visits.get("alice", "no"))  # int | str
reveal_type(visits.add("alice", 1))  # int
reveal_type(visits.get_many(["alice"]))  # Values[int]
reveal_type(visits.get_many(["alice"]).to_list())  # list[int]
reveal_type(kv.value("score", float).add("alice", 1.5))  # float
reveal_type(kv.value("click", Click)["alice"].url)  # str
reveal_type(kv.value("any", Any))  # ValueState[Any]
reveal_type(list(visits.values()))  # list[int]

clicks = kv.list("clicks", Click)
reveal_type(clicks)  # ListState[Click]
reveal_type(clicks["alice"])  # ListView[Click]
reveal_type(clicks["alice"][0])  # Click
reveal_type(clicks["alice"][1:])  # list[Click]
reveal_type(clicks["alice"].pop())  # Click
reveal_type(clicks.get("alice"))  # ListView[Click] | None

prefs = kv.map("prefs", str, float)
reveal_type(prefs)  # MapState[str, float]
reveal_type(prefs["alice"])  # MapView[str, float]
reveal_type(prefs["alice"]["volume"])  # float
reveal_type(prefs["alice"].get("volume"))  # float | None
reveal_type(prefs["alice"].items())  # ItemsView[str, float]

orders = kv.state("orders", dict[str, list[Click]])
reveal_type(orders)  # MapState[str, list[Click]]
reveal_type(orders["alice"]["2026-11"])  # list[Click]
reveal_type(kv.state("tags", set[str])["alice"])  # SetView[str]
reveal_type(kv.state("log", list[int])["alice"])  # ListView[int]
reveal_type(kv.state("one", int))  # ValueState[int]

total = kv.reduce("total", int, operator.add)
reveal_type(total.add("alice", 1))  # int
def add(acc: tuple[int, float], x: float) -> tuple[int, float]: return acc
def mean(acc: tuple[int, float]) -> float: return acc[1]
mean_state = kv.aggregate("mean", tuple[int, float], initial=(0, 0.0), add=add, result=mean)
reveal_type(mean_state["alice"])  # float

timers = kv.timers("expiry")
reveal_type(timers["alice"])  # tuple[int, ...]
reveal_type(timers.pop_due(7))  # list[Timer]
reveal_type(kv.key_groups)  # tuple[range, ...]
reveal_type(kv.split([range(3)]))  # list[KVProvider]
reveal_type(kv.owner_of("alice"))  # KVProvider | None
reveal_type(sk.assign(128, 2))  # list[range]
"""

REFUSED = """
import statekit as sk
kv = sk.open("memory:")
kv.value("name", str).add("alice", 1)
kv.value("visits", int, default=0)["alice"] = "three"
kv.list("clicks", int)["alice"].append("three")
kv.map("prefs", str, float)["alice"][3] = 0.5
"""


def run_mypy(path: Path, program: str) -> list[str]:
    path.write_text(program)
    out, _, _ = api.run(
        ["--strict", "--no-error-summary", "--cache-dir", str(path.parent / "cache"), str(path)]
    )
    return [line for line in out.splitlines() if path.name in line.partition(": ")[0]]


def short(text: str) -> str:
    """A type without the modules of its parts, and unions as Python writes them."""
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
    text = re.sub(r"Union\[(.*)\]", lambda m: m.group(1).replace(", ", " | "), text)
    return re.sub(r"tuple\[[^\]]*fallback=(\w+)\]", r"\1", text)


@pytest.fixture(scope="module")
def revealed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    lines = run_mypy(tmp_path_factory.mktemp("mypy") / "program.py", PROGRAM)
    assert not [line for line in lines if ": error:" in line]
    found = [re.search(r':(\d+): note: Revealed type is "(.*)"', line) for line in lines]
    return {int(m.group(1)): short(m.group(2)) for m in found if m}


PROMISES = [
    (at, line.split("#")[0].strip(), line.split("# ")[1])
    for at, line in enumerate(PROGRAM.splitlines(), 1)
    if line.startswith("reveal_type")
]


@pytest.mark.parametrize(("at", "call", "promised"), PROMISES, ids=[p[1] for p in PROMISES])
def test_revealed_type_is_precise(
    revealed: dict[int, str], at: int, call: str, promised: str
) -> None:
    assert revealed[at] == promised


def test_wrong_types_are_refused_before_the_program_runs(tmp_path: Path) -> None:
    lines = run_mypy(tmp_path / "refused.py", REFUSED)
    refused = {int(m.group(1)) for line in lines if (m := re.search(r":(\d+): error:", line))}
    assert refused == {4, 5, 6, 7}
