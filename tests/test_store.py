"""The store: states, leaves as units, homes, snapshots and scans."""

import gc
import signal
import struct
from typing import Any

import msgpack
import pytest

from statekit import Store, leaf_of
from statekit.errors import (
    ArgumentError,
    ClosedError,
    CorruptBlockError,
    MemoryLimitError,
    NotOwnedError,
    OccupiedError,
    SchemaError,
    UnknownEntryError,
)
from statekit.keys import decode_key
from statekit.native.block import Block

GROUPS, SUBGROUPS = 8, 4
LEAVES = GROUPS * SUBGROUPS
pack, unpack = msgpack.packb, msgpack.unpackb


def new_store(**options: Any) -> Store:
    return Store(key_groups=GROUPS, subgroups=SUBGROUPS, **options)


@pytest.fixture
def store() -> Store:
    return new_store()


def leaf(key: Any, key_type: Any = str) -> int:
    return leaf_of(key_type, key, GROUPS, SUBGROUPS)


def fill(store: Store, count: int = 500) -> dict[str, int]:
    model = {f"key-{i}": i for i in range(count)}
    store.state("visits", "i64").put_many(list(model), list(model.values()))
    return model


def contents(store: Store, state: Any) -> dict[Any, Any]:
    return {state.codec.decode(key): value for key, value in store.scan(state)}


# ---- Opening and states


@pytest.mark.parametrize(
    ("groups", "subgroups"), [(0, 1), (3, 1), (1, 0), (1, 3), (2**16, 32), (-1, 1), (2**40, 1)]
)
def test_a_geometry_that_is_no_power_of_two_is_refused(groups: int, subgroups: int) -> None:
    with pytest.raises(ArgumentError, match="powers of two"):
        Store(groups, subgroups)


@pytest.mark.parametrize(("groups", "subgroups"), [(1, 1), (1, 16), (128, 1), (2**16, 1)])
def test_any_geometry_holds_what_is_put(groups: int, subgroups: int) -> None:
    store = Store(groups, subgroups)
    state = store.state("s", "i64", int)
    state.put_many(list(range(100)), list(range(100)))
    assert contents(store, state) == {i: i for i in range(100)}


def test_the_same_declaration_gives_the_same_handle(store: Store) -> None:
    assert store.state("s", "i64", int) is store.state("s", "i64", "i")
    assert [state.name for state in store.states()] == ["s"]


@pytest.mark.parametrize(("kind", "key_type"), [("f64", str), ("i64", int)])
def test_another_kind_or_key_type_under_the_same_name_is_refused(
    store: Store, kind: Any, key_type: Any
) -> None:
    store.state("visits", "i64", str)
    with pytest.raises(SchemaError, match="'visits' is here with kind i64 and str keys"):
        store.state("visits", kind, key_type)


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0b", "\ud800", 5])
def test_names_that_cannot_be_stored_are_refused(store: Store, name: Any) -> None:
    with pytest.raises(ArgumentError, match="cannot name a state"):
        store.state(name, "i64")


def test_an_unknown_kind_is_refused(store: Store) -> None:
    with pytest.raises(ArgumentError, match="i64, f64, bytes"):
        store.state("s", "set")  # type: ignore[call-overload]


def test_the_memory_limit_refuses_and_keeps_what_is_there() -> None:
    store = new_store(bytes_max=1 << 20)
    state = store.state("b", "bytes", int)
    put: list[int] = []

    def put_all() -> None:
        for key in range(10_000):
            state.put(key, bytes(1000))
            put.append(key)

    with pytest.raises(MemoryLimitError, match="bytes_max") as caught:
        put_all()
    assert isinstance(caught.value, MemoryError)
    assert store.bytes_used <= 1 << 20
    assert sorted(contents(store, state)) == put
    store.limit(0)
    put_all()


def test_stats_count_entries_and_bytes_per_state_and_leaf(store: Store) -> None:
    model = fill(store)
    visits, other = store.state("visits", "i64"), store.state("other", "bytes")
    other.put("x", bytes(1000))
    assert store.stats().entries == len(model) + 1
    assert store.stats(visits).entries == len(model)
    assert store.stats(other).entries == 1
    assert store.stats(other).bytes >= 1000
    assert store.stats().bytes == store.bytes_used
    assert store.stats().whole == LEAVES
    one = leaf("x")
    assert store.stats(other, one, one + 1).entries == 1
    in_leaf = sum(leaf(key) == one for key in model)
    assert store.stats(visits, one, one + 1).entries == in_leaf


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, LEAVES + 1), (2**40, 2**41)])
def test_leaves_that_do_not_exist_are_refused(store: Store, start: int, stop: int) -> None:
    for call in (
        lambda: store.stats(None, start, stop),
        lambda: store.detach(start, stop),
        lambda: store.mark(start, stop, "whole"),
    ):
        with pytest.raises(ArgumentError):
            call()
    for number in (-1, LEAVES, 2**40):
        for one in (store.residency, store.encode_leaf, store.dirty_take):
            with pytest.raises(ArgumentError):
                one(number)


# ---- Leaves


def test_every_entry_is_in_the_leaf_that_its_key_routes_to(store: Store) -> None:
    model = fill(store)
    visits = store.state("visits", "i64")
    for number in range(LEAVES):
        blocks = list(Block.each(store.encode_leaf(number, visits)))
        found = {key.decode(): value for block in blocks for key, value in block}
        assert found == {key: value for key, value in model.items() if leaf(key) == number}


def test_all_leaves_encoded_and_decoded_make_an_equal_store(store: Store) -> None:
    model = fill(store)
    store.state("lists", "list", int).put(7, pack([1, [2, 3]]))
    store.state("x", "f64", tuple[str, int]).put(("a", 1), 0.5)
    other = new_store()
    for number in range(LEAVES):
        other.decode_leaf(number, store.encode_leaf(number))
    assert {s.name for s in other.states()} == {s.name for s in store.states()}
    assert contents(other, other.state("visits", "i64")) == model
    assert other.state("lists", "list", int).get(7) == pack([1, [2, 3]])
    assert other.state("x", "f64", tuple[str, int]).get(("a", 1)) == 0.5
    for number in range(LEAVES):  # equal state gives equal bytes, state by state
        for state in store.states():
            mine = store.encode_leaf(number, state)
            theirs = other.encode_leaf(
                number,
                other.state(state.name, state.kind, state.codec.text),  # type: ignore[call-overload]
            )
            assert mine == theirs


def test_detach_and_attach_split_and_merge(store: Store) -> None:
    model = fill(store)
    visits = store.state("visits", "i64")
    used = store.bytes_used
    half = store.detach(0, LEAVES // 2)
    assert len(half) == LEAVES // 2
    gone = {key: value for key, value in model.items() if leaf(key) < LEAVES // 2}
    assert store.stats().away == LEAVES // 2
    with pytest.raises(NotOwnedError, match="attach the leaf"):
        visits.get(next(iter(gone)))
    with pytest.raises(NotOwnedError) as refused:
        visits.add_many(list(model))
    assert refused.value.record is not None
    with pytest.raises(NotOwnedError):
        store.detach(0, LEAVES)
    other = new_store()
    other.attach(half)
    assert contents(other, other.state("visits", "i64")) == gone
    assert store.bytes_used + other.bytes_used == used
    with pytest.raises(ClosedError, match="attached"):
        store.attach(half)
    store.attach(other.detach(0, LEAVES // 2))
    assert contents(store, visits) == model
    assert store.bytes_used == used


def test_attach_where_there_are_entries_is_refused_and_can_be_tried_elsewhere(store: Store) -> None:
    model = fill(store)
    leaves = store.detach(0, LEAVES)
    other = new_store()
    other.state("visits", "i64").put("key-1", 1)
    with pytest.raises(OccupiedError):
        other.attach(leaves)
    third = new_store()
    third.attach(leaves)
    assert contents(third, third.state("visits", "i64")) == model


def test_attach_to_a_store_of_another_size_is_refused(store: Store) -> None:
    fill(store)
    with pytest.raises(ArgumentError):
        Store(1, 1).attach(store.detach(0, 2))


def test_detached_leaves_outlive_their_store() -> None:
    store = new_store()
    model = fill(store)
    leaves = store.detach(0, LEAVES)
    del store
    gc.collect()
    other = new_store()
    other.attach(leaves)
    assert contents(other, other.state("visits", "i64")) == model


def test_clear_drops_one_state_in_some_leaves(store: Store) -> None:
    model = fill(store)
    visits, other = store.state("visits", "i64"), store.state("other", "i64")
    other.put("x", 1)
    store.clear(visits, 0, LEAVES // 2)
    assert contents(store, visits) == {k: v for k, v in model.items() if leaf(k) >= LEAVES // 2}
    store.clear(visits)
    assert contents(store, visits) == {}
    assert other.get("x") == 1


# ---- Homes


def test_an_absent_leaf_answers_unknown_never_missing(store: Store) -> None:
    visits = store.state("visits", "i64")
    store.mark(0, LEAVES, "absent")
    assert store.residency(0) == "absent"
    for call in (visits.get, visits.contains, visits.delete, visits.add, visits.get_encoded):
        with pytest.raises(UnknownEntryError, match="state 'visits', key 'alice'") as caught:
            call("alice")
        assert caught.value.keys == ("alice",)
        assert caught.value.state == "visits"
        assert not isinstance(caught.value, LookupError)
    visits.put("alice", 1)
    assert visits.get("alice") == 1
    assert visits.delete("alice")
    assert visits.get("alice") is None  # a deletion made here is known here
    assert visits.delete("bob", blind=True) in (True, False)
    assert visits.get("bob") is None


def test_installed_answers_are_under_what_is_here(store: Store) -> None:
    visits = store.state("visits", "i64")
    store.mark(0, LEAVES, "absent")
    visits.put("alice", 1)
    visits.install("alice", struct.pack("<q", 99))
    visits.install("bob", struct.pack("<q", 5))
    visits.install("carol", None)
    assert (visits.get("alice"), visits.get("bob"), visits.get("carol")) == (1, 5, None)
    assert store.stats().dirty == 1


def test_blocks_from_the_home_fill_in_under_newer_changes(store: Store) -> None:
    model = fill(store)
    blocks = [store.encode_leaf(number) for number in range(LEAVES)]
    store.mark(0, LEAVES, "absent")
    visits = store.state("visits", "i64")
    visits.put("key-1", -1)
    visits.delete("key-2", blind=True)
    for number in range(LEAVES):
        store.decode_leaf(number, blocks[number], "under_all")
    assert store.stats().whole == LEAVES
    model["key-1"] = -1
    del model["key-2"]
    assert contents(store, visits) == model


def test_write_back_gives_each_change_once_and_again_if_it_failed(store: Store) -> None:
    store.write_back()
    visits = store.state("visits", "i64")
    visits.put("alice", 1)
    visits.put("bob", 2)
    visits.delete("bob")
    number, bobs = leaf("alice"), leaf("bob")
    first = store.dirty_take(number)
    (block,) = Block.each(first)
    assert block.is_delta
    assert block.find("alice") == 1
    store.dirty_done(number, written=False)
    assert store.dirty_take(number) == first
    store.dirty_done(number, written=True)
    if bobs != number:
        (block,) = Block.each(store.dirty_take(bobs))
        store.dirty_done(bobs, written=True)
    assert block.find("bob", missing="missing", deleted="deleted") == "deleted"
    assert store.stats().dirty == 0
    assert store.dirty_take(number) == b""


def test_eviction_drops_clean_entries_and_leaves_turn_partial(store: Store) -> None:
    model = fill(store, 2000)
    visits = store.state("visits", "i64")
    assert store.evict(1 << 30) == 0  # all is dirty: nothing may go
    for number in range(LEAVES):
        store.dirty_take(number)
        store.dirty_done(number, written=True)
    assert store.evict(1 << 30) > 0
    stats = store.stats()
    assert stats.partial > 0
    assert stats.entries < len(model)
    assert any(raises_unknown(visits, key) for key in model)


def raises_unknown(state: Any, key: Any) -> bool:
    try:
        state.get(key)
    except UnknownEntryError:
        return True
    return False


# ---- Snapshots and changes


def read_snapshot(snapshot: Any) -> dict[bytes, Any]:
    return {
        key: value for _, data in snapshot for block in Block.each(data) for key, value in block
    }


def test_a_snapshot_is_the_store_as_it_was(store: Store) -> None:
    model = fill(store)
    visits = store.state("visits", "i64")
    with store.snapshot() as snapshot:
        visits.add_many(list(model), 1000)
        visits.delete("key-1")
        visits.put("new", 1)
        then = read_snapshot(snapshot)
    assert then == {key.encode(): value for key, value in model.items()}
    assert visits.get("key-2") == 1002


def test_two_snapshots_see_two_moments(store: Store) -> None:
    visits = store.state("visits", "i64")
    visits.put("a", 1)
    with store.snapshot() as first:
        visits.put("a", 2)
        with store.snapshot() as second:
            visits.put("a", 3)
            assert read_snapshot(second) == {b"a": 2}
        assert second.epoch > first.epoch
        assert read_snapshot(first) == {b"a": 1}
    assert visits.get("a") == 3


def test_a_delta_holds_what_changed_and_what_was_deleted(store: Store) -> None:
    fill(store)
    visits = store.state("visits", "i64")
    with store.snapshot() as full:
        read_snapshot(full)
    store.track(full.epoch)
    visits.put("key-7", -7)
    visits.delete("key-8")
    visits.put("new", 1)
    with store.snapshot(since=full.epoch) as delta:
        changed = read_snapshot(delta)
    assert changed == {b"key-7": -7, b"key-8": None, b"new": 1}
    marks = store.changed_leaves(full.epoch)
    assert {n for n in range(LEAVES) if marks[n]} == {leaf("key-7"), leaf("key-8"), leaf("new")}


def test_epochs_per_leaf_say_what_each_leaf_needs(store: Store) -> None:
    model = fill(store)
    ended = store.advance_epoch()
    assert store.epoch > ended
    since = [0 if number == leaf("key-3") else ended for number in range(LEAVES)]
    store.track(ended)
    with store.snapshot(since=since) as snapshot:
        found = read_snapshot(snapshot)
    whole = {k.encode(): v for k, v in model.items() if leaf(k) == leaf("key-3")}
    assert found == whole
    with pytest.raises(ArgumentError, match="epochs"):
        store.snapshot(since=[0])


def test_a_closed_snapshot_says_so(store: Store) -> None:
    snapshot = store.snapshot()
    snapshot.close()
    snapshot.close()
    with pytest.raises(ClosedError):
        next(snapshot)


def test_a_snapshot_keeps_its_store_alive() -> None:
    store = new_store()
    model = fill(store)
    snapshot = store.snapshot()
    del store
    gc.collect()
    assert len(read_snapshot(snapshot)) == len(model)


# ---- Scans


def test_a_scan_goes_on_from_its_cursor(store: Store) -> None:
    model = fill(store)
    visits = store.state("visits", "i64")
    scan = store.scan(visits)
    seen = dict(next(scan) for _ in range(100))
    seen |= dict(store.scan(visits, start=scan.cursor))
    assert seen == {key.encode(): value for key, value in model.items()}


def test_a_scan_does_not_pass_over_leaves_that_are_not_whole(store: Store) -> None:
    model = fill(store)
    visits = store.state("visits", "i64")
    store.mark(0, 1, "absent")
    with pytest.raises(UnknownEntryError, match="leaf 0"):
        list(store.scan(visits))
    here = dict(store.scan(visits, partial=True))
    assert len(here) == sum(leaf(key) != 0 for key in model)


def test_a_snapshot_knows_what_each_leaf_was_when_it_was_taken() -> None:
    store = Store(key_groups=4, subgroups=1)
    state = store.state("n", "i64", int)
    state.put_many(range(100), range(100))
    store.mark(1, 2, "absent")
    store.mark(2, 3, "partial")
    with store.snapshot() as snapshot:
        before = [snapshot.residency(leaf) for leaf in range(4)]
        store.detach(0, 1)  # a change: the snapshot is served first
        store.mark(1, 3, "whole")
        during = [snapshot.residency(leaf) for leaf in range(4)]
        entries = {key for _, data in snapshot for block in Block.each(data) for key, _ in block}
        after = [snapshot.residency(leaf) for leaf in range(4)]
        with pytest.raises(ArgumentError):
            snapshot.residency(4)
    assert before == during == after == ["whole", "absent", "partial", "whole"]
    in_leaf = {leaf_of(int, key, 4, 1) for key in range(100)} - {1}
    assert {leaf_of(int, decode_key(int, key), 4, 1) for key in entries} == in_leaf
    with pytest.raises(ClosedError):
        snapshot.residency(0)


def test_a_snapshot_outlives_its_store() -> None:
    for _ in range(50):  # the collector may finalise a cycle's store before its snapshot
        store = Store(key_groups=4, subgroups=4)
        store.state("a", "i64").put("x", 1)
        cycle: list[Any] = [store, store.snapshot()]
        cycle.append(cycle)
        del store, cycle
        gc.collect(1)
    store = new_store()
    store.state("a", "i64").put("x", 1)
    snapshot = store.snapshot()
    store.close()
    del store
    gc.collect()
    assert [dict(block) for _, data in snapshot for block in Block.each(data)] == [{b"x": 1}]
    snapshot.close()


def test_a_closed_store_leaves_its_snapshots_readable_however_little_they_may_queue() -> None:
    store = new_store()
    model = fill(store)
    snapshot = store.snapshot(bytes_max=1)
    store.close()
    read = {key: value for _, data in snapshot for b in Block.each(data) for key, value in b}
    assert read == {key.encode(): value for key, value in model.items()}


def test_a_block_that_fails_to_decode_declares_no_state(store: Store) -> None:
    other = new_store()
    other.state("foreign", "i64").put("a", 1)
    at = leaf("a")
    damaged = bytearray(other.encode_leaf(at))
    (block,) = Block.each(bytes(damaged))
    damaged[bytes(damaged).index(block.hashes.tobytes())] ^= 1
    with pytest.raises(CorruptBlockError):
        store.decode_leaf(at, bytes(damaged))
    assert store.states() == ()
    store.state("foreign", "bytes")  # the name is free


def test_an_epoch_that_is_yet_to_come_is_refused(store: Store) -> None:
    fill(store)
    future = store.epoch + 1
    for ask in (
        lambda: store.snapshot(since=future),
        lambda: store.encode_leaf(0, since=future),
        lambda: store.changed_leaves(future),
    ):
        with pytest.raises(ArgumentError, match="yet to come"):
            ask()


def test_a_scan_of_what_is_here_leaves_deletions_out(store: Store) -> None:
    state = store.state("n", "i64")
    store.mark(0, store.leaves, "absent")
    state.put("here", 1)
    state.delete("gone", blind=True)
    assert list(store.scan(state, partial=True)) == [(b"here", 1)]
    with pytest.raises(UnknownEntryError):
        list(store.scan(state))


class Interrupted(Exception):
    pass


def test_leaves_survive_a_signal_that_interrupts_attach() -> None:
    """CPython runs a handler right after the native call: if it raises, nothing may be freed."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        source = Store(key_groups=2, subgroups=1)
        source.state("n", "bytes").put_many(map(str, range(1000)), [b"x" * 100] * 1000)
        entries = source.stats(start=0, stop=1).entries
        leaves = source.detach(0, 1)
        target = Store(key_groups=2, subgroups=1)
        other = target.state("m", "bytes")
        other.put_many(map(str, range(200)), [b"y"] * 200)
        target.clear(other, 0, 1)
        snapshot = target.snapshot(bytes_max=1)
        target.clear(other, 1, 2)  # fills the queue: attach will wait for a reader that never comes
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            target.attach(leaves)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    snapshot.close()
    del leaves
    gc.collect()
    assert target.stats(start=0, stop=1).entries == entries
    (attached,) = (state for state in target.states() if state.name == "n")
    assert sum(attached.contains_many(list(map(str, range(1000))))) == entries


def test_operations_are_counted_per_state(store: Store) -> None:
    visits, other = store.state("visits", "i64"), store.state("other", "i64")
    visits.add("a")
    visits.contains("b")
    visits.add_many(["a", "b", "c"])
    other.put("a", 1)
    assert store.stats(visits).operations == 5
    assert store.stats().operations == 6
    store.detach(0, LEAVES)
    assert store.stats(visits).operations == 5


def test_cold_write_back_leaves_what_is_in_use(store: Store) -> None:
    visits = store.state("visits", "i64")
    visits.put_many(["a", "b"], [1, 2])

    def taken() -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for number in range(LEAVES):
            for block in Block.each(store.dirty_take(number, cold=True)):
                found.update(block)
            store.dirty_done(number, written=True)
        return found

    assert taken() == {}
    store.evict(1)  # the hand passes
    visits.get("a")
    assert taken() == {b"b": 2}
