"""Python threads on one store: exact totals, whatever the interleaving.

Bounded numbers of operations, no sleeps. cffi releases the GIL during calls, so C runs in parallel.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import compress
from typing import Any

import msgpack
import numpy as np
import pytest

from statekit import Store
from statekit.errors import (
    ArgumentError,
    ClosedError,
    NotOwnedError,
    OccupiedError,
    SchemaError,
    SnapshotOverrunError,
    UnknownEntryError,
)
from statekit.native.block import Block

THREADS = 4
KEYS = 97
pack, unpack = msgpack.packb, msgpack.unpackb


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Threads take turns after microseconds instead of 5 ms: more interleavings."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def new_store() -> Store:
    return Store(4, 4)


def run(*works: Callable[[], None]) -> None:
    """Runs functions in threads that start together. Raises the first error of any of them."""
    barrier = threading.Barrier(len(works))
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def contents(store: Store, state: Any) -> dict[Any, Any]:
    return {state.codec.decode(key): value for key, value in store.scan(state)}


# ---- Totals


def test_single_adds_add_up() -> None:
    store = new_store()
    ints, floats = store.state("i", "i64", int), store.state("f", "f64", int)
    turns = 3000

    def work() -> None:
        for turn in range(turns):
            ints.add(turn % KEYS)
            floats.add(turn % KEYS, 0.5)

    run(*[work] * THREADS)
    each = Counter(turn % KEYS for turn in range(turns))
    expected = {key: THREADS * count for key, count in each.items()}
    assert contents(store, ints) == expected
    assert contents(store, floats) == {key: count / 2 for key, count in expected.items()}


def test_batches_and_single_adds_add_up() -> None:
    store = new_store()
    state = store.state("i", "i64", int)
    column = np.arange(20_000) % KEYS
    rounds = 10

    def batches() -> None:
        for _ in range(rounds):
            state.add_many(column)

    def singles() -> None:
        for turn in range(2000):
            state.add(turn % KEYS, 1000_000)

    run(batches, batches, singles, singles)
    in_batch, alone = Counter(column.tolist()), Counter(t % KEYS for t in range(2000))
    assert contents(store, state) == {
        key: 2 * rounds * in_batch[key] + 2 * 1000_000 * alone[key] for key in range(KEYS)
    }


def test_every_thread_sees_its_own_sums_in_returning_batches() -> None:
    """The new values of one key, over all threads, are 1, 2, 3, ... with none twice."""
    state = new_store().state("i", "i64", int)
    seen: list[list[int]] = []

    def work() -> None:
        mine = []
        for _ in range(20):
            mine += state.add_many([7] * 50, returning=True).tolist()  # type: ignore[union-attr]
        assert mine == sorted(mine)
        seen.append(mine)

    run(*[work] * THREADS)
    everything = sorted(value for mine in seen for value in mine)
    assert everything == list(range(1, THREADS * 1000 + 1))


def test_compare_and_set_lets_one_thread_win_each_round() -> None:
    state = new_store().state("i", "i64")
    state.put("a", 0)
    wins: list[int] = []

    def work() -> None:
        mine = 0
        while (now := state.get("a")) < 2000:  # type: ignore[operator]
            mine += state.compare_and_set("a", now, now + 1)  # type: ignore[operator]
        wins.append(mine)

    run(*[work] * THREADS)
    assert sum(wins) == 2000
    assert state.get("a") == 2000


def test_appends_and_map_puts_lose_nothing() -> None:
    store = new_store()
    lists, maps = store.state("l", "list"), store.state("m", "map")
    turns = 500

    def work(number: int) -> None:
        for turn in range(turns):
            lists.append("a", pack([number, turn]))
            maps.set("a", ((number, turn),), pack(turn))
        lists.append_many(["a"] * turns, [pack([number, turns + turn]) for turn in range(turns)])

    run(*[lambda number=number: work(number) for number in range(THREADS)])
    found = unpack(lists.get("a"))
    for number in range(THREADS):  # each thread's own elements are in their order
        assert [turn for who, turn in found if who == number] == list(range(2 * turns))
    assert maps.length("a") == THREADS * turns


def test_entries_come_and_go() -> None:
    """Many threads put and delete, each its own keys; the last operation on each key counts."""
    store = new_store()
    state = store.state("b", "bytes", int)

    def work(number: int) -> None:
        own = range(number, 4000, THREADS)
        for key in own:
            state.put(key, bytes(key % 300))
        assert sum(state.delete_many(list(own)[::2])) == len(own[::2])
        for key in own[1::4]:
            state.put(key, b"again")

    run(*[lambda number=number: work(number) for number in range(THREADS)])
    model = {}
    for number in range(THREADS):
        own = range(number, 4000, THREADS)
        model |= {key: bytes(key % 300) for key in own[1::2]}
        model |= dict.fromkeys(own[1::4], b"again")
    assert contents(store, state) == model
    store.clear(state)
    store.mark(0, store.leaves, "absent")
    assert store.bytes_used == 0


def test_threads_that_declare_states_get_the_same_ones() -> None:
    store = new_store()
    refused: list[str] = []

    def work(number: int) -> None:
        for name in range(60):
            store.state(f"s{name}", "i64").add("a")
            try:
                store.state(f"t{name}", "i64" if number % 2 else "f64")  # type: ignore[call-overload]
            except SchemaError:
                refused.append(f"t{name}")
            assert f"s{name}" in {state.name for state in store.states()}

    run(*[lambda number=number: work(number) for number in range(THREADS)])
    assert len(store.states()) == 120
    assert all(store.state(f"s{name}", "i64").get("a") == THREADS for name in range(60))
    assert Counter(refused) == {f"t{name}": THREADS // 2 for name in range(60)}


# ---- Snapshots


def read(snapshot: Any) -> dict[bytes, Any]:
    return {k: v for _, blocks in snapshot for block in Block.each(blocks) for k, v in block}


def leaves_of(snapshot: Any, leaves: list[int]) -> None:
    leaves.extend(leaf for leaf, _ in snapshot)


def test_snapshots_are_cuts_of_what_each_thread_did_in_order() -> None:
    """Each writer counts its keys up in turn, so at any moment they differ by one at most, with the
    earlier keys ahead. A snapshot that is no cut of that order would show."""
    store = new_store()
    state = store.state("i", "i64", tuple[int, int])
    writers, keys, rounds = 3, 40, 60
    seen: list[int] = []

    def write(number: int) -> None:
        for _ in range(rounds):
            for key in range(keys):
                state.add((number, key))

    def look() -> None:
        for _ in range(25):
            with store.snapshot() as snapshot:
                image = {state.codec.decode(key): value for key, value in read(snapshot).items()}
            for number in range(writers):
                counts = [image.get((number, key), 0) for key in range(keys)]
                assert counts == sorted(counts, reverse=True)
                assert counts[0] - counts[-1] <= 1
            seen.append(sum(image.values()))

    run(*[lambda number=number: write(number) for number in range(writers)], look)
    assert seen == sorted(seen)
    assert contents(store, state) == {
        (number, key): rounds for number in range(writers) for key in range(keys)
    }


def test_a_base_and_deltas_taken_while_threads_write_make_the_final_store() -> None:
    store, replica = new_store(), new_store()
    state = store.state("i", "i64", int)
    state.put_many(list(range(500)), [0] * 500)
    done = threading.Event()

    def write() -> None:
        for turn in range(1500):
            state.add(turn % 500)
            if turn % 5 == 0:
                state.delete(turn % 250)

    def back_up() -> None:
        since = None
        while True:
            last = done.is_set()
            with store.snapshot(since=since) as snapshot:
                store.track(snapshot.epoch)
                for leaf, blocks in snapshot:
                    replica.decode_leaf(leaf, blocks, "over" if since else "replace")
                since = snapshot.epoch
            if last:
                return

    def write_all() -> None:
        try:
            run(write, write, write)
        finally:
            done.set()

    run(write_all, back_up)
    assert contents(replica, replica.state("i", "i64", int)) == contents(store, state)


def test_a_snapshot_that_is_not_read_holds_nobody_up_for_ever() -> None:
    """Writers wait for the reader of a full queue, then give the snapshot up."""
    store = new_store()
    state = store.state("b", "bytes", int)
    state.put_many(list(range(1000)), [bytes(1000)] * 1000)
    snapshot = store.snapshot(bytes_max=1)

    def write() -> None:
        for key in range(1000):
            state.put(key, b"new")

    run(write, write)
    with snapshot, pytest.raises(SnapshotOverrunError):
        read(snapshot)
    assert set(contents(store, state).values()) == {b"new"}


def test_snapshots_may_be_closed_while_others_read_and_write() -> None:
    store = new_store()
    state = store.state("i", "i64", int)
    state.put_many(list(range(1000)), [1] * 1000)

    def write() -> None:
        for turn in range(100):
            state.add_many(list(range(0, 1000, 7)), turn)

    def look() -> None:
        for turn in range(60):
            snapshot = store.snapshot()
            for _ in range(turn % 20):
                next(snapshot, None)
            snapshot.close()

    def share() -> None:
        """Two threads read one snapshot: each leaf goes to one of them."""
        for _ in range(20):
            leaves: list[int] = []
            with store.snapshot() as snapshot:
                reader = partial(leaves_of, snapshot, leaves)
                run(reader, reader)
            assert sorted(leaves) == list(range(store.leaves))

    run(write, look, share)
    total = sum(range(100))
    assert contents(store, state) == {k: 1 + total * (k % 7 == 0) for k in range(1000)}


# ---- Leaves


def test_leaves_that_go_back_and_forth_lose_no_count() -> None:
    """Leaves move between two stores while threads count. If a leaf is away, the count is done in
    the other store, or tried again."""
    stores = [new_store(), new_store()]
    stores[1].mark(0, stores[1].leaves, "away")
    states = [store.state("i", "i64", int) for store in stores]
    turns, moves = 2000, 100
    moving = threading.Event()  # cleared if leaves were lost, so that nobody waits for them
    moving.set()

    def count() -> None:
        for turn in range(turns):
            at = 0
            while moving.is_set():
                try:
                    states[at].add(turn % KEYS)
                    break
                except NotOwnedError:
                    at = 1 - at

    def count_in_batches() -> None:
        for _ in range(20):
            todo, at = list(range(KEYS)), 0
            while todo and moving.is_set():
                try:
                    states[at].add_many(todo)
                    todo = []
                except NotOwnedError as away:
                    undone = (status != 0 for status in away.statuses or b"")
                    todo = list(compress(todo, undone))
                    at = 1 - at

    def move() -> None:
        try:
            for turn in range(moves):
                start = turn % 13
                stores[1].attach(stores[0].detach(start, start + 3))
                if turn % 4:  # some stay for a while
                    stores[0].attach(stores[1].detach(start, start + 3))
                else:
                    stores[0].attach(stores[1].detach(start, start + 1))
                    stores[0].attach(stores[1].detach(start + 1, start + 3))
        except BaseException:
            moving.clear()
            raise

    run(count, count, count_in_batches, move)
    expected = Counter(turn % KEYS for turn in range(turns))
    found: Counter[int] = Counter()
    for store, state in zip(stores, states, strict=True):
        for key, value in store.scan(state, partial=True):
            found[state.codec.decode(key)] += value
    assert found == {key: 2 * expected[key] + 20 for key in range(KEYS)}
    assert sum(store.stats().whole for store in stores) == stores[0].leaves


def test_detached_leaves_are_attached_by_one_thread_only() -> None:
    store = new_store()
    store.state("i", "i64", int).put_many(list(range(200)), list(range(200)))
    for _ in range(30):
        leaves = store.detach(0, store.leaves)
        others = [new_store() for _ in range(THREADS)]
        refused: list[type] = []

        def attach(other: Store, leaves: Any = leaves, refused: Any = refused) -> None:
            try:
                other.attach(leaves)
            except (ClosedError, OccupiedError) as error:
                refused.append(type(error))

        run(*[lambda other=other, attach=attach: attach(other) for other in others])
        assert refused == [ClosedError] * (THREADS - 1)
        (owner,) = [other for other in others if other.stats().entries == 200]
        store.attach(owner.detach(0, owner.leaves))
    assert store.stats().entries == 200


def test_write_back_and_eviction_while_threads_count() -> None:
    """Home is a dict under a lock. Memory is a quarter of what is needed; nothing is lost."""
    store = new_store()
    store.write_back()
    store.mark(0, store.leaves, "absent")
    state = store.state("i", "i64", int)
    home: dict[int, int] = {}
    lock = threading.Lock()
    turns, keys = 1500, 400
    counting = [True]

    def fetch(key: int) -> None:
        with lock:  # between the answer and its installation no newer value may be written
            value = home.get(key)
            state.install(key, None if value is None else value.to_bytes(8, "little", signed=True))

    def count(step: int) -> None:
        for turn in range(turns):
            key = turn * step % keys
            while True:
                try:
                    state.add(key)
                    break
                except UnknownEntryError:
                    fetch(key)

    def flush() -> None:
        for leaf in range(store.leaves):
            blocks = store.dirty_take(leaf)
            with lock:
                for block in Block.each(blocks):
                    for key, value in block:
                        home[state.codec.decode(key)] = value
                if blocks:
                    store.dirty_done(leaf, written=True)

    def keep_small() -> None:
        while counting[0]:
            flush()
            store.evict(4096)

    def count_all() -> None:
        try:
            run(*[lambda step=step: count(step) for step in (1, 3, 7)])
        finally:
            counting[0] = False

    run(count_all, keep_small)
    flush()
    expected: Counter[int] = Counter()
    for step in (1, 3, 7):
        expected.update(turn * step % keys for turn in range(turns))
    assert home == expected
    assert store.stats().dirty == 0


def test_one_write_back_a_leaf_at_a_time() -> None:
    store = Store(1, 1)
    state = store.state("i", "i64")
    taken: list[int] = []
    refused: list[int] = []

    def work() -> None:
        for turn in range(200):
            state.put("a", turn)
            try:
                blocks = store.dirty_take(0)
            except ArgumentError:
                refused.append(turn)
                continue
            if blocks:
                taken.append(turn)
                store.dirty_done(0, written=True)

    run(*[work] * THREADS)
    assert taken
    assert len(taken) + len(refused) <= 200 * THREADS
    store.dirty_take(0)
    store.dirty_done(0, written=True)
    assert store.stats().dirty == 0


def test_scans_stats_and_blocks_while_threads_write() -> None:
    """Whatever is read is well formed, and a leaf's block shows the leaf at one moment."""
    store = Store(1, 1)
    state = store.state("n", "nested", int)

    def write() -> None:
        for turn in range(400):
            state.put(turn % 50, pack({"a": turn, "b": [turn] * (turn % 80)}))
            if turn % 3 == 0:
                state.delete((turn + 25) % 50)

    def look() -> None:
        for _ in range(150):
            for block in Block.each(store.encode_leaf(0)):
                block.check()
                for _, packed in block:
                    value = unpack(packed)
                    assert value["b"] == [value["a"]] * (value["a"] % 80)
            stats = store.stats()
            assert stats.entries <= 50
            assert store.bytes_used >= 0

    run(write, write, look, look)


# ---- The end


@pytest.mark.parametrize("how", ["single", "batch", "snapshot", "encode", "evict", "detach"])
def test_a_store_may_be_closed_while_it_is_used(how: str) -> None:
    """Every thread that uses it ends with ClosedError, and nothing else."""
    store = new_store()
    ints, lists = store.state("i", "i64", int), store.state("l", "list", int)
    ints.put_many(list(range(500)), list(range(500)))
    started = [threading.Event() for _ in range(3)]

    def use() -> None:
        if how == "single":
            ints.add(7)
            lists.append(7, pack(1))
            ints.get(8)
        elif how == "batch":
            ints.add_many(list(range(100)))
            lists.append_many([1, 2, 3], ["a", "b", "c"])
        elif how == "snapshot":
            with store.snapshot() as snapshot:
                ints.add(7)
                read(snapshot)
        elif how == "encode":
            for leaf in range(store.leaves):
                store.decode_leaf(leaf, store.encode_leaf(leaf))
            list(store.scan(ints, partial=True))
        elif how == "evict":
            for leaf in range(store.leaves):
                store.dirty_take(leaf)
                store.dirty_done(leaf, written=True)
            store.evict(1000)
        else:
            leaves = store.detach(0, 2)
            try:
                store.attach(leaves)
            except OccupiedError:
                store.mark(0, 2, "absent")

    def work(number: int) -> None:
        for _ in range(10**9):
            try:
                use()
            except ClosedError:
                return
            except (UnknownEntryError, NotOwnedError, ArgumentError):
                pass  # a leaf that is away, or being written by another thread
            finally:
                started[number].set()
        raise AssertionError("it was never closed")

    def close() -> None:
        for event in started:
            event.wait()
        store.close()

    run(*[lambda number=number: work(number) for number in range(3)], close)
    with pytest.raises(ClosedError):
        store.stats()


def test_a_dead_snapshot_is_given_up_though_others_come_and_go() -> None:
    store = Store(key_groups=4, subgroups=1)
    state = store.state("n", "i64", int)
    state.put_many(range(100), range(100))
    dead = store.snapshot(bytes_max=1)
    done = threading.Event()

    def others() -> None:
        while not done.is_set():
            store.snapshot().close()

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for key in range(100):
            state.put(key, 0)  # the second leaf finds the queue full, and waits
    finally:
        done.set()
        thread.join()
    with pytest.raises(SnapshotOverrunError):
        list(dead)
