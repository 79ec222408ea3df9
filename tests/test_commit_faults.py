"""A home that goes wrong at its n-th call, for every n and in every way, while scripts commit.

In the same process, nothing is lost, and doing the step again works. After a crash at that moment,
the home is exactly at the last acknowledged commit, or at the one that was being made.
"""

import os
import random
import uuid
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commit_model import (
    GROUPS,
    KINDS,
    Crash,
    DiskHome,
    Entries,
    Faults,
    FaultyHome,
    Kept,
    Model,
    check_equal,
    declare,
    empty,
    groups_of,
    read,
    spill,
)
from servers import HOST, RedisServer, redis_server

import statekit as sk
from statekit.errors import HomeError
from statekit.homes import ledger as ledger_module
from statekit.residence import commits, writeback

NIGHTLY = os.environ.get("STATEKIT_NIGHTLY", "") not in ("", "0")
KEYS = [f"key-{at}" for at in range(6)]
STATES = ("counts", "texts", "lists", "fresh", "timers")
GROUP_OF = {key: sk.open("memory:", key_groups=GROUPS).key_group_of(key) for key in KEYS}
MAIN = "main"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that a few rows fill."""
    monkeypatch.setattr(writeback, "_WRITE_ROWS_MAX", 8)
    monkeypatch.setattr(ledger_module, "_ROLL_ROWS_MAX", 8)


def in_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes everything that was evicted count as more than a batch."""
    monkeypatch.setattr(commits, "_COMMIT_BYTES_MAX", 400)
    monkeypatch.setattr(commits, "_COMMIT_BYTES_MIN", 400)


# ---- Scripts


class Stage:
    """A provider on the home that goes wrong, perhaps siblings of it, and one in memory."""

    def __init__(self, place: str, groups: Iterable[int] = range(GROUPS)) -> None:
        self.place = place
        self.parts: dict[str, sk.KVProvider] = {}
        self.model = Model()
        self.open(MAIN, groups)

    def open(self, name: str, groups: Iterable[int]) -> sk.KVProvider:
        url = "memory:" if name == "memory" else f"faulty:{self.place}?memory=64KiB"
        kv = sk.open(url, key_groups=GROUPS, subgroups=1, owned=groups)
        self.parts[name] = kv
        kv.advance_watermark(self.model.watermark)
        declare(kv, STATES)
        return kv

    def owner(self, group: int) -> sk.KVProvider:
        (found,) = (kv for kv in self.parts.values() if group in groups_of(kv))
        return found

    def state(self, name: str, key: str) -> Any:
        return self.owner(GROUP_OF[key])[name]

    def check_now(self, *models: Model) -> None:
        """Everything is there once, as in one of the models."""
        owned = sorted(group for kv in self.parts.values() for group in groups_of(kv))
        assert owned == [*range(GROUPS)]
        found = empty()
        for kv in self.parts.values():
            for name, keys in read(kv).items():
                found[name] |= keys
        _check_any(found, [model.seen_now(range(GROUPS)) for model in models])


def _check_any(found: Entries, expected: list[Entries]) -> None:
    if found not in expected:
        check_equal(found, expected[0])


class Step(NamedTuple):
    """do: acts on the providers; may be repeated. note: does the same to the model.

    is_loose: if it fails, each key-group may be as it was before the step or as after it.
    """

    name: str
    do: Callable[[Stage], None]
    note: Callable[[Model], None]
    is_loose: bool = False


def put(version: int, keys: list[str] = KEYS) -> Step:
    """Sets entries of all states; deletes every fifth."""

    def values(name: str, key: str) -> Any:
        number = version * 100 + KEYS.index(key)
        return {
            "counts": number,
            "texts": f"{number} " * 20,
            "lists": [number, 1],
            "fresh": number,
            "timers": (number,),
        }[name]

    def each() -> Iterator[tuple[str, str, bool]]:
        for at, name in enumerate(STATES):
            for key in keys:
                yield name, key, (at + KEYS.index(key) + version) % 5 == 0

    def do(stage: Stage) -> None:
        for name, key, is_gone in each():
            state = stage.state(name, key)
            if is_gone:
                state.discard(key)
            elif name == "timers":
                state.move(key, values(name, key)[0])
            else:
                state[key] = values(name, key)

    def note(model: Model) -> None:
        for name, key, is_gone in each():
            entries = model.now[GROUP_OF[key]][name]
            if is_gone:
                entries.pop(key, None)
            else:
                value = values(name, key)
                entries[key] = (value, model.watermark) if name == "fresh" else value

    return Step(f"put {version}", do, note, is_loose=True)


def out(part: str = MAIN) -> Step:
    return Step(f"spill {part}", lambda stage: spill(stage.parts[part]), lambda model: None)


def clear(name: str, groups: Iterable[int] = range(GROUPS), part: str = MAIN) -> Step:
    def note(model: Model) -> None:
        for group in groups:
            model.now[group][name].clear()

    return Step(f"clear {name}", lambda stage: stage.parts[part][name].clear(), note, is_loose=True)


def commit(position: Any, groups: Iterable[int] = range(GROUPS), part: str = MAIN) -> Step:
    return Step(
        f"commit {position}",
        lambda stage: stage.parts[part].commit(position),
        lambda model: model.commit(MAIN, groups, position),
    )


def flush(groups: Iterable[int] = range(GROUPS), part: str = MAIN) -> Step:
    return Step(
        "flush",
        lambda stage: stage.parts[part].flush(),
        lambda model: model.flush(MAIN, groups),
    )


def rollback(groups: Iterable[int] = range(GROUPS), part: str = MAIN) -> Step:
    return Step(
        "rollback",
        lambda stage: stage.parts[part].rollback(),
        lambda model: model.rollback(MAIN, groups),
    )


def split(name: str, groups: list[int]) -> Step:
    def do(stage: Stage) -> None:
        (stage.parts[name],) = stage.parts[MAIN].split([groups])

    return Step(f"split {groups}", do, lambda model: None)


def merge(to: str, other: str, arrive: Iterable[int] = (), leave: Iterable[int] = ()) -> Step:
    def note(model: Model) -> None:
        for group in arrive:
            model.kept.setdefault(MAIN, {})[group] = Kept(model.now[group])
        for group in leave:
            model.kept.setdefault(MAIN, {})[group] = Kept()

    return Step(
        f"merge {other} into {to}",
        lambda stage: stage.parts[to].merge(stage.parts[other]),
        note,
        is_loose=True,
    )


class Script(NamedTuple):
    owned: list[int]
    steps: list[Step]


ALL = [*range(GROUPS)]
SCRIPTS = {
    "commits": Script(
        ALL,
        [
            put(1),
            commit({"at": 1}),
            put(2, KEYS[:4]),
            out(),
            clear("texts"),
            clear("timers"),
            put(3, KEYS[2:]),
            out(),
            put(4, KEYS[3:5]),
            commit({"at": 2}),
            clear("counts"),
            flush(),
        ],
    ),
    "rollbacks": Script(
        ALL,
        [
            put(1),
            out(),
            rollback(),
            put(2),
            commit({"at": 1}),
            put(3, KEYS[:4]),
            clear("fresh"),
            out(),
            put(4, KEYS[3:]),
            rollback(),
            put(5, KEYS[2:4]),
            out(),
            commit(None),
        ],
    ),
    "siblings": Script(
        ALL,
        [
            put(1),
            commit({"at": 1}),
            put(2),
            out(),
            split("b", [1, 3]),
            put(3, KEYS[:3]),
            out("b"),
            clear("lists", [1, 3], "b"),
            commit({"at": "b"}, [1, 3], "b"),
            put(4, KEYS[2:]),
            out("b"),
            merge(MAIN, "b"),
            rollback(),
            put(5, KEYS[1:3]),
            out(),
            commit({"at": 2}),
        ],
    ),
    "arrivals": Script(
        [0, 1],
        [
            put(1),
            commit({"at": 1}, [0, 1]),
            put(2, KEYS[:4]),
            out(),
            merge(MAIN, "memory", arrive=[2, 3]),
            put(3, KEYS[3:]),
            out(),
            rollback(),
            put(4, KEYS[2:4]),
            commit({"at": 2}),
        ],
    ),
    "departures": Script(
        ALL,
        [
            put(1),
            commit({"at": 1}),
            put(2, KEYS[:4]),
            out(),
            split("b", [1, 2]),
            merge("memory", "b", leave=[1, 2]),
            put(3, KEYS[3:]),
            out(),
            commit({"at": 2}, [0, 3]),
            merge(MAIN, "memory", arrive=[1, 2]),
            put(4, KEYS[:2]),
            out(),
            commit({"at": 3}),
        ],
    ),
}


# ---- Running them


def models_of(script: Script) -> list[Model]:
    """The model before each step, and at the end."""
    models = [Model()]
    for step in script.steps:
        models.append(deepcopy(models[-1]))
        step.note(models[-1])
    return models


MODELS = {name: models_of(script) for name, script in SCRIPTS.items()}


def play(name: str, inner: str, nth: int, kind: str, rng: random.Random) -> list[str]:
    """Plays and checks a script with a fault at the n-th call (0: none). Returns the calls."""
    script, models = SCRIPTS[name], MODELS[name]
    place = uuid.uuid4().hex
    faults = Faults()
    FaultyHome.places[place] = (inner, faults)
    stage = Stage(place, script.owned)
    stage.open("memory", [group for group in ALL if group not in script.owned])
    faults.arm(nth, kind)
    for at, step in enumerate(script.steps):
        before, after = models[at : at + 2]
        try:
            step.do(stage)
        except (HomeError, KeyboardInterrupt):
            faults.is_on = False
            if (at + nth) % 2:  # the process ends without trying again
                crash(stage, faults, inner, rng)
                check_reopened(stage, before, after)
                return faults.calls
            if not step.is_loose:
                stage.check_now(before, after)
            step.do(stage)
        except Crash:
            crash(stage, faults, inner, rng)
            check_reopened(stage, before, after)
            return faults.calls
        if not nth or (faults.is_on and len(faults.calls) >= nth):
            faults.is_on = not nth and faults.is_on
            with faults.paused():
                stage.check_now(after)
    with faults.paused():
        stage.check_now(models[-1])
    crash(stage, faults, inner, rng)
    check_reopened(stage, models[-1], models[-1])
    return faults.calls


def crash(stage: Stage, faults: Faults, inner: str, rng: random.Random) -> None:
    faults.is_on, faults.is_dead = False, True
    for kv in stage.parts.values():
        kv._let_go()
    stage.parts.clear()
    faults.is_dead = False
    if inner.startswith("disk:"):
        DiskHome.places[inner.removeprefix("disk:").partition("?")[0]].crash(rng)


def check_reopened(stage: Stage, before: Model, after: Model) -> None:
    """The home is at one of two moments; and work goes on from there."""
    kv = stage.open(MAIN, ALL)
    assert kv._residence.ledger is not None
    found = read(kv)
    models = [before, after]
    _check_any(found, [model.seen_kept(MAIN, ALL) for model in models])
    is_at = [model for model in models if model.seen_kept(MAIN, ALL) == found]
    positions = [positions_of(model) for model in is_at]
    assert {
        group: position for ranges, position in kv.positions for part in ranges for group in part
    } in positions, (kv.positions, positions)
    assert not kv._residence.ledger._since
    kv["counts"]["key-1"] = 7
    spill(kv)
    kv["counts"]["key-2"] = 8
    kv.commit({"at": "end"})
    kv["counts"]["key-3"] = 9
    spill(kv)
    kv._let_go()
    kv = stage.open(MAIN, ALL)
    found["counts"] |= {"key-1": 7, "key-2": 8}
    check_equal(read(kv), found)
    assert kv.committed == {"at": "end"}
    kv.close()


def positions_of(model: Model) -> dict[int, Any]:
    found = {group: model.kept_of(MAIN, group).position for group in ALL}
    return {group: position for group, position in found.items() if position is not None}


def kinds_of(call: str, is_atomic: bool) -> Iterator[str]:
    """The faults that make a difference for a call."""
    for kind in KINDS:
        is_read = call in ("get", "load", "snapshot")
        if kind.endswith("late") and is_read and kind != "late":
            continue
        if kind.endswith("torn") and (is_atomic or is_read):
            continue
        yield kind


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("home", ["disk-phases", "disk-one-step", "disk-atomic-phases"])
def test_a_fault_at_any_call_of_a_home_costs_nothing_that_was_committed(
    name: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home.endswith("phases"):
        in_phases(monkeypatch)
    is_atomic = home != "disk-phases"

    def inner() -> str:
        return f"disk:{uuid.uuid4().hex}?atomic={int(is_atomic)}"

    calls = play(name, inner(), 0, "", random.Random(0))
    print(f"{name} on {home}: {len(calls)} calls")
    for nth, call in enumerate(calls, 1):
        for kind in kinds_of(call, is_atomic):
            try:
                play(name, inner(), nth, kind, random.Random(nth))
            except BaseException as error:
                error.add_note(f"{name}: {kind} at call {nth} of {len(calls)}, {call}")
                raise


@pytest.mark.parametrize("way", ["one step", "phases"])
@pytest.mark.parametrize("home", ["rocksdb", "redis"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_fault_at_calls_of_a_real_home_costs_nothing_that_was_committed(
    name: str, home: str, way: str, monkeypatch: pytest.MonkeyPatch, request: Any, tmp_path: Path
) -> None:
    if way == "phases":
        in_phases(monkeypatch)

    def inner() -> str:
        fresh = uuid.uuid4().hex
        if home == "rocksdb":
            return f"rocksdb:{tmp_path}/{fresh}?sync=0"
        server: RedisServer = request.getfixturevalue("server")
        return f"redis://{HOST}:{server.port}/0?prefix={fresh}"

    calls = play(name, inner(), 0, "", random.Random(0))
    points = [(at, kind) for at, call in enumerate(calls, 1) for kind in kinds_of(call, True)]
    for nth, kind in points if NIGHTLY else random.Random(name).sample(points, 12):
        try:
            play(name, inner(), nth, kind, random.Random(nth))
        except BaseException as error:
            error.add_note(f"{name}: {kind} at call {nth} of {len(calls)}")
            raise


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_crash_in_a_merge_of_two_homes_leaves_one_owner(is_atomic: bool) -> None:
    """At any call: one home has it all, and the other has nothing of it, or says whose it is."""

    def play_merge(nth: int, kind: str) -> list[str]:
        faults = Faults()
        urls = []
        for _ in range(2):
            place = uuid.uuid4().hex
            disk = f"disk:{uuid.uuid4().hex}?atomic={int(is_atomic)}"
            FaultyHome.places[place] = (disk, faults)
            urls.append(f"faulty:{place}?memory=64KiB")
        a, b = opened = [
            sk.open(url, key_groups=GROUPS, subgroups=1, owned=owned)
            for url, owned in zip(urls, (ALL, ()), strict=True)
        ]
        a.value("counts", int).update({key: at for at, key in enumerate(KEYS)})
        a.commit({"at": 1})
        faults.arm(nth, kind)
        try:
            b.merge(a)
            b.flush()
        except Crash:
            assert nth
        faults.is_on, faults.is_dead = False, True
        for kv in opened:
            kv._let_go()
        faults.is_dead = False
        for place, (disk, _) in FaultyHome.places.items():
            if place in "".join(urls):
                DiskHome.places[disk.removeprefix("disk:").partition("?")[0]].crash(
                    random.Random(nth)
                )
        a, b = (sk.open(url) for url in urls)
        found = [dict(kv.value("counts", int).items()) for kv in (a, b)]
        if found == [{}, {}]:  # it was on its way: the old owner has it all, and says so
            a.close()
            a = sk.open(urls[0], reclaim=True)
            found[0] = dict(a.value("counts", int).items())
        assert sorted(map(len, found)) == [0, len(KEYS)], found
        assert nth or found[1]
        a.close()
        b.close()
        return faults.calls

    calls = play_merge(0, "")
    for nth, call in enumerate(calls, 1):
        for kind in kinds_of(call, is_atomic):
            if kind.startswith("crash"):
                try:
                    play_merge(nth, kind)
                except BaseException as error:
                    error.add_note(f"{kind} at call {nth} of {len(calls)}, {call}")
                    raise
