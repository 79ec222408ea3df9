"""Restoring gives back what was there, whichever call touches it first, and however it is divided.

Half of the tests have a source in memory that can be told to wait or to fail; the others have real
checkpoints. The oracle is a dict of what was put in.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
from servers import HOST, RedisServer, redis_server
from test_freeze import image_of
from test_residence import DictHome
from test_residence import home as home  # a fixture

import statekit as sk
from statekit.checkpoint.reader import Checkpoint, read_runs
from statekit.checkpoint.retention import collect
from statekit.checkpoint.union import Union, unite
from statekit.errors import (
    ArgumentError,
    ClosedError,
    DamagedError,
    HomeError,
    MemoryLimitError,
    NoCheckpointError,
    NotOwnedError,
    OccupiedError,
    SchemaError,
    StorageError,
)
from statekit.format.manifest import manifest_name
from statekit.native import Block
from statekit.provider.restore import _restore_here
from statekit.residence.sources import CheckpointSource, PullSource, open_pinned
from statekit.schema import StateSchema
from statekit.storage import open_storage

SECONDS_MAX = 120.0
Image = dict[str, dict[Any, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


# ---- A source in memory


class MemorySource(PullSource):
    """Chains in a dict. `before_read` may wait or raise."""

    def __init__(self, chains: dict[int, list[bytes]]) -> None:
        super().__init__()
        self.chains = chains  # oldest first
        self.reads: Counter[int] = Counter()
        self.before_read: Callable[[int], None] = lambda leaf: None
        self.is_closed = False

    def read_leaf(self, leaf: int) -> list[bytes]:
        if self.is_closed:
            raise StorageError("the source is closed.")
        self.reads[leaf] += 1
        self.before_read(leaf)
        steps, done = [], set()
        for step in reversed(self.chains.get(leaf, [])):
            blocks = pieces(step)
            steps.append(b"".join(data for name, _, data in blocks if name not in done))
            done |= {name for name, is_delta, _ in blocks if not is_delta}
        return steps

    def _close(self) -> None:
        self.is_closed = True


def pieces(blocks: bytes) -> list[tuple[str, bool, bytes]]:
    found = []
    at = 0
    for block in Block.each(blocks):
        found.append((block.name, block.is_delta, blocks[at : at + block.size]))
        at += block.size
    return found


class World:
    """States of several kinds, filled at random over several rounds, each a step of the chains."""

    def __init__(self, seed: int, rounds: int = 3, groups: int = 4, subgroups: int = 2) -> None:
        rng = random.Random(seed)
        self.groups, self.subgroups = groups, subgroups
        self.kv = sk.open("memory:", key_groups=groups, subgroups=subgroups)
        self.image: Image = {"counts": {}, "texts": {}, "logs": {}, "due": {}}
        self.chains: dict[int, list[bytes]] = {}
        states = declare(self.kv)
        store = self.kv._residence.store
        epoch = 0
        for _ in range(rounds):
            for _ in range(400):
                change(rng, states, self.image)
            for leaf in range(store.leaves):
                blocks = store.encode_leaf(leaf, since=epoch)
                if blocks:
                    self.chains.setdefault(leaf, []).append(blocks)
            epoch = store.advance_epoch()
            store.track(epoch)

    def schemas(self) -> list[StateSchema]:
        return list(self.kv.schemas.values())

    def source(self) -> MemorySource:
        return MemorySource(dict(self.chains))

    def restored(
        self,
        source: PullSource | None = None,
        owned: Sequence[range] | None = None,
        *,
        background: bool = False,
        budget: int | None = None,
    ) -> sk.KVProvider:
        mine = (range(self.groups),) if owned is None else tuple(owned)
        plan = Union((), self.groups, self.subgroups, mine, (), self.schemas(), None)
        return _restore_here(plan, mine, source or self.source(), budget, True, background)  # type: ignore[arg-type]

    def copy(self) -> Image:
        return copied(self.image)


def copied(image: Image) -> Image:
    return {
        name: {key: value[:] if isinstance(value, list) else value
               for key, value in entries.items()}
        for name, entries in image.items()
    }  # fmt: skip


def declare(kv: sk.KVProvider) -> dict[str, Any]:
    return {
        "counts": kv.value("counts", int, default=0, key=int),
        "texts": kv.value("texts", str),
        "logs": kv.list("logs", int),
        "due": kv.timers("due"),
    }


def change(rng: random.Random, states: dict[str, Any], image: Image) -> None:
    """One operation on the states and on the dicts; the answers must agree."""
    key = rng.randrange(150)
    counts, texts, logs, due = (states[name] for name in ("counts", "texts", "logs", "due"))
    match rng.randrange(14):
        case 0:
            expected = image["counts"].get(key, 0) + 3
            assert counts.add(key, 3) == expected
            image["counts"][key] = expected
        case 1:
            counts[key] = image["counts"][key] = rng.randrange(1000)
        case 2:
            assert counts.discard(key) == (image["counts"].pop(key, None) is not None)
        case 3:
            assert counts[key] == image["counts"].get(key, 0)
        case 4 | 5:
            texts[f"t{key}"] = image["texts"][f"t{key}"] = f"{key}" * rng.randrange(1, 9)
        case 6:
            assert texts.discard(f"t{key}") == (image["texts"].pop(f"t{key}", None) is not None)
        case 7:
            assert texts.get(f"t{key}") == image["texts"].get(f"t{key}")
        case 8:
            logs[f"l{key % 40}"].append(key)
            image["logs"].setdefault(f"l{key % 40}", []).append(key)
        case 9:
            assert logs[f"l{key % 40}"].copy() == image["logs"].get(f"l{key % 40}", [])
        case 10:
            due.set(f"d{key % 50}", key)
            times = {*image["due"].get(f"d{key % 50}", ()), key}
            image["due"][f"d{key % 50}"] = tuple(sorted(times))
        case 11:
            keys = [rng.randrange(150) for _ in range(20)]
            counts.add_many(keys, 2)
            for one in keys:
                image["counts"][one] = image["counts"].get(one, 0) + 2
        case 12:
            keys = [rng.randrange(150) for _ in range(20)]
            found = texts.get_many([f"t{one}" for one in keys])
            assert list(found) == [image["texts"].get(f"t{one}") for one in keys]
        case 13:
            keys = list({rng.randrange(150) for _ in range(5)})
            gone = sum(image["counts"].pop(one, None) is not None for one in keys)
            assert counts.delete_many(keys) == gone


def held(states: dict[str, Any]) -> Image:
    return {
        name: {key: value if isinstance(value, tuple | int | str) else list(value)
               for key, value in state.items()}
        for name, state in states.items()
    }  # fmt: skip


def run_all(calls: Sequence[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS_MAX)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


# ---- Touching


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("background", [False, True])
def test_what_comes_is_under_what_is_here(seed: int, background: bool) -> None:
    print(f"seed = {seed}")
    world = World(seed, rounds=1 + seed % 4)
    rng = random.Random(seed)
    kv = world.restored(background=background)
    states, image = declare(kv), world.copy()
    for _ in range(300):
        change(rng, states, image)
    if seed % 2:
        assert held(states) == image
    else:
        kv.wait_loaded(SECONDS_MAX)
        assert kv.loading is None
    for _ in range(200):
        change(rng, states, image)
    assert held(states) == image
    kv.wait_loaded(SECONDS_MAX)
    assert kv.loading is None
    for _ in range(200):
        change(rng, states, image)
    assert held(states) == image
    kv.close()


def test_a_touch_reads_one_leaf_and_once() -> None:
    world = World(1)
    source = world.source()
    with world.restored(source) as kv:
        texts = kv.value("texts", str)
        keys = sorted(world.image["texts"])
        assert source.reads == {}
        assert texts[keys[0]] == world.image["texts"][keys[0]]
        assert sum(source.reads.values()) == 1
        assert "nothing" not in texts
        loading = kv.loading
        assert loading is not None
        assert loading.leaves_total == 8
        assert 1 <= loading.leaves_done <= 2
        for _ in range(2):
            assert texts.get_many(keys).to_list() == [world.image["texts"][key] for key in keys]
        assert set(source.reads.values()) == {1}
        kv.wait_loaded(SECONDS_MAX)
        assert set(source.reads.values()) == {1}
        assert len(source.reads) == 8
        assert source.is_closed
        assert kv.loading is None
        kv.wait_loaded()


def test_writing_without_reading_loads_nothing() -> None:
    world = World(2)
    source = world.source()
    with world.restored(source) as kv:
        texts = kv.value("texts", str)
        keys = [f"t{at}" for at in range(150)]
        texts.put_many(keys, keys)
        texts["one"] = "1"
        assert source.reads == {}
        assert len(texts) == 151
        assert dict(texts.items()) == dict(zip(keys, keys, strict=True)) | {"one": "1"}


@pytest.mark.parametrize(
    "look",
    [
        len,
        bool,
        lambda state: sorted(state.keys()),
        lambda state: sorted(state.items()),
        lambda state: state.to_arrow().num_rows,
        lambda state: sorted(state.to_arrow()["value"].to_pylist()),
        lambda state: state.contains_many([*range(200)]),
        lambda state: state.get_many([*range(200)]).to_list(),
        lambda state: state.clear() or list(state.items()),
        lambda state: state.delete_many([*range(200)]),
        lambda state: [state.compare_and_set(at, None, 1) for at in range(150)],
    ],
)
def test_every_way_to_look_at_a_state_sees_all_of_it(look: Callable[[Any], Any]) -> None:
    world = World(3)
    with world.restored() as kv:
        assert look(kv.value("counts", int, default=0, key=int)) == look(world.kv["counts"])
        assert held({"counts": kv["counts"]}) == held({"counts": world.kv["counts"]})


def test_batches_of_tuples_and_arrays_bring_their_leaves() -> None:
    world = World(3, rounds=1)
    pairs = world.kv.value("pairs", int, key=tuple[str, int])
    keys = [(f"k{at}", at) for at in range(100)]
    pairs.put_many(keys, numpy.arange(100))
    store = world.kv._residence.store
    world.chains = {leaf: [store.encode_leaf(leaf)] for leaf in range(store.leaves)}
    with world.restored() as kv:
        pairs = kv.value("pairs", int, key=tuple[str, int])
        assert pairs.get_many(keys[::3]).to_list() == list(range(0, 100, 3))
        counts = kv.value("counts", int, default=0, key=int)
        some = numpy.arange(40)
        expected = [world.image["counts"].get(key, 0) for key in range(40)]
        assert counts.get_many(some).to_list() == expected
        columns = [[key[0] for key in keys], [key[1] for key in keys]]
        pairs.add_many(tuple(columns), 5)
        assert sum(pairs.values()) == sum(range(100)) + 500


def test_clearing_one_state_leaves_the_others() -> None:
    world = World(4)
    with world.restored() as kv:
        states = declare(kv)
        states["texts"].clear()
        assert held(states) == world.copy() | {"texts": {}}
        kv.wait_loaded(SECONDS_MAX)
        assert held(states) == world.copy() | {"texts": {}}


def test_timers_are_in_sight_though_the_rest_has_not_come() -> None:
    world = World(5)
    source = world.source()
    with world.restored(source) as kv:
        due = kv.timers("due")
        assert kv._residence.store.stats().whole == 0
        entries = {raw.name: kv._residence.store.stats(raw).entries
                   for raw in kv._residence.store.states()}  # fmt: skip
        assert entries["due"] == len(world.image["due"])
        assert entries["texts"] == 0
        expected = sorted((at, key) for key, times in world.image["due"].items() for at in times)
        assert due.next_due == expected[0][0]
        fired = [timer for timer in expected if timer[0] <= 75]
        assert [(timer.due, timer.key) for timer in due.pop_due(75)] == fired
        kv.wait_loaded(SECONDS_MAX)
        rest = due.pop_due(1000)
        assert [(timer.due, timer.key) for timer in rest] == expected[len(fired) :]


def test_loading_is_no_change() -> None:
    world = World(6)
    with world.restored() as kv:
        store = kv._residence.store
        epoch = store.epoch - 1
        assert epoch >= 1
        texts = kv.value("texts", str)
        assert len(texts) == len(world.image["texts"])
        kv.wait_loaded(SECONDS_MAX)
        assert set(store.changed_leaves(epoch)) == {0}
        texts["t1"] = "changed"
        assert sum(store.changed_leaves(epoch)) == 1


# ---- Threads


def test_one_of_several_threads_reads_a_leaf() -> None:
    world = World(7)
    source = world.source()
    reached, go = threading.Event(), threading.Event()

    def wait(leaf: int) -> None:
        reached.set()
        assert go.wait(SECONDS_MAX)

    source.before_read = wait
    with world.restored(source) as kv:
        texts = kv.value("texts", str)
        key, value = next(iter(world.image["texts"].items()))
        found: list[str] = []

        def read() -> None:
            found.append(texts[key])

        def release() -> None:
            assert reached.wait(SECONDS_MAX)
            texts["elsewhere"] = "writes do not wait"
            go.set()

        run_all([*[read] * 6, release])
        assert found == [value] * 6
        assert sum(source.reads.values()) == 1


@pytest.mark.parametrize("seed", range(3))
def test_threads_change_their_keys_while_everything_comes(seed: int) -> None:
    world = World(seed + 20, groups=8, subgroups=8)
    kv = world.restored(background=True)
    counts = kv.value("counts", int, default=0, key=int)
    texts = kv.value("texts", str)
    final: list[Image] = []

    def work(worker: int) -> None:
        rng = random.Random(f"{seed} {worker}")
        numbers = {k: v for k, v in world.image["counts"].items() if k % 4 == worker}
        words = {k: v for k, v in world.image["texts"].items() if int(k[1:]) % 4 == worker}
        for _ in range(1500):
            key = rng.randrange(150) // 4 * 4 + worker
            match rng.randrange(6):
                case 0:
                    numbers[key] = numbers.get(key, 0) + 1
                    assert counts.add(key, 1) == numbers[key]
                case 1:
                    assert counts[key] == numbers.get(key, 0)
                case 2:
                    assert counts.discard(key) == (numbers.pop(key, None) is not None)
                case 3:
                    assert texts.get(f"t{key}") == words.get(f"t{key}")
                case 4:
                    texts[f"t{key}"] = words[f"t{key}"] = f"{rng.random()}"
                case 5:
                    keys = [rng.randrange(37) * 4 + worker for _ in range(8)]
                    assert counts.get_many(keys).to_list() == [numbers.get(one, 0) for one in keys]
        final.append({"counts": numbers, "texts": words})

    run_all([lambda worker=worker: work(worker) for worker in range(4)])  # type: ignore[misc]
    kv.wait_loaded(SECONDS_MAX)
    expected = {name: {k: v for part in final for k, v in part[name].items()}
                for name in ("counts", "texts")}  # fmt: skip
    assert held({"counts": counts, "texts": texts}) == expected
    kv.close()


def test_closing_while_leaves_are_on_their_way() -> None:
    world = World(8)
    source = world.source()
    reached, go = threading.Event(), threading.Event()

    def wait(leaf: int) -> None:
        reached.set()
        assert go.wait(SECONDS_MAX)

    source.before_read = wait
    kv = world.restored(source, background=True)
    texts = kv.value("texts", str)
    assert reached.wait(SECONDS_MAX)
    loading = kv.loading
    assert loading is not None
    with pytest.raises(TimeoutError, match="0 of 8 leaves"):
        kv.wait_loaded(0.01)
    closer = threading.Thread(target=kv.close)
    closer.start()
    while not loading._is_stopped:
        assert closer.is_alive()
    go.set()
    closer.join(SECONDS_MAX)
    assert not closer.is_alive()
    assert source.is_closed
    assert kv.loading is None
    with pytest.raises(ClosedError):
        texts.get("t1")
    with pytest.raises(ClosedError):
        kv.wait_loaded()
    assert repr(loading) == "<Loading, closed>"


# ---- Types


@pytest.mark.parametrize("loaded", ["nothing", "half", "all"])
def test_types_may_have_evolved(loaded: str) -> None:
    world = World(9)
    with world.restored() as kv:
        if loaded == "half":
            kv._residence.load_leaves(range(4))
        elif loaded == "all":
            kv.wait_loaded(SECONDS_MAX)
        counts = kv.value("counts", float, key=int)
        texts = kv.value("texts", str, ttl=60)
        assert {type(counts[key]) for key in world.image["counts"]} == {float}
        assert dict(counts.items()) == world.image["counts"]
        assert dict(texts.items()) == world.image["texts"]
        assert counts.add(1000, 0.5) == 0.5
        assert kv.value("counts", float, key=int)[1000] == 0.5
        with pytest.raises(SchemaError):
            kv.value("counts", int, key=int)
        with pytest.raises(SchemaError):
            kv.value("logs", int)


@pytest.mark.parametrize("loaded", ["nothing", "half", "all"])
def test_a_time_to_live_may_be_removed(loaded: str) -> None:
    world = World(10, rounds=1)
    store = world.kv._residence.store
    timed = world.kv.value("timed", int, ttl=60)
    timed.update({f"k{at}": at for at in range(100)})
    world.chains = {leaf: [store.encode_leaf(leaf)] for leaf in range(store.leaves)}
    with world.restored() as kv:
        if loaded == "half":
            kv._residence.load_leaves(range(4))
        elif loaded == "all":
            kv.wait_loaded(SECONDS_MAX)
        plain = kv.value("timed", float)
        assert dict(plain.items()) == {f"k{at}": at for at in range(100)}
        assert not kv._residence.store.state("timed", "f64").timed


def test_a_state_is_declared_with_another_type_while_blocks_are_on_their_way() -> None:
    world = World(11, groups=8, subgroups=8)
    for turn in range(20):
        source = world.source()
        start = threading.Barrier(2)
        kv = world.restored(source)

        def load(kv: sk.KVProvider = kv, start: threading.Barrier = start) -> None:
            start.wait()
            kv.wait_loaded(SECONDS_MAX)

        def use(kv: sk.KVProvider = kv, start: threading.Barrier = start, turn: int = turn) -> None:
            start.wait()
            if turn % 2:
                kv._residence.load_leaves(range(20))
            counts = kv.value("counts", float, key=int)
            assert dict(counts.items()) == world.image["counts"]

        run_all([load, use])
        assert kv.loading is None
        kv.close()


# ---- Errors


def test_a_leaf_that_is_damaged_raises_and_the_others_work() -> None:
    world = World(12)
    source = world.source()
    bad = 3

    def fail(leaf: int) -> None:
        if leaf == bad:
            raise DamagedError("this leaf is bad.", file="x.pack", offset=64)

    source.before_read = fail
    kv = world.restored(source, background=True)
    loading = kv.loading
    assert loading is not None
    for _ in range(2):
        with pytest.raises(DamagedError) as caught:
            kv.wait_loaded(SECONDS_MAX)
        assert (caught.value.file, caught.value.offset) == ("x.pack", 64)
    assert kv.loading is loading
    assert set(loading.errors) == {bad}
    assert "1 failed" in repr(loading)
    counts = kv.value("counts", int, default=0, key=int)
    leaf_of = counts._raw.leaf_of_encoded
    for key in range(150):
        if leaf_of(counts._raw.codec.encode(key)) == bad:
            for _ in range(2):
                with pytest.raises(DamagedError):
                    counts.add(key, 1)
            with pytest.raises(DamagedError):
                counts.get_many([key])
            counts[key] = 77  # a write needs nothing of what is lost
            assert counts[key] == 77
        else:
            assert counts[key] == world.image["counts"].get(key, 0)
    for look in (len, lambda state: dict(state.items()), lambda state: state.clear()):
        with pytest.raises(DamagedError):
            look(counts)
    source.before_read = lambda leaf: None  # the storage was repaired
    kv.wait_loaded(SECONDS_MAX)
    assert kv.loading is None
    kv.close()


def test_an_error_that_passes_is_forgotten_when_the_leaf_is_touched() -> None:
    world = World(13)
    source = world.source()

    def fail(leaf: int) -> None:
        raise StorageError("no network.")

    source.before_read = fail
    kv = world.restored(source, background=True)
    with pytest.raises(StorageError):
        kv.wait_loaded(SECONDS_MAX)
    loading = kv.loading
    assert loading is not None
    assert len(loading.errors) == 8
    source.before_read = lambda leaf: None
    counts = kv.value("counts", int, key=int)
    assert dict(counts.items()) == world.image["counts"]
    assert loading.errors == {}
    assert loading.wait(SECONDS_MAX)
    assert kv.loading is None  # touching the last leaf ended it
    kv.close()


def test_an_error_that_nobody_foresaw_leaves_nobody_waiting() -> None:
    world = World(13)
    source = world.source()

    def fail(leaf: int) -> None:
        raise RuntimeError("surprise")

    source.before_read = fail
    kv = world.restored(source, background=True)
    with pytest.raises(StorageError, match="surprise"):
        kv.wait_loaded(SECONDS_MAX)
    with pytest.raises(RuntimeError, match="surprise"):
        kv.value("texts", str).get("t1")
    kv.close()


def test_a_block_that_is_not_well_formed_is_damage() -> None:
    world = World(14)
    source = world.source()
    leaf = next(iter(world.chains))
    source.chains[leaf] = [b"SKB1" + bytes(60)]
    with world.restored(source) as kv, pytest.raises(DamagedError, match="not well-formed"):
        kv.wait_loaded(SECONDS_MAX)


def test_memory_that_does_not_suffice_is_said() -> None:
    world = World(15)
    kv = world.restored(background=True, budget=2000)
    with pytest.raises(MemoryLimitError):
        kv.wait_loaded(SECONDS_MAX)
    texts = kv.value("texts", str)
    with pytest.raises(MemoryLimitError):
        list(texts.items())
    kv.close()


# ---- Splitting and merging


@pytest.mark.parametrize("background", [False, True])
def test_splitting_and_merging_while_leaves_come(background: bool) -> None:
    for seed in range(30, 36):
        print(f"seed = {seed}")
        rng = random.Random(seed)
        world = World(seed)
        source = world.source()
        kv = world.restored(source, background=background)
        declare(kv)
        image = world.copy()
        parts = [kv]
        for _ in range(8):
            whole = rng.choice(parts)
            groups = [group for part in whole.key_groups for group in part]
            if len(parts) < 4 and len(groups) > 1 and rng.random() < 0.6:
                some = rng.sample(groups, rng.randrange(1, len(groups)))
                parts += whole.split([some])
            elif len(parts) > 1:
                other = rng.choice([part for part in parts if part is not whole])
                whole.merge(other)
                if other is not kv:
                    other.close()
                    parts.remove(other)
            for key in rng.sample(sorted(image["texts"]), 5):
                owner = kv.owner_of(key)
                assert owner is not None
                assert owner["texts"][key] == image["texts"][key]
                owner["texts"][key] = image["texts"][key] = f"{rng.random()}"
        found: Image = {name: {} for name in image}
        for part in parts:
            for name, entries in held(declare(part)).items():
                assert not entries.keys() & found[name].keys()
                found[name] |= entries
            part.wait_loaded(SECONDS_MAX)
            assert part.loading is None
        assert found == image
        assert source.is_closed
        for part in parts:
            part.close()


def test_a_split_off_provider_outlives_the_one_it_came_from() -> None:
    world = World(16)
    source = world.source()
    kv = world.restored(source)
    (part,) = kv.split([range(2, 4)])
    kv.close()
    assert not source.is_closed
    texts = part.value("texts", str)
    mine = {key: value for key, value in world.image["texts"].items()
            if part.key_group_of(key) in (2, 3)}  # fmt: skip
    assert dict(texts.items()) == mine
    part.close()
    assert source.is_closed


def test_providers_of_different_sources_are_merged() -> None:
    world = World(17)
    left = world.restored(world.source(), [range(2)])
    right = world.restored(world.source(), [range(2, 4)])
    declare(left)
    theirs = next(key for key in world.image["counts"] if left.key_group_of(key) >= 2)
    with pytest.raises(NotOwnedError):
        left["counts"].add(theirs, 0)
    left.merge(right)
    assert held(declare(left)) == world.image
    left.wait_loaded(SECONDS_MAX)
    assert left.loading is None
    left.close()
    right.close()


def test_a_merge_that_needs_a_damaged_leaf_changes_nothing() -> None:
    world = World(18)
    left = world.restored(world.source(), [range(2)])
    source = world.source()
    right = world.restored(source, [range(2, 4)])

    def fail(leaf: int) -> None:
        raise DamagedError("this leaf is bad.", file="x.pack", offset=64)

    source.before_read = fail
    with pytest.raises(DamagedError):
        left.merge(right)
    assert right.key_groups == (range(2, 4),)
    source.before_read = lambda leaf: None
    left.merge(right)
    assert held(declare(left)) == world.image
    left.close()
    right.close()


def test_merging_into_and_from_a_provider_with_a_home(home: DictHome) -> None:
    world = World(19)
    kv = world.restored()
    declare(kv)
    at_home = sk.open("testdict:t?memory=64KiB", key_groups=4, subgroups=2, owned=[])
    (part,) = kv.split([range(1, 3)])
    at_home.merge(part)
    states = declare(at_home)
    merged = held(states)
    for name, entries in held(declare(kv)).items():
        assert not merged[name].keys() & entries.keys()
        merged[name] |= entries
    assert merged == world.image
    again = world.restored(world.source(), [range(1), range(3, 4)])
    again.merge(at_home)
    assert held(declare(again)) == world.image
    for one in (kv, part, at_home, again):
        one.close()


# ---- Freezing


def test_what_has_not_come_is_in_a_frozen_state() -> None:
    seen = 0
    for seed in range(40, 50):
        world = World(seed)
        rng = random.Random(seed)
        source = world.source()
        kv = world.restored(source)
        states, image = declare(kv), world.copy()
        for _ in range(4):
            change(rng, states, image)
        if kv.loading is None:  # all leaves were touched
            kv.close()
            continue
        seen += 1
        expected = {name: dict(entries) for name, entries in copied(image).items() if entries}
        with kv._residence.freeze() as frozen:
            assert frozen.source is source
            assert not frozen.has_home
            for _ in range(200):
                change(rng, states, image)
            kv.wait_loaded(SECONDS_MAX)
            assert kv.loading is None
            assert not source.is_closed
            assert image_of(frozen) == expected
        assert source.is_closed
        kv.close()
    assert seen >= 3


# ---- Several places


def workers(tmp_path: Path, count: int = 3) -> tuple[list[str], dict[str, int]]:
    """The places of `count` workers, and what they hold together."""
    kv = sk.open("memory:", key_groups=8, subgroups=2)
    expected = {f"k{i}": i for i in range(100)}
    kv.value("counts", int).update(expected)
    places = [str(tmp_path / f"worker-{at}") for at in range(count)]
    for part, place in zip(kv.split(sk.assign(8, count)), places, strict=True):
        part.checkpoint(place)
    return places, expected


def test_several_places_that_do_not_have_all_key_groups_are_refused(tmp_path: Path) -> None:
    places, expected = workers(tmp_path)
    with sk.restore(places) as kv:
        assert dict(kv.value("counts", int).items()) == expected
    first, middle, last = sk.assign(8, 3)
    for some, hole in (
        (places[:2], last),
        (places[1:], first),
        ([places[0], places[2]], middle),
    ):
        with pytest.raises(ArgumentError) as caught:
            sk.restore(some)
        assert f"key-groups {hole.start}-{hole.stop - 1} of 8 are in none" in str(caught.value)
        assert 'missing="ok"' in str(caught.value)
        assert all(not open_storage(one).is_pinned(manifest_name(1)) for one in some)
        with sk.restore(some, missing="ok") as kv:
            assert not any(group in part for part in kv.key_groups for group in hole)
            rest = {key: n for key, n in expected.items() if kv.key_group_of(key) not in hole}
            assert dict(kv.value("counts", int).items()) == rest


def test_what_is_asked_for_by_key_group_may_be_less_than_all(tmp_path: Path) -> None:
    places, _ = workers(tmp_path)
    with sk.restore(places[:2], key_groups=[0, 1, 2]) as kv:
        assert kv.key_groups == (range(3),)
    with pytest.raises(ArgumentError, match="7"):
        sk.restore(places[:2], key_groups=[0, 7], missing="ok")


@pytest.mark.parametrize("as_list", [True, False])
def test_one_place_may_be_that_of_one_worker(tmp_path: Path, as_list: bool) -> None:
    places, _ = workers(tmp_path)
    with sk.restore(places[:1] if as_list else places[0]) as kv:
        assert kv.key_groups == (sk.assign(8, 3)[0],)


def test_holes_are_seen_in_the_new_key_groups_when_it_is_regrouped(tmp_path: Path) -> None:
    places, _ = workers(tmp_path)
    with pytest.raises(ArgumentError, match="key-groups 10-15 of 16"):
        sk.restore(places[:2], regroup=16)


def test_what_is_to_be_done_about_holes_is_one_of_two_words(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="neither"):
        sk.restore(workers(tmp_path)[0], missing="maybe")  # type: ignore[arg-type]


# ---- Checkpoints


class Job:
    """A provider that takes checkpoints, and what it held at each."""

    def __init__(self, directory: Path, seed: int = 1, **geometry: Any) -> None:
        self.rng = random.Random(seed)
        self.url = str(directory)
        self.kv = sk.open("memory:", **({"key_groups": 8, "subgroups": 4} | geometry))
        self.states = declare(self.kv)
        self.image: Image = {"counts": {}, "texts": {}, "logs": {}, "due": {}}
        self.taken: dict[int, Image] = {}

    def work(self, count: int = 400) -> None:
        for _ in range(count):
            change(self.rng, self.states, self.image)

    def checkpoint(self, **options: Any) -> Checkpoint:
        self.work()
        done = self.kv.checkpoint(self.url, **options)
        self.taken[done.number] = copied(self.image)
        return done

    def within(self, groups: Sequence[int]) -> Image:
        """The part of the image that is in some key-groups."""
        chosen = set(groups)
        return {
            name: {key: value for key, value in entries.items()
                   if self.kv.key_group_of(key) in chosen}
            for name, entries in self.image.items()
        }  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "job")
    yield job
    job.kv.close()


@pytest.mark.parametrize("lazy", [True, False])
def test_every_checkpoint_of_a_directory_comes_back(job: Job, lazy: bool) -> None:
    for compression in (None, None, "zstd", None):
        job.checkpoint(compression=compression)
    for number, image in job.taken.items():
        with sk.restore(job.url, at=number, lazy=lazy) as kv:
            if not lazy:
                assert kv.loading is None
            assert held(declare(kv)) == image
            assert kv.key_groups == (range(8),)
            assert kv.schemas == job.kv.schemas
    with sk.restore(Path(job.url)) as kv, sk.open(f"checkpoint:{job.url}") as same:
        assert held(declare(kv)) == held(declare(same)) == job.image


def test_the_checkpoint_of_a_time(job: Job) -> None:
    first = job.checkpoint()
    second = job.checkpoint()
    assert second.modified >= first.modified
    with sk.restore(job.url, at=datetime.now(UTC) + timedelta(hours=1)) as kv:
        assert held(declare(kv)) == job.image
    with pytest.raises(NoCheckpointError):
        sk.restore(job.url, at=first.modified - timedelta(days=1))
    with pytest.raises(NoCheckpointError):
        sk.restore(job.url, at=9)
    with pytest.raises(NoCheckpointError):
        sk.restore(job.url + "-elsewhere")


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_scaling_out(job: Job, workers: int) -> None:
    job.checkpoint()
    job.checkpoint()
    for groups in sk.assign(8, workers):
        with sk.restore(job.url, key_groups=groups) as kv:
            assert kv.key_groups == (groups,)
            assert held(declare(kv)) == job.within(groups)
            other = next((k for k in job.image["counts"] if kv.key_group_of(k) not in groups), None)
            if other is not None:
                with pytest.raises(NotOwnedError):
                    kv["counts"].add(other, 1)


def scattered(job: Job, tmp_path: Path, workers: int) -> list[str]:
    """The job's state as checkpoints of several workers."""
    job.checkpoint()
    urls = []
    for at, groups in enumerate(sk.assign(8, workers)):
        urls.append(f"{tmp_path}/worker-{at}")
        with sk.restore(job.url, key_groups=groups) as kv:
            kv.checkpoint(urls[-1])
    return urls


def test_scaling_in(job: Job, tmp_path: Path) -> None:
    urls = scattered(job, tmp_path, 3)
    with sk.restore(urls) as kv:
        assert kv.key_groups == (range(8),)
        assert held(declare(kv)) == job.image
    with sk.restore(urls, key_groups=range(1, 6)) as kv:  # across all three
        assert held(declare(kv)) == job.within(range(1, 6))
    with sk.restore(urls, key_groups=[7, range(1)]) as kv:
        assert held(declare(kv)) == job.within([0, 7])
    with sk.restore(urls[::-1], key_groups=[]) as kv:
        assert kv.key_groups == ()
        kv.wait_loaded(SECONDS_MAX)
        assert kv.loading is None
        assert not any(held(declare(kv)).values())
    with sk.restore(urls[:1]) as kv:
        assert held(declare(kv)) == job.within(sk.assign(8, 3)[0])


def test_what_cannot_be_restored_is_named(job: Job, tmp_path: Path) -> None:
    urls = scattered(job, tmp_path, 2)
    with pytest.raises(
        ArgumentError, match=r"key-groups 3-5 of 8 .*there are 6|4-5 .*there are 0-3"
    ):
        sk.restore(urls[0], key_groups=range(3, 6))
    with pytest.raises(ArgumentError, match="no key-group 8"):
        sk.restore(urls, key_groups=range(9))
    with pytest.raises(OccupiedError, match="worker-0"):
        sk.restore([*urls, urls[0]])
    with pytest.raises(OccupiedError):
        sk.restore([job.url, urls[1]])
    with pytest.raises(ArgumentError, match="Name one place"):
        sk.restore([])
    with pytest.raises(ArgumentError, match="power of two"):
        sk.restore(urls, regroup=12)
    with pytest.raises(ArgumentError, match="sub-groups"):
        sk.open(f"checkpoint:{urls[0]}", subgroups=4)
    with sk.open("memory:", key_groups=16, subgroups=2, owned=range(8, 16)) as kv:
        kv.value("texts", str)["t"] = "x"
        kv.checkpoint(tmp_path / "other")
    with pytest.raises(ArgumentError, match=r"\[8, 16\].*regroup=16"):
        sk.restore([urls[0], tmp_path / "other"])
    with sk.open("memory:", key_groups=8, subgroups=4, owned=range(4, 8)) as kv:
        kv.value("texts", int)
        kv.checkpoint(tmp_path / "typed")
    with pytest.raises(SchemaError, match="texts"):
        sk.restore([urls[0], tmp_path / "typed"])
    for place in (job.url, *urls):  # nothing is pinned by what failed
        storage = open_storage(place)
        assert not storage.is_pinned(manifest_name(1))


@pytest.mark.parametrize("groups", [1, 2, 4, 16, 32, 64, 128])
@pytest.mark.parametrize("lazy", [True, False])
def test_other_numbers_of_key_groups(job: Job, groups: int, lazy: bool) -> None:
    job.checkpoint()
    job.checkpoint()
    with sk.restore(job.url, regroup=groups, lazy=lazy) as kv:
        assert kv.key_group_count == groups
        assert kv.key_group_count * kv.subgroups == max(32, groups)
        states = declare(kv)
        assert held(states) == job.image
        image = copied(job.image)
        for _ in range(200):
            change(job.rng, states, image)
        assert held(states) == image
        again = kv.checkpoint(f"{job.url}-{groups}")
        assert again.key_group_count == groups
    with sk.restore(f"{job.url}-{groups}") as kv:
        assert held(declare(kv)) == image


def test_other_numbers_of_key_groups_for_several_at_once(job: Job, tmp_path: Path) -> None:
    urls = scattered(job, tmp_path, 3)
    for groups in (2, 64):
        found: Image = {name: {} for name in job.image}
        for part in sk.assign(groups, 2):
            with sk.restore(urls, regroup=groups, key_groups=part) as kv:
                for name, entries in held(declare(kv)).items():
                    assert not entries.keys() & found[name].keys()
                    found[name] |= entries
        assert found == job.image
    # worker-0 has key-groups 0 and 1 of 8, so all of 0 of 4 and nothing else; worker-1 has 2-4
    with sk.restore(urls[0], regroup=4) as kv:
        assert kv.key_groups == (range(1),)
    with pytest.raises(ArgumentError, match=r"2 of 4 are not in .*there are 1, of 2 only a part"):
        sk.restore(urls[1], regroup=4)
    with sk.restore(urls[1], regroup=4, key_groups=[1]) as kv:
        assert held(declare(kv)) == job.within([2, 3])


def test_leaves_of_different_sizes_are_merged(job: Job, tmp_path: Path) -> None:
    urls = scattered(job, tmp_path, 2)
    with sk.open("memory:", key_groups=8, subgroups=1, owned=range(4, 8)) as kv:
        states = declare(kv)
        for name, entries in job.within(range(4, 8)).items():
            for key, value in entries.items():
                if name == "due":
                    for at in value:
                        states[name].set(key, at)
                else:
                    states[name][key] = value
        kv.checkpoint(tmp_path / "coarse")
    with sk.restore([urls[0], tmp_path / "coarse"]) as kv:
        assert kv.subgroups == 4
        assert held(declare(kv)) == job.image


def test_event_time_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    urls = []
    for at, watermark in enumerate((5_000, 3_000)):
        with sk.open("memory:", owned=sk.assign(128, 2)[at]) as kv:
            kv.advance_watermark(1_000)
            short = kv.value("short", int, ttl=sk.TTL(3, time="event"))
            mine = [f"k{n}" for n in range(50) if kv.owner_of(f"k{n}") is kv]
            short.update(dict.fromkeys(mine, at))
            kv.advance_watermark(watermark - 500)
            urls.append(f"{tmp_path}/{at}")
            kv.advance_watermark(watermark)
            kv.checkpoint(urls[-1])
    with sk.restore(urls) as kv:
        assert kv._residence.store.time("event") == 3_000
        short = kv.value("short", int, ttl=sk.TTL(3, time="event"))
        assert set(short.values()) == {1}  # entries of the first worker had expired
        kv.advance_watermark(4_000)
        assert len(short) == 0


# ---- In use


def untouched(url: str, at: int | None = None, regroup: int | None = None) -> sk.KVProvider:
    """A restored provider to which leaves come only when they are touched."""
    pinned = [open_pinned(url, at)]
    plan = unite([checkpoint for checkpoint, _ in pinned], regroup)
    source = CheckpointSource(pinned, plan.leaves)
    return _restore_here(plan, plan.choose(None), source, None, True, background=False)


def test_a_checkpoint_is_not_deleted_while_it_is_being_restored(job: Job) -> None:
    job.checkpoint()
    first = copied(job.image)
    reader = untouched(job.url, 1)
    for _ in range(3):
        job.checkpoint(base=None)
    storage = open_storage(job.url)
    assert storage.is_pinned(manifest_name(1))
    collect(storage, keep=1)
    assert reader.loading is not None
    assert reader.loading.leaves_done == 0
    assert held(declare(reader)) == first
    reader.wait_loaded(SECONDS_MAX)
    assert not storage.is_pinned(manifest_name(1))
    collect(storage, keep=1)
    with pytest.raises(NoCheckpointError):
        sk.restore(job.url, at=1)
    reader.close()


def test_the_next_checkpoint_there_is_incremental(job: Job, tmp_path: Path) -> None:
    job.work(3000)
    full = job.checkpoint()
    for lazy in (True, False):
        with untouched(job.url, 1) if lazy else sk.restore(job.url, at=1, lazy=False) as kv:
            states, image = declare(kv), copied(job.taken[1])
            nothing = kv.checkpoint(job.url)
            assert nothing.new_bytes == 0
            key = next(iter(image["counts"]))
            assert states["counts"].add(key, 1) == image["counts"][key] + 1
            image["counts"][key] += 1
            gone = next(iter(image["texts"]))
            del states["texts"][gone], image["texts"][gone]
            small = kv.checkpoint(job.url)
            assert 0 < small.new_bytes < full.bytes / 4
            elsewhere = kv.checkpoint(tmp_path / f"elsewhere-{lazy}")
            assert elsewhere.new_bytes > full.bytes / 2
            for url in (job.url, tmp_path / f"elsewhere-{lazy}"):
                with sk.restore(url) as again:
                    assert held(declare(again)) == image


def test_checkpoints_are_taken_while_leaves_come(job: Job, tmp_path: Path) -> None:
    job.checkpoint()
    job.checkpoint()
    for turn in range(8):
        url = job.url if turn % 2 else str(tmp_path / f"turn-{turn}")
        with sk.restore(job.url, at=2) if turn > 3 else untouched(job.url, 2) as kv:
            states, image = declare(kv), copied(job.taken[2])
            for _ in range(3):
                for _ in range(30):
                    change(job.rng, states, image)
                kv.checkpoint(url)
                with sk.restore(url) as again:
                    assert held(declare(again)) == image
            kv.wait_loaded(SECONDS_MAX)
            kv.checkpoint(url)
        with sk.restore(url, lazy=False) as again:
            assert held(declare(again)) == image


def test_what_has_not_come_is_passed_on(job: Job, tmp_path: Path) -> None:
    """Chains of several segments, leaf for leaf and sliced, with changes on top."""
    job.work(3000)
    for _ in range(3):
        job.checkpoint()
    for regroup in (None, 4, 64, 256):
        with untouched(job.url, regroup=regroup) as kv:
            states, image = declare(kv), copied(job.image)
            for key in range(0, 150, 10):
                states["counts"][key] = image["counts"][key] = key
            assert kv.loading is not None
            assert kv.loading.leaves_done == 0
            for _ in range(2):
                kv.checkpoint(tmp_path / f"to-{regroup}")
                with sk.restore(tmp_path / f"to-{regroup}") as again:
                    assert held(declare(again)) == image
                states["texts"]["new"] = image["texts"]["new"] = "x"


def test_a_checkpoint_after_leaves_went_and_came_back(job: Job) -> None:
    job.work(2000)
    job.checkpoint()
    for turn in range(3):
        with untouched(job.url, 1) as kv:
            states, image = declare(kv), copied(job.taken[1])
            for key in range(0, 150, 11) if turn else ():
                states["counts"][key] = image["counts"][key] = 7
            (part,) = kv.split([range(2, 5)])
            if turn == 2:
                keys = [key for key in image["texts"] if kv.owner_of(key) is part]
                assert part["texts"].delete_many(keys[::2]) == len(keys[::2])
                for key in keys[::2]:
                    del image["texts"][key]
            kv.merge(part)
            part.close()
            kv.checkpoint(job.url)
            with sk.restore(job.url) as again:
                assert held(declare(again)) == image


def test_states_evolve_over_checkpoints(job: Job) -> None:
    job.checkpoint()
    for turn in range(2):
        with sk.restore(job.url) as kv:
            if turn:
                kv.wait_loaded(SECONDS_MAX)
            counts = kv.value("counts", float, default=0.0, key=int)
            expected = dict(job.image["counts"])
            for key in range(0, 150, 7):
                counts.add(key, 0.5)
                expected[key] = expected.get(key, 0) + 0.5
            kv.checkpoint(job.url)  # chains of ints with floats on top
        with sk.restore(job.url) as kv:
            counts = kv.value("counts", float, default=0.0, key=int)
            assert dict(counts.items()) == expected
            texts = kv.value("texts", str, ttl=3600)
            assert dict(texts.items()) == job.image["texts"]
            kv.checkpoint(job.url)
        with sk.restore(job.url) as kv:
            assert dict(kv.value("texts", str, ttl=3600).items()) == job.image["texts"]
            job.image["counts"] = expected


def test_damage_is_told_and_never_returned(job: Job) -> None:
    job.work(3000)
    job.checkpoint()
    (pack,) = Path(job.url).glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(DamagedError) as caught:
        sk.restore(job.url, lazy=False)
    assert caught.value.file.endswith(pack.name)
    assert caught.value.offset is not None
    with sk.restore(job.url) as kv:
        counts = kv.value("counts", int, default=0, key=int)
        good = bad = 0
        for key in range(150):
            try:
                assert counts[key] == job.image["counts"].get(key, 0)
                good += 1
            except DamagedError:
                bad += 1
        assert good > 100
        assert bad
        with pytest.raises(DamagedError):
            kv.wait_loaded(SECONDS_MAX)
        assert kv.loading is not None
        assert len(kv.loading.errors) == 1
        with pytest.raises(DamagedError):
            kv.checkpoint(job.url + "-copy")  # damage is not passed on either


# ---- Into a home


@pytest.fixture(params=["testdict", "rocksdb", "redis"])
def home_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "testdict":
            request.getfixturevalue("home")
            return "testdict:t?memory=64KiB"
        case "rocksdb":
            return f"rocksdb:{tmp_path}/db?memory=64KiB"
        case _:
            port = request.getfixturevalue("server").port
            return f"redis://{HOST}:{port}/0?memory=64KiB&prefix={tmp_path.name}"


def test_a_restore_into_a_home(job: Job, home_url: str) -> None:
    job.checkpoint()
    job.checkpoint()
    with sk.restore(job.url, home=home_url) as kv:
        assert kv.loading is None
        states, image = declare(kv), copied(job.image)
        assert held(states) == image
        for _ in range(300):
            change(job.rng, states, image)
        kv.checkpoint(job.url)
    with sk.restore(job.url) as kv:
        assert held(declare(kv)) == image
    with sk.open(home_url) as kv:
        assert (kv.key_group_count, kv.subgroups) == (8, 4)
        assert held(declare(kv)) == image
    with pytest.raises(ArgumentError, match="is not empty"):
        sk.restore(job.url, home=home_url)
    with sk.open(home_url) as kv:
        assert held(declare(kv)) == image


def test_a_restore_replaces_what_a_home_holds_if_asked_to(job: Job, home_url: str) -> None:
    job.checkpoint()
    with sk.restore(job.url, home=home_url) as kv:
        states, image = declare(kv), copied(job.image)
        for _ in range(300):
            change(job.rng, states, image)
        kv.value("only here", int)["x"] = 1
    with sk.restore(job.url, home=home_url, replace=True) as kv:
        assert held(declare(kv)) == job.image
        assert dict(kv.value("only here", int).items()) == {}
    with sk.open(home_url) as kv:
        assert held(declare(kv)) == job.image
        assert dict(kv.value("only here", int).items()) == {}


def test_other_key_groups_of_the_home_are_not_replaced(job: Job, home: DictHome) -> None:
    job.checkpoint()
    url = "testdict:t?memory=64KiB"
    with sk.restore(job.url, home=url) as kv:
        states, image = declare(kv), copied(job.image)
        for _ in range(300):
            change(job.rng, states, image)
    sk.restore(job.url, home=url, key_groups=range(3), replace=True).close()
    with sk.open(url, owned=range(3)) as kv:
        assert held(declare(kv)) == job.within(range(3))
    with sk.open(url) as kv:
        others = {
            name: {key: value for key, value in state.items() if kv.key_group_of(key) >= 3}
            for name, state in image.items()
        }
        expected = {name: job.within(range(3))[name] | others[name] for name in image}
        assert held(declare(kv)) == expected


def test_parts_are_restored_into_a_home_that_is_shared(job: Job, home: DictHome) -> None:
    job.checkpoint()
    url = "testdict:t?memory=64KiB"
    left = sk.restore(job.url, key_groups=range(3), home=url)
    right = sk.restore(job.url, key_groups=range(3, 8), home=url)
    assert held(declare(left)) == job.within(range(3))
    assert held(declare(right)) == job.within(range(3, 8))
    left.close()
    right.close()
    with sk.open(url) as kv:
        assert held(declare(kv)) == job.image
    with pytest.raises(ArgumentError, match="8"):
        sk.restore(job.url, home=url, regroup=16)


def test_an_interrupted_restore_into_a_home_is_seen_and_done_again(
    job: Job, home: DictHome
) -> None:
    job.checkpoint()
    url = "testdict:t?memory=64KiB"
    for nth in (1, 5, 30):
        writes = iter(range(nth))
        home.fails = lambda call, writes=writes: call == "write" and next(writes, None) is None  # type: ignore[misc]
        with pytest.raises(HomeError, match="write fails"):
            sk.restore(job.url, home=url)
        home.fails = lambda call: False
        with pytest.raises(HomeError, match="only in part"):
            sk.open(url)
        with pytest.raises(HomeError, match="key-groups 2-3"):
            sk.open(url, owned=range(2, 4))
    with sk.restore(job.url, home=url) as kv:
        assert held(declare(kv)) == job.image
    with sk.open(url) as kv:
        assert held(declare(kv)) == job.image


def test_a_home_that_was_opened_but_never_used_takes_a_restore(job: Job, home: DictHome) -> None:
    job.checkpoint()
    url = "testdict:t?memory=64KiB"
    with sk.open(url, key_groups=8, subgroups=4) as kv:
        kv.value("texts", str)
    with sk.restore(job.url, home=url) as kv:
        assert held(declare(kv)) == job.image


def test_a_restore_into_memory_with_a_limit(job: Job) -> None:
    job.checkpoint()
    with sk.restore(job.url, home="memory:?memory=64MiB") as kv:
        assert held(declare(kv)) == job.image
    with pytest.raises(MemoryLimitError):
        sk.restore(job.url, home="memory:?memory=2KiB", lazy=False)
    with pytest.raises(ArgumentError):
        sk.restore(job.url, home="memory:somewhere")
    assert not open_storage(job.url).is_pinned(manifest_name(1))


@pytest.mark.parametrize("lazy", [True, False])
def test_entries_stored_without_a_time_to_live_grow_old_from_when_they_get_one(
    tmp_path: Path, lazy: bool
) -> None:
    with sk.open("memory:") as kv:
        kv.value("seen", int).put_many(["a", "b"], [1, 2])
        kv.checkpoint(tmp_path)
    with sk.restore(tmp_path, lazy=lazy) as kv:
        store = kv._residence.store
        store.set_time("processing", 1_000_000)
        seen = kv.value("seen", int, ttl=sk.TTL(10))
        store.set_time("processing", 1_005_000)
        assert dict(seen.items()) == {"a": 1, "b": 2}
        seen["b"] = 3
        kv.checkpoint(tmp_path)
        store.set_time("processing", 1_010_000)
        assert dict(seen.items()) == {"b": 3}
        assert seen.get("a") is None


# ---- Small leaves, many at a time


def _numbers(place: Path, count: int = 4000) -> dict[str, int]:
    """A checkpoint of small leaves, with all keys in it."""
    expected = {f"k{i}": i for i in range(count)}
    with sk.open("memory:", key_groups=32, subgroups=4) as kv:
        kv.value("n", int).put_many([*expected], [*expected.values()])
        kv.checkpoint(place)
    return expected


def _damage(place: Path, leaf: int) -> None:
    """One bit of what a leaf has in its pack is another."""
    (checkpoint,) = sk.checkpoints(str(place))
    (segment,) = checkpoint.manifest.chain(leaf)
    pack = place / checkpoint.manifest.packs[segment.pack].name
    data = bytearray(pack.read_bytes())
    data[segment.offset + segment.length // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)


@pytest.mark.parametrize("how", ["lazy=False", "touched", "background"])
def test_small_leaves_are_read_many_at_a_time(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _numbers(tmp_path)
    reads = Counter[str]()
    storage = type(open_storage(str(tmp_path)))
    plain = storage.read_parts

    def counted(self: Any, name: str, parts: Any) -> Any:
        reads[name] += 1
        return plain(self, name, parts)

    monkeypatch.setattr(storage, "read_parts", counted)
    kv = sk.restore(tmp_path, lazy=how != "lazy=False", background=how != "touched")
    if how == "background":
        kv.wait_loaded(SECONDS_MAX)
    numbers = kv.value("n", int)
    assert dict(zip(expected, numbers.get_many([*expected]), strict=True)) == expected
    assert dict(numbers.items()) == expected
    assert kv.loading is None
    assert sum(reads.values()) <= 128 // 4, reads
    kv.close()


@pytest.mark.parametrize("how", ["touched", "background"])
def test_of_leaves_that_come_together_only_the_bad_one_raises(how: str, tmp_path: Path) -> None:
    expected = _numbers(tmp_path)
    _damage(tmp_path, 5)
    kv = sk.restore(tmp_path, background=how == "background")
    numbers = kv.value("n", int)
    good = [key for key in expected if sk.leaf_of(str, key, 32, 4) != 5]
    bad = [key for key in expected if sk.leaf_of(str, key, 32, 4) == 5]
    if how == "background":
        with pytest.raises(DamagedError):
            kv.wait_loaded(SECONDS_MAX)
    assert [*numbers.get_many(good)] == [expected[key] for key in good]
    assert kv.loading is not None
    for _ in range(2):
        with pytest.raises(DamagedError, match="there is no good frame"):
            numbers.get_many([*good, *bad])
    assert set(kv.loading.errors) == {5}
    assert kv.loading.leaves_left == 1
    kv.close()


@pytest.mark.parametrize("how", ["chains", "compressed", "another type", "changed here"])
def test_leaves_that_cannot_come_together_come_one_by_one(how: str, tmp_path: Path) -> None:
    expected = {f"k{i}": i for i in range(4000)}
    with sk.open("memory:", key_groups=32, subgroups=4) as kv:
        numbers = kv.value("n", int)
        numbers.put_many([*expected], [*expected.values()])
        kv.checkpoint(tmp_path, compression="zstd" if how == "compressed" else None)
        if how == "chains":  # of every second leaf, about
            for key in [*expected][:60]:
                expected[key] = numbers[key] = -1
            del numbers["k3999"], expected["k3999"]
            kv.checkpoint(tmp_path)
    if how == "another type":
        kv = sk.restore(tmp_path, background=False)
        floats = kv.value("n", float)
        kv.prefetch([*expected]).result(SECONDS_MAX)
        assert dict(floats.items()) == expected
    else:
        kv = sk.restore(tmp_path, background=False)
        numbers = kv.value("n", int)
        if how == "changed here":
            for key in [*expected][:60]:
                expected[key] = numbers[key] = -2
            del numbers["k3999"], expected["k3999"]
        kv.wait_loaded(SECONDS_MAX)
        assert dict(numbers.items()) == expected
        assert kv.loading is None
    kv.close()


def test_a_run_of_leaves_ends_at_the_first_that_cannot_be_taken_in(tmp_path: Path) -> None:
    _numbers(tmp_path)
    (checkpoint,) = sk.checkpoints(str(tmp_path))
    (run,) = read_runs(checkpoint.locate(range(128)))
    store = sk.Store(32, 4)
    store.mark(0, 128, "absent")
    for wrong in (len(run.data) + 1, 2**63, 2**64 - 1):
        places = run.places[:]
        places[3 * 2 + 1] = wrong  # of the third leaf
        assert store.decode_run(run.data, run.pack_id, run.offset, places) == 2
        places = run.places[:]
        places[3 * 2 + 2] = wrong
        assert store.decode_run(run.data, run.pack_id, run.offset, places) == 2
    assert store.decode_run(run.data, run.pack_id, run.offset + 8, run.places) == 0
    assert store.decode_run(run.data, bytes(16), run.offset, run.places) == 0
    places = run.places[:]
    places[3], places[6] = places[6], places[3]  # the leaves of the second and third
    assert store.decode_run(run.data, run.pack_id, run.offset, places) == 1
    assert [store.residency(leaf) for leaf in range(4)] == ["whole", "whole", "absent", "absent"]
    assert store.decode_run(run.data, run.pack_id, run.offset, run.places) == 128
