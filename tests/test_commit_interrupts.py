"""Ctrl-C at every line of what moves state between memory and home (tests/interrupts.py).

Whatever was interrupted, the state is as before the call or as after it, everything works, doing it
again works, and a crash at that moment leaves the home at a commit.
"""

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from commit_model import DiskHome, groups_of, spill
from interrupts import NIGHTLY, Run, each_point

import statekit as sk
from statekit import uninterrupted as uninterrupted_module
from statekit.errors import ClosedError
from statekit.homes import ledger as ledger_module
from statekit.provider import provider as provider_module
from statekit.residence import commits, fetch, residence, scan, transfer, writeback

KEYS = [f"key-{at}" for at in range(12)]
RESIDENCE = [residence, writeback, fetch, commits, scan, transfer]
FILES = [*RESIDENCE, ledger_module, provider_module, uninterrupted_module.__file__]
EVERY = 1 if NIGHTLY else 7  # every seventh place is tried
HOMES = ["phases", "atomic", "atomic-phases"]


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "atomic-phases":
        monkeypatch.setattr(commits, "_COMMIT_BYTES_MAX", 300)
        monkeypatch.setattr(commits, "_COMMIT_BYTES_MIN", 300)
    monkeypatch.setattr(writeback, "_WRITE_ROWS_MAX", 6)
    monkeypatch.setattr(ledger_module, "_ROLL_ROWS_MAX", 6)
    home: str = request.param
    return home


class Stage(NamedTuple):
    """Providers, and what they held when they were made: version 1 committed, version 2 since."""

    url: str
    parts: dict[str, sk.KVProvider]


def opened(url: str, **options: Any) -> sk.KVProvider:
    kv = sk.open(url, key_groups=2, subgroups=2, **options)
    kv.value("texts", str)
    kv.list("lists", int)
    kv.timers("timers")
    return kv


def put(kv: sk.KVProvider, version: int, keys: list[str]) -> None:
    mine = groups_of(kv)
    for key in keys:
        if kv.key_group_of(key) in mine:
            kv["texts"][key] = f"{version} " * 20
            kv["lists"][key] = [version]
            kv["timers"].move(key, version)


def read(parts: Any) -> dict[str, tuple[int, int, int]]:
    """The version of each key, of its text, its list and its timer; 0 if it is missing."""
    found: dict[str, list[int]] = {}
    for at, name in enumerate(("texts", "lists", "timers")):
        for kv in parts:
            for key, value in kv[name].items():
                version = value.split() if name == "texts" else [*value]
                found.setdefault(key, [0, 0, 0])[at] = int(version[0])
    return {key: (one[0], one[1], one[2]) for key, one in sorted(found.items())}


CLEARED, DELETED = KEYS[:8], KEYS[2]
COMMITTED = dict.fromkeys(sorted(KEYS), (1, 1, 1))
#: After the commit the texts were cleared; some keys were written and left memory, some not.
NOW = {key: (2, 2, 2) if key in CLEARED else (0, 1, 1) for key in sorted(KEYS)}
NOW[KEYS[0]] = (3, 3, 3)
NOW[DELETED] = (0, 2, 2)


def make_on(home: str) -> Callable[[], Stage]:
    def make() -> Stage:
        url = f"disk:{uuid.uuid4().hex}?atomic={int(home != 'phases')}&memory=256KiB"
        kv = opened(url)
        put(kv, 1, KEYS)
        kv.commit({"at": 1})
        kv["texts"].clear()
        put(kv, 2, CLEARED)
        spill(kv)
        put(kv, 3, KEYS[:1])
        kv["texts"].discard(DELETED)
        assert read([kv]) == NOW
        return Stage(url, {"main": kv})

    return make


def check_ends(stage: Stage, now: dict[str, Any], *committed: tuple[dict[str, Any], Any]) -> None:
    """Everything works and can be committed, and a crash before that leaves one of the commits."""
    parts = [*stage.parts.values()]
    assert sorted(group for kv in parts for group in groups_of(kv)) == [0, 1]
    assert read(parts) == now
    for kv in parts:
        if kv._residence.ledger is not None:
            spill(kv)
    assert read(parts) == now
    place = DiskHome.places[stage.url.removeprefix("disk:").partition("?")[0]]
    twin = uuid.uuid4().hex
    copy = DiskHome.places[twin] = DiskHome(place.is_atomic)
    copy.rows, copy.meta = dict(place.safe), place.meta  # if power were lost now
    kv = opened(f"disk:{twin}?memory=256KiB")
    assert (read([kv]), kv.committed) in committed
    kv.close()
    for kv in parts:
        if kv._residence.ledger is not None and groups_of(kv):
            kv["texts"][next(key for key in KEYS if kv.key_group_of(key) in groups_of(kv))] = "9"
            kv.commit({"at": 9})
    now = read(parts)
    for kv in parts:
        kv._let_go()
    kv = opened(stage.url)
    held = read([kv])
    assert held == now or any(part.url == "memory:" for part in parts)
    assert kv.committed == {"at": 9}
    kv.close()


def play(
    home: str,
    step: Callable[[Stage], Any],
    check: Callable[[Stage, Run], None],
    at_least: int = 10,
    make: Callable[[Callable[[], Stage]], Stage] = lambda make_one: make_one(),
) -> None:
    runs = [*each_point(lambda: make(make_on(home)), step, check, files=FILES, every=EVERY)]
    assert sum(run.is_interrupted for run in runs) >= at_least // EVERY


AT_1 = (COMMITTED, {"at": 1})
AT_2 = (NOW, {"at": 2})


def test_a_commit(home: str) -> None:
    def check(stage: Stage, run: Run) -> None:
        check_ends(stage, NOW, AT_1, AT_2)

    play(home, lambda stage: stage.parts["main"].commit({"at": 2}), check)


def test_a_flush(home: str) -> None:
    def check(stage: Stage, run: Run) -> None:
        check_ends(stage, NOW, AT_1, (NOW, {"at": 1}))

    play(home, lambda stage: stage.parts["main"].flush(), check)


def test_a_write_back_and_an_eviction(home: str) -> None:
    def check(stage: Stage, run: Run) -> None:
        check_ends(stage, NOW, AT_1)

    play(home, lambda stage: stage.parts["main"]._residence.make_room(None), check)
    play(home, lambda stage: spill(stage.parts["main"]), check)


def test_a_fetch(home: str) -> None:
    def step(stage: Stage) -> None:
        kv = stage.parts["main"]
        for key in KEYS:
            kv["texts"].get(key, None)
        kv["lists"].get_many(KEYS)

    def check(stage: Stage, run: Run) -> None:
        check_ends(stage, NOW, AT_1)

    play(home, step, check)


def test_a_rollback(home: str) -> None:
    def check(stage: Stage, run: Run) -> None:
        found = read([*stage.parts.values()])
        assert found in (COMMITTED, NOW)
        check_ends(stage, found, AT_1)

    # All but a few lines run in a thread of their own, which is not interrupted.
    play(home, lambda stage: stage.parts["main"].rollback(), check, at_least=5)


def test_a_clear(home: str) -> None:
    """Each leaf is as before or as after it; entries do not come back or vanish later."""

    def check(stage: Stage, run: Run) -> None:
        (kv,) = stage.parts.values()
        found = read([kv])
        for key, (text, *rest) in found.items():
            assert (text, rest) in ((NOW[key][0], [*NOW[key][1:]]), (0, [*NOW[key][1:]]))
        kv["texts"].clear()
        check_ends(stage, {key: (0, *one[1:]) for key, one in NOW.items()}, AT_1)

    def check_stays(stage: Stage, run: Run) -> None:
        check_ends(stage, read([*stage.parts.values()]), AT_1)

    play(home, lambda stage: stage.parts["main"]["texts"].clear(), check)
    play(home, lambda stage: stage.parts["main"]["texts"].clear(), check_stays)


def test_a_close(home: str) -> None:
    """Either the provider goes on, or it is closed and all is committed; closing again works."""

    def check(stage: Stage, run: Run) -> None:
        (kv,) = stage.parts.values()
        try:
            found = read([kv])
        except ClosedError:
            pass
        else:
            assert found == NOW
            put(kv, 3, KEYS[:1])
        kv.close()
        kv = opened(stage.url)
        assert (read([kv]), kv.committed) == (NOW, {"at": 1})
        kv.close()

    # All but a few lines run in a thread of their own, which is not interrupted.
    play(home, lambda stage: stage.parts["main"].close(), check, at_least=3)


def test_a_split(home: str) -> None:
    """Either there are two providers that have it all together, or it is undone."""

    def check(stage: Stage, run: Run) -> None:
        for made in run.result or ():
            stage.parts["made"] = made
        check_ends(stage, NOW, AT_1)

    play(home, lambda stage: stage.parts["main"].split([range(1)]), check, at_least=3)


def test_a_merge_of_siblings(home: str) -> None:
    def split(make_one: Callable[[], Stage]) -> Stage:
        stage = make_one()
        stage.parts["other"] = stage.parts["main"].split([range(1)])[0]
        return stage

    def check(stage: Stage, run: Run) -> None:
        check_ends(stage, NOW, AT_1)

    def step(stage: Stage) -> None:
        stage.parts["main"].merge(stage.parts["other"])

    play(home, step, check, at_least=3, make=split)


def test_a_merge_with_what_is_in_memory(home: str) -> None:
    def move_out(make_one: Callable[[], Stage]) -> Stage:
        stage = make_one()
        memory = stage.parts["memory"] = opened("memory:", owned=[])
        memory.merge(stage.parts["main"])
        return stage

    def check(stage: Stage, run: Run) -> None:
        parts = [*stage.parts.values()]
        assert sorted(group for kv in parts for group in groups_of(kv)) == [0, 1]
        assert read(parts) == NOW
        if groups_of(stage.parts["memory"]):
            stage.parts["main"].merge(stage.parts["memory"])
        check_ends(stage, NOW, (NOW, {"at": 1}), (NOW, None))

    def step(stage: Stage) -> None:
        stage.parts["main"].merge(stage.parts["memory"])

    play(home, step, check, at_least=3, make=move_out)
