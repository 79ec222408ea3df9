"""Frozen: memory and home at one moment, exactly, whatever happens to both afterwards.

The homes are one with snapshots (RocksDB) and three without: a dict, Redis, and the SQLite home
of docs/homes.md. The oracle is a dict that was copied at the moment of freezing.
"""

import random
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
from servers import HOST, RedisServer, redis_server
from test_homes import TestDocumentedHome as DocumentedHome
from test_residence import DictHome
from test_residence import home as home  # a fixture

import statekit as sk
from statekit.errors import HomeError
from statekit.homes import HomeUrl, register_home
from statekit.homes.rocksdb import open_rocksdb
from statekit.native import Block, Store
from statekit.residence import freeze as freeze_module
from statekit.residence.freeze import Frozen

MEMORY = "?memory=64KiB"
HOMES = ["testdict", "rocksdb", "redis", "sqlite"]
Image = dict[str, dict[Any, Any]]

register_home("documented", lambda url, cache_bytes: DocumentedHome().open_home(Path(url.place)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture(params=HOMES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "testdict":
            request.getfixturevalue("home")
            return f"testdict:t{MEMORY}"
        case "rocksdb":
            return f"rocksdb:{tmp_path}/db{MEMORY}"
        case "redis":
            port = request.getfixturevalue("server").port
            return f"redis://{HOST}:{port}/0{MEMORY}&prefix={tmp_path.name}"
        case _:
            return f"documented:{tmp_path}{MEMORY}"


def open_small(url: str) -> sk.KVProvider:
    return sk.open(url, key_groups=4, subgroups=2)


def image_of(frozen: Frozen, names: dict[str, Any] | None = None) -> Image:
    """All entries of a frozen state; each leaf is completed if it was not whole."""
    blocks = dict(frozen.snapshot)
    found: Image = {}
    for leaf in range(frozen.store.leaves):
        data = blocks.get(leaf, b"")
        residency = frozen.snapshot.residency(leaf)
        if residency in ("partial", "absent"):
            data = frozen.complete(leaf, data)
        for block in Block.each(data):
            assert not block.is_delta
            block.check()
            entries = found.setdefault(block.name, {})
            for key, value in block:
                plain = value if isinstance(value, int | float) else plain_value(block.kind, value)
                entries[block.codec.decode(key)] = plain
    return found


def plain_value(kind: str, value: bytes) -> Any:
    if kind == "timers":
        return tuple(memoryview(value).cast("q"))
    return msgpack.unpackb(value, strict_map_key=False)


def without_empty(image: Image) -> Image:
    return {name: dict(entries) for name, entries in image.items() if entries}


class Model:
    """A provider with states of several kinds, and dicts that say what it holds."""

    def __init__(self, kv: sk.KVProvider, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kv = kv
        self.counts = kv.value("counts", int, default=0, key=int)
        self.texts = kv.value("texts", str)
        self.logs = kv.list("logs", int)
        self.image: Image = {"counts": {}, "texts": {}, "logs": {}}

    def copy(self) -> Image:
        return without_empty(
            {
                name: {key: value[:] if isinstance(value, list) else value
                       for key, value in entries.items()}
                for name, entries in self.image.items()
            }
        )  # fmt: skip

    def step(self) -> None:
        rng, image = self.rng, self.image
        key = rng.randrange(600)
        match rng.randrange(8):
            case 0 | 1:
                self.counts.add(key, 3)
                image["counts"][key] = image["counts"].get(key, 0) + 3
            case 2 | 3:
                text = f"{key}" * rng.randrange(1, 40)
                self.texts[f"t{key}"] = image["texts"][f"t{key}"] = text
            case 4:
                self.logs[f"l{key % 90}"].append(key)
                image["logs"].setdefault(f"l{key % 90}", []).append(key)
            case 5:
                assert self.counts.discard(key) == (image["counts"].pop(key, None) is not None)
            case 6:
                assert self.texts.discard(f"t{key}") == (
                    image["texts"].pop(f"t{key}", None) is not None
                )
            case 7:
                assert self.texts.get(f"t{key}") == image["texts"].get(f"t{key}")

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


# ---- Exactness


@pytest.mark.parametrize("seed", range(3))
def test_a_frozen_state_is_that_of_the_moment_whatever_follows(url: str, seed: int) -> None:
    with open_small(url) as kv:
        model = Model(kv, seed)
        model.steps(1500)
        for turn in range(4):
            expected = model.copy()
            with kv._residence.freeze() as frozen:
                assert frozen.has_home
                model.steps(400)
                if turn == 1:
                    kv.flush()
                if turn == 2:
                    model.texts.clear()
                    model.image["texts"].clear()
                if turn == 3:
                    model.counts.clear()
                    model.logs.clear()
                    model.image["counts"].clear()
                    model.image["logs"].clear()
                    model.steps(400)
                assert image_of(frozen) == expected
        assert kv.metrics().states["texts"].spills
        assert dict(model.texts.items()) == model.image["texts"]


def test_states_that_nobody_has_declared_are_in_it(url: str) -> None:
    with open_small(url) as kv:
        model = Model(kv, 1)
        kv.timers("due").set("k", 70)
        model.steps(1500)
        expected = model.copy() | {"due": {"k": (70,)}}
    with open_small(url) as kv:
        with kv._residence.freeze() as frozen:
            assert image_of(frozen) == expected
        kv.value("texts", str)["new"] = "x"
        kv.value("texts", str).discard("t1")
        expected["texts"].pop("t1", None)
        with kv._residence.freeze() as frozen:
            kv.value("texts", str)["new"] = "y"
            expected["texts"]["new"] = "x"
            assert image_of(frozen) == expected


def test_several_frozen_states_do_not_disturb_each_other(url: str) -> None:
    with open_small(url) as kv:
        model = Model(kv, 5)
        held = []
        for _ in range(4):
            model.steps(500)
            held.append((kv._residence.freeze(), model.copy()))
        model.steps(500)
        for frozen, expected in reversed(held):
            assert image_of(frozen) == expected
            frozen.close()
            frozen.close()
        assert kv._residence._frozen == []


def test_causes_are_in_it_if_their_effects_are(url: str) -> None:
    """Writers count x and then y: at every moment y <= x <= y + 1, for each of them."""
    with open_small(url) as kv:
        x, y = kv.value("x", int, default=0), kv.value("y", int, default=0)
        filler = kv.value("filler", str)
        keys = [f"k{at}" for at in range(120)]
        is_over = threading.Event()
        failures: list[BaseException] = []

        def write(mine: list[str]) -> None:
            rng = random.Random(mine[0])
            try:
                while not is_over.is_set():
                    key = rng.choice(mine)
                    x.add(key, 1)
                    filler[f"{key}-{rng.randrange(40)}"] = "f" * rng.randrange(300)
                    y.add(key, 1)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(keys[at::3],)) for at in range(3)]
        for thread in threads:
            thread.start()
        try:
            before: dict[str, int] = {}
            for turn in range(1000):  # so many that writers need the home even on a busy machine
                if turn >= 6 and kv.metrics().states["filler"].spills:
                    break
                with kv._residence.freeze() as frozen:
                    image = image_of(frozen)
                xs, ys = image.get("x", {}), image.get("y", {})
                ahead = {key: xs.get(key, 0) - ys.get(key, 0) for key in keys}
                assert set(ahead.values()) <= {0, 1}
                assert sum(ahead.values()) <= len(threads)
                assert all(xs.get(key, 0) >= count for key, count in before.items())
                before = xs
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert failures == []
        assert kv.metrics().states["filler"].spills


def test_expired_rows_are_left_out(url: str) -> None:
    with open_small(url) as kv:
        store = kv._residence.store
        store.set_time("processing", 1_000)
        short = kv.value("short", str, ttl=60)
        for at in range(300):
            short[f"k{at}"] = "x" * 300
        store.set_time("processing", 31_000)
        short["k7"] = "young"
        store.set_time("processing", 61_000)
        with kv._residence.freeze() as frozen:
            # The scratch store of the frozen state uses the system's clock: set it like ours.
            assert frozen._assembly is not None
            frozen._assembly._scratch.set_time("processing", 61_000)
            assert image_of(frozen) == {"short": {"k7": "young"}}


def test_sweeping_does_not_reach_into_it(url: str) -> None:
    with open_small(url) as kv:
        kv.advance_watermark(1_000)
        short = kv.value("short", int, ttl=sk.TTL(10, time="event"))
        keep = {f"k{at}": at for at in range(400)}
        short.update(keep)
        kv.value("filler", str).update({f"k{at}": "f" * 400 for at in range(300)})
        with kv._residence.freeze() as frozen:
            kv.advance_watermark(100_000)
            assert kv.sweep() == 400
            assert len(short) == 0
            found = image_of(frozen)["short"]
            # Memory's snapshot may leave out what has expired since (csrc/ttl.c), but nothing else.
            assert found.items() <= keep.items()
            assert len(found) > 200


# ---- Leaves that go


def test_leaves_that_are_split_off_or_given_away_stay_in_it(url: str) -> None:
    with open_small(url) as kv:
        model = Model(kv, 3)
        model.steps(1500)
        expected = model.copy()
        elsewhere = sk.open("memory:", key_groups=4, subgroups=2, owned=[])
        with kv._residence.freeze() as frozen, elsewhere:
            (part,) = kv.split([range(1, 3)])
            texts = part.value("texts", str)
            texts.update(dict.fromkeys(texts.keys(), "changed by the sibling"))
            part.flush()
            elsewhere.merge(part)
            elsewhere.value("texts", str).clear()
            part.close()
            assert image_of(frozen) == expected


def test_the_leaves_of_a_sibling_are_not_copied(home: DictHome) -> None:
    with open_small(f"testdict:t{MEMORY}") as kv:
        Model(kv, 4).steps(1500)
        (part,) = kv.split([range(2, 4)])
        texts = part.value("texts", str)
        with kv._residence.freeze() as frozen, part:
            guard = frozen.guard
            assert guard is not None
            texts.update(dict.fromkeys(texts.keys(), "x" * 200))
            part.flush()
            assert guard._aside == {}
            kv.flush()
            assert {leaf // 2 for leaf in guard._aside} <= {0, 1}


def test_leaves_that_come_are_not_in_it(home: DictHome) -> None:
    with open_small(f"testdict:t{MEMORY}") as kv:
        model = Model(kv, 6)
        model.steps(1200)
        (part,) = kv.split([range(2)])
        with part._residence.freeze() as theirs, kv._residence.freeze() as ours:
            kv.merge(part)
            model.steps(500)
            kv.flush()
            left, right = image_of(theirs), image_of(ours)
        part.close()
        for name in ("counts", "texts", "logs"):
            assert not left.get(name, {}).keys() & right.get(name, {}).keys()
            for half, groups in ((left, (0, 1)), (right, (2, 3))):
                assert {kv.key_group_of(key) for key in half.get(name, {})} <= set(groups)


# ---- Copies


def test_copies_beyond_the_limit_wait_in_a_file(
    home: DictHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freeze_module, "_ASIDE_BYTES_MAX", 1000)
    with open_small(f"testdict:t{MEMORY}") as kv:
        model = Model(kv, 8)
        model.steps(2000)
        expected = model.copy()
        with kv._residence.freeze() as frozen:
            model.steps(2000)
            kv.flush()
            assert frozen.guard is not None
            assert len(frozen.guard._aside) == 8
            assert frozen.guard._file._rolled  # type: ignore[attr-defined]
            assert image_of(frozen) == expected
            assert frozen.guard._aside == {}


def test_a_copy_that_cannot_be_made_fails_the_reader_and_not_the_writer(home: DictHome) -> None:
    with open_small(f"testdict:t{MEMORY}") as kv:
        model = Model(kv, 9)
        model.steps(1500)
        with kv._residence.freeze() as frozen:
            home.fails = lambda call: call == "load"
            kv.flush()
            home.fails = lambda call: False
            with pytest.raises(HomeError, match="load fails"):
                image_of(frozen)
        assert dict(model.texts.items()) == model.image["texts"]
        with kv._residence.freeze() as frozen:
            assert image_of(frozen) == model.copy()


def test_freezing_that_fails_leaves_nothing_behind(home: DictHome) -> None:
    with open_small(f"testdict:t{MEMORY}") as kv:
        Model(kv, 9).steps(500)

        def fail(store: Store) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            kv._residence.freeze(fail)
        assert kv._residence._frozen == []


def test_memory_alone_needs_no_completing() -> None:
    with open_small("memory:") as kv:
        model = Model(kv, 2)
        model.steps(500)
        expected = model.copy()
        with kv._residence.freeze() as frozen:
            assert not frozen.has_home
            assert frozen.source is None
            model.steps(500)
            assert image_of(frozen) == expected


def test_the_plan_is_made_at_the_moment_of_freezing(home: DictHome) -> None:
    with open_small("memory:") as kv:
        counts = kv.value("counts", int, default=0, key=int)
        counts.put_many(list(range(100)), list(range(100)))
        store = kv._residence.store
        epoch = store.advance_epoch()
        counts[7] = -7
        with kv._residence.freeze(lambda store: array("I", [epoch]) * store.leaves) as frozen:
            assert frozen.since is not None
            changed = [
                entry for _, data in frozen.snapshot for b in Block.each(data) for entry in b
            ]
            assert [value for _, value in changed] == [-7]


# ---- RocksDB


def test_rocksdb_snapshots_do_not_outlive_their_home(tmp_path: Path) -> None:
    path = HomeUrl.parse(f"rocksdb:{tmp_path}/db")
    home = open_rocksdb(path, 16 << 20)
    home.write([((1, 1, b"a"), b"1")])
    snapshot = home.snapshot()
    assert snapshot is not None
    home.close()
    with pytest.raises(HomeError):
        list(snapshot.load(1, 1))
    snapshot.close()
    open_rocksdb(path, 16 << 20).close()  # the lock is free


def test_rocksdb_snapshot_is_read_by_several_threads(tmp_path: Path) -> None:
    home = open_rocksdb(HomeUrl.parse(f"rocksdb:{tmp_path}/db"), 16 << 20)
    rows = {leaf: {b"%d" % at: b"%d" % (at * leaf) for at in range(500)} for leaf in range(8)}
    home.write([((leaf, 1, key), value) for leaf in rows for key, value in rows[leaf].items()])
    snapshot = home.snapshot()
    assert snapshot is not None
    failures: list[int] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            leaf = rng.randrange(8)
            if dict(snapshot.load(leaf, 1)) != rows[leaf] or list(snapshot.load(leaf, 0)):
                failures.append(leaf)
            with suppress(HomeError):
                home.write([((leaf, 1, b"%d" % rng.randrange(500)), None)])

    run_all([partial(read, seed) for seed in range(4)])
    assert failures == []
    home.close()


def run_all(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
