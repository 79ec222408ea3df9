"""What the fault tests keep in a state, and the oracle: plain dicts, outside the system under test.

A workload goes through versions 0 (nothing), 1, 2, ... `changes` of a version are made from its
seed alone, so the test and the program under test compute the same ones without talking: one
applies them to dicts, the other to a provider. Every later version changes about a quarter of the
keys, deletes some, and brings some back.
"""

import os
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

NIGHTLY = os.environ.get("STATEKIT_NIGHTLY", "") not in ("", "0")

Contents = dict[str, dict[str, Any]]  # state -> key -> value


class Workload(NamedTuple):
    """How large the state is. The seed is part of the name of every test that uses it."""

    name: str = "mixed"
    keys: int = 30
    value_bytes: int = 20  # of a text, about
    states: tuple[str, ...] = ("counts", "texts", "lists", "maps", "timers")
    key_groups: int = 2
    subgroups: int = 2
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.name}-{self.keys}-seed{self.seed}"


MIXED = Workload()
TINY = Workload("tiny", keys=8, key_groups=2, subgroups=1)
EMPTY = Workload("empty", keys=0)
ONE = Workload("one", keys=1, states=("counts",))
COUNTS = Workload("counts", keys=200, states=("counts",))
TEXTS = Workload("texts", keys=100, value_bytes=1000, states=("texts",))
CONTAINERS = Workload("containers", keys=60, states=("lists", "maps", "timers"))
MEGABYTE = Workload("megabyte", keys=1000, value_bytes=1000, states=("texts",))
LARGE = Workload("large", keys=50_000, value_bytes=2000, states=("texts",))

WORKLOADS = (MIXED, COUNTS, TEXTS, CONTAINERS) if NIGHTLY else (MIXED,)
SIZES = (MIXED, EMPTY, ONE, MEGABYTE, LARGE) if NIGHTLY else (MIXED,)


class Change(NamedTuple):
    state: str
    key: str
    value: Any  # None: deleted


def changes(workload: Workload, version: int) -> Iterator[Change]:
    """The changes from version - 1 to version."""
    for state in workload.states:
        rng = random.Random(f"{workload.seed} {state} {version}")
        for at in range(workload.keys):
            if version > 1 and rng.random() > 0.25:
                continue
            key = f"key-{at}"
            if version > 1 and rng.random() < 0.2:
                yield Change(state, key, None)
            else:
                yield Change(state, key, _value(state, rng, workload))


def _value(state: str, rng: random.Random, workload: Workload) -> Any:
    if state == "counts":
        return rng.randrange(-(2**40), 2**40)
    if state == "texts":
        return rng.randbytes(rng.randrange(workload.value_bytes + 1) // 2 + 1).hex()
    if state == "lists":
        return [f"item {rng.random()}" for _ in range(rng.randrange(1, 5))]
    if state == "maps":
        return {f"field {at}": rng.randrange(1000) for at in range(rng.randrange(1, 5))}
    assert state == "timers"
    return tuple(sorted({rng.randrange(1, 10**6) for _ in range(rng.randrange(1, 4))}))


@cache
def contents(workload: Workload, version: int) -> Contents:
    """The oracle: everything that is there at a version. Do not change it."""
    if version == 0:
        return {state: {} for state in workload.states}
    found = {state: dict(keys) for state, keys in contents(workload, version - 1).items()}
    for change in changes(workload, version):
        if change.value is None:
            found[change.state].pop(change.key, None)
        else:
            found[change.state][change.key] = change.value
    return found


# ---- providers ---------------------------------------------------------------------------------


def declare(kv: Any, workload: Workload) -> None:
    for state in workload.states:
        if state == "counts":
            kv.value(state, int)
        elif state == "texts":
            kv.value(state, str)
        elif state == "lists":
            kv.list(state, str)
        elif state == "maps":
            kv.map(state, str, int)
        else:
            kv.timers(state)


def apply(kv: Any, workload: Workload, version: int) -> None:
    """Brings a provider from version - 1 to version."""
    for state, key, value in changes(workload, version):
        target = kv[state]
        if value is None:
            target.discard(key)
        elif state == "timers":
            target.discard(key)
            for due in value:
                target.set(key, due)
        else:
            target[key] = value


def read(kv: Any, workload: Workload) -> Contents:
    """Everything that a provider holds, as plain values."""
    plain = {"lists": list, "maps": dict, "timers": tuple}
    return {
        state: {key: plain.get(state, _same)(value) for key, value in kv[state].items()}
        for state in workload.states
    }


def _same(value: Any) -> Any:
    return value
