"""Timers: against a dict of sets of due times."""

import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from statekit import Store, leaf_of
from statekit.errors import (
    ArgumentError,
    BadValueError,
    ClosedError,
    KeyTypeError,
    KindError,
    NotOwnedError,
    OverflowStateError,
    UnknownEntryError,
)
from statekit.native.block import Block
from statekit.native.timers import TimersState

GEOMETRY = (4, 1)
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
KEYS = [("a", 1), ("a", 2), ("b" * 30, -5), ("", 0), ("é", 2**63 - 1)]
KEY_TYPE = tuple[str, int]
DUES = [INT64_MIN, -1, 0, 1, 10, 11, 500, INT64_MAX - 1, INT64_MAX]


def timers_in(store: Store) -> TimersState:
    return store.state("t", "timers", KEY_TYPE)


# ---- Examples


def test_timers_are_given_out_once_in_order_of_time_and_key() -> None:
    timers = Store().state("t", "timers")
    for key, due in (("b", 7), ("a", 7), ("c", 5), ("a", 9), ("a", 7)):
        timers.set(key, due)
    assert timers.get("a") == (7, 9)
    assert timers.due(8, peek=True) == [(5, "c"), (7, "a"), (7, "b")]
    assert timers.due(8) == [(5, "c"), (7, "a"), (7, "b")]
    assert timers.due(8) == []
    assert timers.next_due == 9
    assert timers.cancel("a", 9)
    assert not timers.cancel("a", 9)
    assert timers.next_due is None
    assert not timers.contains("a")  # with its last timer, the entry is gone


def test_a_range_of_leaves_is_asked_for_its_timers_only() -> None:
    store = Store(*GEOMETRY)
    timers = timers_in(store)
    for key in KEYS:
        timers.set(key, 1)
    leaves = {key: leaf_of(KEY_TYPE, key, *GEOMETRY) for key in KEYS}
    found = timers.due(1, start=1, stop=3)
    assert {key for _, key in found} == {key for key in KEYS if 1 <= leaves[key] < 3}
    assert len(timers.due(1)) == len(KEYS) - len(found)


def test_timers_move_with_their_leaves() -> None:
    store, other = Store(*GEOMETRY), Store(*GEOMETRY)
    timers = timers_in(store)
    for key in KEYS:
        timers.set(key, 3)
    other.mark(0, other.leaves, "away")
    other.attach(store.detach(0, store.leaves))
    assert timers.due(3) == []
    with pytest.raises(NotOwnedError):
        timers.set(KEYS[0], 4)
    assert len(timers_in(other).due(3)) == len(KEYS)


def test_timers_are_not_evicted() -> None:
    store = Store(*GEOMETRY)
    timers, values = timers_in(store), store.state("v", "bytes", KEY_TYPE)
    for key in KEYS:
        timers.set(key, 3)
        values.put(key, b"x" * 1000)
    for leaf in range(store.leaves):
        store.dirty_take(leaf)
        store.dirty_done(leaf, written=True)
    assert store.evict(10**9) > 0
    assert store.stats(values).entries == 0
    assert len(timers.due(3)) == len(KEYS)


def test_bad_arguments_say_so() -> None:
    store = Store(*GEOMETRY)
    timers = store.state("t", "timers")
    with pytest.raises(OverflowStateError):
        timers.set("a", 2**63)
    with pytest.raises(BadValueError):
        timers.set("a", "soon")  # type: ignore[arg-type]
    with pytest.raises(KeyTypeError):
        timers.set(5, 5)
    with pytest.raises(BadValueError):
        timers.due("now")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        timers.due(1, start=3, stop=2)
    with pytest.raises(BadValueError):
        timers.put_encoded("a", b"12345678" * 2)  # the same due time twice
    with pytest.raises(ArgumentError, match="expire"):
        store.state("u", "timers", timed=True)  # type: ignore[call-overload]
    with pytest.raises(KindError):
        TimersState.set(store.state("n", "i64"), "a", 1)  # type: ignore[arg-type]
    store.mark(0, store.leaves, "absent")
    with pytest.raises(UnknownEntryError):
        timers.set("a", 1)
    timers.install("a", (5).to_bytes(8, "little"))
    timers.set("a", 1)
    assert timers.next_due == 1
    store.close()
    for call in (lambda: timers.due(1), lambda: timers.next_due, lambda: timers.set("a", 1)):
        with pytest.raises(ClosedError):
            call()


def test_each_timer_is_taken_by_one_thread() -> None:
    store = Store(*GEOMETRY)
    timers = store.state("t", "timers", int)
    taken: list[list[tuple[int, Any]]] = [[] for _ in range(3)]
    cancelled: list[tuple[int, Any]] = []
    done = threading.Event()

    def take(mine: list[tuple[int, Any]]) -> None:
        while not done.is_set():
            mine.extend(timers.due(INT64_MAX))

    def cancel() -> None:
        for n in range(0, 6000, 7):
            if timers.cancel(n % 97, n):
                cancelled.append((n, n % 97))

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    threads.append(threading.Thread(target=cancel))
    for thread in threads:
        thread.start()
    for n in range(6000):
        timers.set(n % 97, n)
    threads[-1].join()
    done.set()
    for thread in threads:
        thread.join()
    given = Counter(timer for mine in (*taken, cancelled, timers.due(INT64_MAX)) for timer in mine)
    assert given == Counter((n, n % 97) for n in range(6000))


# ---- Any order of calls


class TimersMachine(RuleBasedStateMachine):
    @initialize(track=st.booleans(), write_back=st.booleans())
    def start(self, track: bool, write_back: bool) -> None:
        self.store = Store(*GEOMETRY)
        self.timers = timers_in(self.store)
        self.store.write_back(write_back)
        self.track = track
        self.model: dict[tuple[str, int], set[int]] = {key: set() for key in KEYS}
        self.replica: Store | None = None
        self.epoch = 0

    @rule(key=st.sampled_from(KEYS), due=st.sampled_from(DUES))
    def set(self, key: tuple[str, int], due: int) -> None:
        self.timers.set(key, due)
        self.model[key].add(due)

    @rule(key=st.sampled_from(KEYS), due=st.sampled_from(DUES))
    def cancel(self, key: tuple[str, int], due: int) -> None:
        assert self.timers.cancel(key, due) == (due in self.model[key])
        self.model[key].discard(due)

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: tuple[str, int]) -> None:
        assert self.timers.delete(key) == bool(self.model[key])
        self.model[key].clear()

    @rule(watermark=st.sampled_from(DUES), peek=st.booleans())
    def due(self, watermark: int, peek: bool) -> None:
        expected = sorted(
            (due, self.timers.codec.encode(key), key)
            for key, dues in self.model.items()
            for due in dues
            if due <= watermark
        )
        found = self.timers.due(watermark, peek=peek)
        assert found == [(due, key) for due, _, key in expected]
        for due, key in found:
            if not peek:
                self.model[key].discard(due)

    @rule(start=st.integers(0, 4), stop=st.integers(0, 4))
    def detach_and_attach(self, start: int, stop: int) -> None:
        self.store.attach(self.store.detach(min(start, stop), max(start, stop)))

    @rule(leaf=st.integers(0, 3))
    def encode_and_decode(self, leaf: int) -> None:
        data = self.store.encode_leaf(leaf)
        for block in Block.each(data):
            assert block.kind == "timers"
            block.check()
        self.store.decode_leaf(leaf, data)

    @rule()
    def snapshot(self) -> None:
        """A full one, or a delta over the replica, which then has the same timers."""
        since = None if self.replica is None else self.epoch
        self.replica = self.replica or Store(*GEOMETRY)
        with self.store.snapshot(since) as snapshot:
            for leaf, data in snapshot:
                self.replica.decode_leaf(leaf, data, "over")
            self.epoch = snapshot.epoch
        if self.track:
            self.store.track(self.epoch)
        there = timers_in(self.replica)
        assert {key: set(there.get(key)) for key in KEYS} == self.model
        assert there.next_due == self.timers.next_due

    @invariant()
    def timers_are_those_of_the_model(self) -> None:
        for key, dues in self.model.items():
            assert self.timers.get(key) == tuple(sorted(dues))
        first = min((due for dues in self.model.values() for due in dues), default=None)
        assert self.timers.next_due == (None if first == INT64_MAX else first)


TestMachine = TimersMachine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
