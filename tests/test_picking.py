"""Single entries out of a checkpoint: a few are picked; a leaf is loaded when that is better.

The oracle is a dict, or the same provider restored as a whole.
"""

import os
import pickle
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import statekit as sk
from statekit.errors import ArgumentError, DamagedError, NoCheckpointError, StateKitError
from statekit.live.checkpointer import CHAIN_MAX
from statekit.residence.loading import _PICKS_LOCAL
from statekit.storage.local import LocalStorage

GROUPS, SUBGROUPS = 4, 2
KEYS = 4_000  # 500 per leaf, so that picking a few of them is worth it


def opened(**options: Any) -> sk.KVProvider:
    return sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS, **options)


def counts(kv: sk.KVProvider) -> sk.ValueState[int]:
    return kv.value("n", int, key=int, default=0)


def lazily(place: Any, **options: Any) -> sk.KVProvider:
    return sk.restore(place, background=False, **options)


def leaves_of(kv: sk.KVProvider) -> tuple[int, int]:
    """Whole and partial."""
    stats = kv._residence.store.stats()
    return stats.whole, stats.partial


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with opened() as kv:
        counts(kv).put_many(list(range(KEYS)), list(range(KEYS)))
        kv.checkpoint(tmp_path)
    return tmp_path


# ---- What is picked


def test_a_get_brings_one_entry_and_not_its_leaf(place: Path) -> None:
    with lazily(place) as kv:
        assert counts(kv)[7] == 7
        stats = kv._residence.store.stats()
        assert (stats.entries, stats.whole, stats.partial) == (1, 0, 1)
        assert counts(kv)[-1] == 0  # no such key: that is known then
        assert -1 not in counts(kv)
        stats = kv._residence.store.stats()
        assert (stats.entries, stats.tombstones, stats.whole) == (1, 1, 0)


def test_a_batch_brings_its_entries_and_not_their_leaves(place: Path) -> None:
    with lazily(place) as kv:
        keys = [*range(0, KEYS, 80), -5]
        assert counts(kv).get_many(keys).to_list() == [*range(0, KEYS, 80), 0]
        assert leaves_of(kv) == (0, GROUPS * SUBGROUPS)
        assert kv._residence.store.stats().entries == len(keys) - 1
        counts(kv).add_many(keys)
        assert counts(kv).get_many(keys).to_list() == [*range(1, KEYS + 1, 80), 1]


def test_a_batch_of_most_entries_loads_the_leaves(place: Path) -> None:
    with lazily(place) as kv:
        counts(kv).add_many(list(range(KEYS)))
        assert leaves_of(kv) == (GROUPS * SUBGROUPS, 0)
        assert counts(kv)[KEYS - 1] == KEYS


def test_a_leaf_that_is_picked_from_again_and_again_is_loaded(place: Path) -> None:
    with lazily(place) as kv:
        leaf = sk.leaf_of(int, 0, GROUPS, SUBGROUPS)
        keys = [key for key in range(KEYS) if sk.leaf_of(int, key, GROUPS, SUBGROUPS) == leaf]
        for key in keys[:_PICKS_LOCAL]:
            assert counts(kv)[key] == key
            assert leaves_of(kv) == (0, 1)
        assert counts(kv)[keys[_PICKS_LOCAL]] == keys[_PICKS_LOCAL]
        assert leaves_of(kv) == (1, 0)
        assert [counts(kv)[key] for key in keys] == keys


def test_entries_that_are_here_are_not_read_again(place: Path) -> None:
    with lazily(place) as kv:
        keys = [*range(0, KEYS, 100)]
        for _ in range(3 * _PICKS_LOCAL):
            assert counts(kv).get_many(keys).to_list() == keys
        assert leaves_of(kv)[0] == 0


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_leaves_are_loaded(tmp_path: Path, compression: str) -> None:
    with opened() as kv:
        counts(kv).put_many(list(range(KEYS)), list(range(KEYS)))
        kv.checkpoint(tmp_path, compression=compression)
    with lazily(tmp_path) as kv:
        assert counts(kv).get_many([1, 2, -3]).to_list() == [1, 2, 0]


def test_a_state_of_another_type_by_now_is_loaded(place: Path) -> None:
    with lazily(place) as kv:
        widened = kv.value("n", float, key=int)
        assert widened[7] == 7.0
        assert widened.get_many([8, -1]).to_list() == [8.0, None]
    with lazily(place) as kv:
        timed = kv.value("n", int, key=int, ttl=sk.TTL(60))
        assert timed[7] == 7
        assert 9 in timed


def test_leaves_of_fewer_key_groups_are_loaded_and_sliced(place: Path) -> None:
    with lazily(place, regroup=4 * GROUPS * SUBGROUPS) as kv:
        assert counts(kv).get_many([1, 2, -3]).to_list() == [1, 2, 0]


# ---- Every kind, every chain, against a model


class Model:
    """A provider and what it must hold."""

    def __init__(self, kv: sk.KVProvider, rng: random.Random) -> None:
        self.rng = rng
        self.names: dict[str, str] = {}
        self.lists: dict[str, list[int]] = {}
        self.maps: dict[str, dict[str, int]] = {}
        self.counts: dict[str, int] = {}
        self.use(kv)

    def use(self, kv: sk.KVProvider) -> None:
        self.kv = kv
        self.states: list[tuple[Any, dict[str, Any], Callable[[], Any]]] = [
            (kv.value("name", str), self.names, lambda: f"name {self.rng.random()}"),
            (kv.list("list", int), self.lists, lambda: [self.rng.randrange(99)] * 3),
            (kv.map("map", str, int), self.maps, lambda: {"a": self.rng.randrange(99)}),
            (kv.value("count", int), self.counts, lambda: self.rng.randrange(10**6)),
        ]

    def key(self) -> str:
        return f"key {self.rng.randrange(1_200)}"

    def change(self, times: int) -> None:
        for _ in range(times):
            state, model, make = self.rng.choice(self.states)
            key = self.key()
            if self.rng.random() < 0.3:
                assert state.discard(key) == (model.pop(key, None) is not None)
            else:
                state[key] = model[key] = make()

    def check(self, times: int) -> None:
        for _ in range(times):
            state, model, _ = self.rng.choice(self.states)
            if self.rng.random() < 0.5:
                key = self.key()
                assert (key in state) == (key in model)
                if key in model:
                    assert state[key] == model[key]
            else:
                keys = [self.key() for _ in range(self.rng.randrange(1, 40))]
                assert state.contains_many(keys) == [key in model for key in keys]
                found = state.get_many(keys) if hasattr(state, "get_many") else None
                if found is not None:
                    assert found.to_list() == [model.get(key) for key in keys]

    def check_all(self) -> None:
        for state, model, _ in self.states:
            assert {key: plain(value) for key, value in state.items()} == model


def plain(value: Any) -> Any:
    return value.copy() if isinstance(value, sk.ListView | sk.MapView) else value


@pytest.mark.parametrize("round_", range(6))
def test_random_lives_with_little_of_the_state_here(tmp_path: Path, round_: int) -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = Model(opened(), rng)
    model.change(3_000)
    for at in range(8):
        made = model.kv.checkpoint(tmp_path, base=rng.choice(["auto", "auto", None]))
        if rng.random() < 0.7:
            model.kv.close()
            model.use(lazily(rng.choice([tmp_path, made, pickle.loads(pickle.dumps(made))])))
        model.check(40)
        model.change(rng.choice([3, 60, 400]))
        model.check(40)
        if at % 3 == 2:  # picked entries move with their leaf
            (other,) = model.kv.split([range(2, 4)])
            model.kv.merge(other)
            other.close()
    model.check_all()
    model.kv.close()


def test_a_snapshot_is_not_changed_by_what_is_picked_meanwhile(place: Path, tmp_path: Path) -> None:
    with lazily(place) as kv:
        counts(kv)[3] = -3
        job = kv.checkpoint_async(tmp_path / "other", base=None)
        assert counts(kv).get_many([*range(0, KEYS, 50)]).to_list() == [*range(0, KEYS, 50)]
        counts(kv).add_many([*range(0, KEYS, 50)], 10)
        job.wait()
    with sk.restore(tmp_path / "other", lazy=False) as kv:
        assert dict(counts(kv).items()) == {**{key: key for key in range(KEYS)}, 3: -3}


def test_parts_of_tasks_that_picked_have_only_what_changed(place: Path) -> None:
    made = sk.checkpoints(place)[-1]
    parts = []
    for groups in sk.assign(GROUPS, 2):
        with lazily(made, key_groups=groups) as task:
            keys = [key for key in range(0, KEYS, 100) if is_in(key, groups)]
            counts(task).add_many(keys)
            parts.append(task.write_part(place, number=2))
    assert sum(part.bytes for part in parts) < made.bytes / 10
    sk.publish(place, parts, number=2)
    with sk.restore(place, lazy=False) as kv:
        assert dict(counts(kv).items()) == {key: key + (key % 100 == 0) for key in range(KEYS)}


def test_chains_stay_short_though_leaves_are_never_here_as_a_whole(place: Path) -> None:
    made = sk.checkpoints(place)[-1]
    model = {key: key for key in range(KEYS)}
    rng = random.Random(5)
    for number in range(2, 32):
        parts = []
        for groups in sk.assign(GROUPS, 2):
            with lazily(made, key_groups=groups) as task:
                keys = [key for key in rng.sample(range(KEYS), 24) if is_in(key, groups)]
                counts(task).add_many(keys, 5)
                model |= {key: model[key] + 5 for key in keys}
                parts.append(task.write_part(place, number=number))
        made = sk.publish(place, parts, number=number)
        assert max(len(chain) for _, chain in made.manifest.chains()) <= CHAIN_MAX
        sk.collect(place, keep=1)
    with sk.restore(place, lazy=False) as kv:
        assert dict(counts(kv).items()) == model


def is_in(key: int, groups: range) -> bool:
    return sk.leaf_of(int, key, GROUPS, SUBGROUPS) // SUBGROUPS in groups


def test_what_is_away_is_refused_and_nothing_is_done(place: Path) -> None:
    with lazily(place, key_groups=range(2)) as kv:
        mine = [key for key in range(KEYS) if is_in(key, range(2))][:5]
        other = next(key for key in range(KEYS) if not is_in(key, range(2)))
        with pytest.raises(StateKitError) as caught:
            counts(kv).add_many([*mine, other, *mine])
        done = [key for key, status in zip(mine, caught.value.statuses, strict=False) if not status]
        assert counts(kv).get_many(mine).to_list() == [key + (key in done) for key in mine]


# ---- Threads, signals, memory


def test_threads_that_want_one_leaf_read_it_a_few_times_only(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf = sk.leaf_of(int, 0, GROUPS, SUBGROUPS)
    keys = [key for key in range(KEYS) if sk.leaf_of(int, key, GROUPS, SUBGROUPS) == leaf][:40]
    reads: list[int] = []
    real = LocalStorage.read_parts

    def read_parts(self: LocalStorage, name: str, parts: Any) -> Any:
        reads.append(1)
        return real(self, name, parts)

    monkeypatch.setattr(LocalStorage, "read_parts", read_parts)
    for wanted in ([keys[0]] * 40, keys):
        with lazily(place) as kv:
            state = counts(kv)
            begin = threading.Barrier(len(wanted))
            reads.clear()

            def get(key: int, state: Any = state, begin: Any = begin) -> int:
                begin.wait()
                return int(state[key])

            with ThreadPoolExecutor(len(wanted)) as threads:
                assert [*threads.map(get, wanted)] == wanted
            assert len(reads) <= (1 if wanted[0] == wanted[-1] else _PICKS_LOCAL + 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_leave_no_lock_held(place: Path) -> None:
    class Interrupt(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for at in range(60):
            with lazily(place) as kv:
                state, loading = counts(kv), kv._residence.loading
                assert loading is not None
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.00005 * (1 + at % 30))
                    for start in range(40):
                        state.get_many([*range(start, KEYS, 80)])
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupt:
                    interrupted += 1
                locks = [*loading._leaf_locks, *loading._filling]
                assert not any(lock.locked() for lock in locks)
                assert state.get_many([*range(1, KEYS, 90)]).to_list() == [*range(1, KEYS, 90)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    print(f"{interrupted} of 60 were interrupted")


def test_a_checkpoint_does_without_memory_for_leaves_that_are_worn(tmp_path: Path) -> None:
    with opened() as kv:
        big = kv.value("big", bytes, key=int)
        for number in range(CHAIN_MAX):  # so that every chain is worn
            big.put_many(list(range(number, 2000, 7)), [bytes(900)] * len(range(number, 2000, 7)))
            kv.checkpoint(tmp_path)
    with sk.restore(tmp_path, background=False, home="memory:?memory=100KiB") as kv:
        big = kv.value("big", bytes, key=int)
        big[3] = b"new"
        kv.checkpoint(tmp_path)
    with sk.restore(tmp_path) as kv:
        assert kv.value("big", bytes, key=int)[3] == b"new"


def test_what_is_known_to_be_missing_is_not_asked_for_again(place: Path) -> None:
    """A miss used to leave the status of the call before it behind."""
    for default in ({}, {"default": -(2**63)}):
        with lazily(place) as kv:
            n = kv.value("n", int, key=int, **default)
            assert -1 not in n
            assert n[7] == 7  # it was unknown, and fetched
            pack_of(place).rename(place / "hidden")
            if default:
                assert n[-1] == -(2**63)
            else:
                with pytest.raises(KeyError):
                    n[-1]
            (place / "hidden").rename(place / sk.checkpoints(place)[-1].manifest.packs[0].name)


def test_loading_ends_when_everything_was_touched(place: Path) -> None:
    with lazily(place) as kv:
        assert kv.loading is not None
        counts(kv).add_many(list(range(KEYS)))
        assert kv.loading is None
        assert leaves_of(kv) == (GROUPS * SUBGROUPS, 0)


# ---- Damage


def pack_of(place: Path) -> Path:
    (pack,) = place.glob("*.pack")
    return pack


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_damage_is_an_error_and_never_data(place: Path, at: float) -> None:
    pack = pack_of(place)
    data = bytearray(pack.read_bytes())
    data[int(at * len(data))] ^= 4
    pack.write_bytes(data)
    with lazily(place) as kv:
        bad = []
        for key in range(0, KEYS, 17):
            try:
                assert counts(kv)[key] == key
            except DamagedError as error:
                bad.append(error)
        assert 0 < len(bad) < KEYS // 17
        assert all(str(pack) in str(error) and error.offset is not None for error in bad)
        with pytest.raises(DamagedError):
            counts(kv).get_many([*range(0, KEYS, 50)])


def test_damage_that_comes_after_the_first_pick_is_found(place: Path) -> None:
    pack = pack_of(place)
    with lazily(place) as kv:
        assert counts(kv)[0] == 0
        data = bytearray(pack.read_bytes())
        for at in range(1000, len(data), 200):
            data[at] ^= 1
        pack.write_bytes(data)
        leaf = sk.leaf_of(int, 0, GROUPS, SUBGROUPS)
        key = next(k for k in range(1, KEYS) if sk.leaf_of(int, k, GROUPS, SUBGROUPS) == leaf)
        with pytest.raises(DamagedError):
            counts(kv)[key]
        assert counts(kv)[0] == 0  # it is here


def test_a_pack_that_is_cut_off_or_gone_is_an_error(place: Path) -> None:
    pack = pack_of(place)
    with lazily(place) as kv:
        assert counts(kv)[0] == 0
        os.truncate(pack, pack.stat().st_size // 2)
        found = []
        for key in range(1, 200):
            try:
                found.append(counts(kv)[key] == key)
            except DamagedError:
                found.append(False)
        assert True in found
        assert False in found
        pack.unlink()
        with pytest.raises(StateKitError, match=r"\.pack"):
            counts(kv).get_many([*range(200, KEYS, 50)])


# ---- Arguments, and checkpoints that travel


def test_background_is_for_lazy_restores(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="lazy=False waits"):
        sk.restore(place, lazy=False, background=False)
    with pytest.raises(ArgumentError, match="unless it is lazy"):
        sk.restore(place, home=f"rocksdb:{tmp_path}/home", background=False)


def test_a_checkpoint_travels(place: Path) -> None:
    made = sk.checkpoints(place)[-1]
    copied = pickle.loads(pickle.dumps(made))
    assert copied == made
    assert hash(copied) == hash(made)
    assert (copied.url, copied.number, copied.metadata) == (made.url, made.number, made.metadata)
    with lazily(copied, key_groups=range(2)) as kv:
        assert any(True for _ in counts(kv))
    assert made != sk.checkpoints(place)
    assert [*copied.verify()] == []


def test_another_checkpoint_of_the_same_number_is_not_taken_for_it(place: Path) -> None:
    copied = pickle.dumps(sk.checkpoints(place)[-1])
    for file in place.iterdir():
        file.unlink()
    with opened() as kv:
        counts(kv)[1] = 100
        kv.checkpoint(place)
    with pytest.raises(NoCheckpointError, match="another checkpoint of that number"):
        sk.restore(pickle.loads(copied))
    with sk.restore(place) as kv:
        assert counts(kv)[1] == 100
