"""Random lives of providers against a plain model: commits, rollbacks, crashes, splits, merges.

Everything leaves memory again and again between commits. After each important step, reading gives
what the model has now; after a crash, what the model had committed.
"""

import itertools
import os
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commit_model import (
    GROUPS,
    STATES,
    SUBGROUPS,
    TTL_MS,
    DiskHome,
    Kept,
    Model,
    check_now,
    check_position,
    declare,
    empty,
    groups_of,
    pending_rows,
    read,
    spill,
)
from servers import HOST, RedisServer, redis_server

import statekit as sk
from statekit.errors import CommitError
from statekit.homes import ledger as ledger_module
from statekit.residence import commits, fetch, writeback

NIGHTLY = os.environ.get("STATEKIT_NIGHTLY", "") not in ("", "0")
STEPS = 250
SEEDS = range(200) if NIGHTLY else range(4)
MEMORY = "memory=64KiB"
KEYS = [f"key-{at}" for at in range(12)] + ["a key that is longer than its slot takes"]
HOMES = ["rocksdb", "redis", "disk-phases", "disk-atomic"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture(params=HOMES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = uuid.uuid4().hex
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("server")
        return f"redis://{HOST}:{server.port}/0?prefix={name}&{MEMORY}"
    if request.param == "rocksdb":
        return f"rocksdb:{tmp_path}/home?sync=0&{MEMORY}"
    return f"disk:{name}?atomic={int(request.param == 'disk-atomic')}&{MEMORY}"


@pytest.fixture(autouse=True)
def vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a leaf are learned after a few keys were asked for in vain."""
    monkeypatch.setattr(fetch, "_VAIN_MIN", 2)


@pytest.fixture(params=["in one step", "in two phases"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way in which an atomic home commits what was evicted before."""
    if request.param == "in two phases":
        monkeypatch.setattr(commits, "_COMMIT_BYTES_MAX", 700)
        monkeypatch.setattr(commits, "_COMMIT_BYTES_MIN", 700)
        monkeypatch.setattr(writeback, "_WRITE_ROWS_MAX", 5)
        monkeypatch.setattr(ledger_module, "_ROLL_ROWS_MAX", 3)
    way: str = request.param
    return way


class Life:
    """Providers on a home ("main"), on another one ("other") and in memory, and their model."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self.urls = {"main": url, "other": f"disk:{uuid.uuid4().hex}?atomic=1&{MEMORY}"}
        self.rng = rng
        self.model = Model()
        self.count = itertools.count(1)
        self.parts: list[tuple[sk.KVProvider, str]] = []  # with the name of its home
        self.lost_count = self.pending_seen = 0
        share = rng.choice([range(GROUPS), range(2), [0, 2, 3]])
        self.open("main", [*share])
        self.open("memory", [group for group in range(GROUPS) if group not in share])

    def open(self, home: str, groups: list[int]) -> sk.KVProvider:
        url = self.urls.get(home, "memory:")
        kv = sk.open(url, key_groups=GROUPS, subgroups=SUBGROUPS, owned=groups)
        kv.advance_watermark(self.model.watermark)
        declare(kv)
        self.parts.append((kv, home))
        return kv

    def owner(self, key: str) -> tuple[sk.KVProvider, int]:
        group = self.parts[0][0].key_group_of(key)
        (found,) = (kv for kv, _ in self.parts if group in groups_of(kv))
        return found, group

    def pick(self) -> tuple[sk.KVProvider, str]:
        return self.rng.choice(self.parts)

    # ---- Steps

    def change(self) -> None:
        for _ in range(self.rng.randrange(1, 8)):
            name, key = self.rng.choice(STATES), self.rng.choice(KEYS)
            kv, group = self.owner(key)
            self.change_one(kv[name], self.model.now[group][name], name, key)

    def change_one(self, state: Any, entries: dict[str, Any], name: str, key: str) -> None:
        rng, number = self.rng, next(self.count)
        if rng.random() < 0.2:
            was = entries.pop(key, None)
            if name == "fresh" and was is not None and was[1] + TTL_MS <= self.model.watermark:
                was = None
            assert state.discard(key) == (was is not None)
            return
        match name:
            case "counts":
                state[key] += number
                entries[key] = entries.get(key, 0) + number
            case "texts":
                state[key] = entries[key] = f"{number} " * rng.choice([1, 30, 300])
            case "lists":
                state[key].append(number)
                entries.setdefault(key, []).append(number)
            case "maps":
                state[key][f"f{number % 5}"] = number
                entries.setdefault(key, {})[f"f{number % 5}"] = number
            case "sets":
                state[key].add(str(number % 7))
                entries.setdefault(key, set()).add(str(number % 7))
            case "deep":
                state[key]["field"] = [number]
                entries.setdefault(key, {})["field"] = [number]
            case "fresh":
                state[key] = number
                entries[key] = (number, self.model.watermark)
            case "timers":
                state.set(key, number)
                entries[key] = tuple(sorted({*entries.get(key, ()), number}))

    def batch(self) -> None:
        """Many entries at once, of one state."""
        kv, _ = self.pick()
        mine = set(groups_of(kv))
        keys = [key for key in KEYS if kv.key_group_of(key) in mine]
        number = next(self.count)
        if keys and self.rng.random() < 0.5:
            kv["counts"].add_many(keys, number)
            for key in keys:
                entries = self.model.now[kv.key_group_of(key)]["counts"]
                entries[key] = entries.get(key, 0) + number
        elif keys:
            kv["texts"].put_many(keys, [f"{number}"] * len(keys))
            for key in keys:
                self.model.now[kv.key_group_of(key)]["texts"][key] = f"{number}"

    def look(self) -> None:
        for _ in range(self.rng.choice([4, 20])):
            name, key = self.rng.choice(["counts", "texts", "lists"]), self.rng.choice(KEYS)
            kv, group = self.owner(key)
            found = kv[name].get(key, None)
            assert (list(found) if found and name == "lists" else found) == (
                self.model.now[group][name].get(key)
            )

    def clear(self) -> None:
        name = self.rng.choice(STATES)
        kv, _ = self.pick()
        kv[name].clear()
        for group in groups_of(kv):
            self.model.now[group][name].clear()

    def spill(self) -> None:
        kv, home = self.pick()
        spill(kv, is_all=self.rng.random() < 0.7)
        if home != "memory":
            self.pending_seen += pending_rows(kv)

    def fire(self) -> None:
        kv, _ = self.pick()
        due = self.rng.randrange(1, next(self.count) + 1)
        expected = []
        for group in groups_of(kv):
            entries = self.model.now[group]["timers"]
            for key in [*entries]:
                expected += [(at, key) for at in entries[key] if at <= due]
                if left := tuple(at for at in entries[key] if at > due):
                    entries[key] = left
                else:
                    del entries[key]
        assert sorted((timer.due, timer.key) for timer in kv["timers"].pop_due(due)) == sorted(
            expected
        )

    def wait(self) -> None:
        self.model.watermark += self.rng.choice([10, 60])
        for kv, _ in self.parts:
            kv.advance_watermark(self.model.watermark)
            if self.rng.random() < 0.3:
                kv.sweep()

    def commit(self) -> None:
        kv, home = self.pick()
        position = self.rng.choice([None, {"at": next(self.count)}, {}])
        if home == "memory":
            with pytest.raises(CommitError):
                kv.commit(position)
            return
        kv.commit(position)
        self.model.commit(home, groups_of(kv), position)
        if groups_of(kv):
            assert kv.committed == position

    def flush(self) -> None:
        kv, home = self.pick()
        kv.flush()
        if home != "memory":
            self.model.flush(home, groups_of(kv))

    def rollback(self) -> None:
        kv, home = self.pick()
        if home == "memory":
            with pytest.raises(CommitError):
                kv.rollback()
            return
        kv.rollback()
        self.model.rollback(home, groups_of(kv))

    def split(self) -> None:
        kv, home = self.pick()
        groups = groups_of(kv)
        if not groups or len(self.parts) > 5:
            return
        part = self.rng.sample(groups, self.rng.randrange(1, len(groups) + 1))
        (other,) = kv.split([part])
        self.parts.append((other, home))

    def merge(self) -> None:
        (kv, home), (other, there) = self.pick(), self.pick()
        if kv is other:
            return
        groups = groups_of(other)
        same = kv._residence.ledger is other._residence.ledger
        kv.merge(other)
        if same:
            return
        for group in groups:
            if home != "memory":  # it is durable as it came, without a commit
                self.model.kept.setdefault(home, {})[group] = Kept(self.model.now[group])
            if there != "memory":
                self.model.kept[there][group] = Kept()

    def close(self) -> None:
        """Closes a provider that owns nothing, or all in any order, and opens them again."""
        for kv, home in [*self.parts]:
            if not groups_of(kv) and len(self.parts) > 1:
                self.parts.remove((kv, home))
                kv.close()
        if self.rng.random() < 0.5:
            return
        self.rng.shuffle(self.parts)
        held = self.held()
        for kv, home in self.parts:
            kv.close()
            if home != "memory":
                self.model.flush(home, groups_of(kv))
        self.reopen(held)

    def crash(self) -> None:
        held = self.held()
        for kv, _ in self.parts:
            kv._let_go()
        for url in self.urls.values():
            if url.startswith("disk:"):
                place = url.removeprefix("disk:").partition("?")[0]
                if place in DiskHome.places:
                    DiskHome.places[place].crash(self.rng)
        self.reopen(held)

    def held(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"main": [], "other": [], "memory": []}
        for kv, home in self.parts:
            found[home] += groups_of(kv)
        return found

    def reopen(self, held: dict[str, list[int]]) -> None:
        """Opens providers anew. What was in memory is gone: those key-groups are empty."""
        self.parts.clear()
        self.lost_count += 1
        lost, held["memory"] = held["memory"], []
        to = self.rng.choice([*held])
        held[to] += lost
        for group in range(GROUPS):
            if group in lost:
                self.model.now[group] = empty()
        for home, groups in held.items():
            if not groups and home != "main":
                continue
            kv = self.open(home, groups)
            if home != "memory":
                self.model.rollback(home, set(groups) - set(lost))
                check_position(kv, self.model, home)
            check_now(kv, self.model)

    def check(self) -> None:
        for kv, home in self.parts:
            check_now(kv, self.model)
            if home != "memory":
                check_position(kv, self.model, home)
                used = kv._residence.budget
                assert used is not None

    def end(self) -> None:
        for kv, _ in self.parts:
            kv.close()


WEIGHTS = {
    Life.change: 30,
    Life.batch: 8,
    Life.look: 8,
    Life.spill: 14,
    Life.clear: 4,
    Life.fire: 3,
    Life.wait: 3,
    Life.commit: 10,
    Life.flush: 3,
    Life.rollback: 6,
    Life.split: 3,
    Life.merge: 4,
    Life.close: 2,
    Life.crash: 3,
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_home_is_at_its_last_commit_whatever_happened_since(
    url: str, way: str, seed: int
) -> None:
    rng = random.Random(f"{seed} {way}")
    life = Life(url, rng)
    done: list[str] = []
    try:
        for _ in range(STEPS):
            (step,) = rng.choices([*WEIGHTS], [*WEIGHTS.values()])
            done.append(step.__name__)
            step(life)
            if rng.random() < 0.3:
                life.check()
        life.crash()
        life.check()
    except BaseException as error:
        error.add_note(f"{url} seed {seed}, {way}, after {' '.join(done)}")
        raise
    life.end()
    assert life.lost_count
    assert life.pending_seen, "nothing left memory between commits"
    assert read is not None
