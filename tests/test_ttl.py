"""Timed states: against a dict of (value, stamp) and the rule stamp + ttl <= now."""

from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statekit import Store, leaf_of
from statekit.errors import ArgumentError, ClosedError, SchemaError
from statekit.native.block import Block

TTL = 100
INT64_MAX = 2**63 - 1
# From short keys, which are kept in their slots, to long ones. It changes from 10 to 11 bytes.
KEYS = ["", "a", "k" * 9, "k" * 10, "k" * 11, "m" * 18, "m" * 19, "n" * 255, "é" * 30, "b", "c"]
GEOMETRY = (4, 1)


def timed_store(clock: str = "processing", *, on_read: bool = False) -> tuple[Store, Any]:
    store = Store(*GEOMETRY)
    state = store.state("n", "i64", timed=True)
    state.ttl(TTL, clock=clock, on_read=on_read)  # type: ignore[arg-type]
    return store, state


# ---- Examples


def test_an_entry_is_gone_when_its_time_is_up() -> None:
    store, state = timed_store()
    store.set_time("processing", 1000)
    assert state.add("a", 5) == 5
    store.set_time("processing", 1000 + TTL - 1)
    assert state.get("a") == 5
    store.set_time("processing", 1000 + TTL)
    assert state.get("a") is None
    assert state.add("a", 1) == 1  # it starts anew


def test_a_list_starts_anew_when_its_time_is_up() -> None:
    store = Store(*GEOMETRY)
    state = store.state("l", "list", timed=True)
    state.ttl(10)
    store.set_time("processing", 0)
    state.append("a", msgpack.packb(1))
    store.set_time("processing", 9)
    state.append("a", msgpack.packb(2))  # a write gives the whole list more time
    store.set_time("processing", 18)
    assert state.length("a") == 2
    store.set_time("processing", 19)
    assert list(state.pages("a")) == []
    state.append("a", msgpack.packb(3))
    assert state.length("a") == 1


@pytest.mark.parametrize(
    ("stamp", "ttl", "now", "expired"),
    [
        (0, INT64_MAX, INT64_MAX - 1, False),
        (0, INT64_MAX, INT64_MAX, True),
        (INT64_MAX, 1, INT64_MAX, True),  # the sum ends at 2**63 - 1
        (INT64_MAX - 1, INT64_MAX, INT64_MAX - 1, False),
        (-(2**63) + 1, 1, -(2**63) + 1, False),
        (-(2**63) + 1, 1, -(2**63) + 2, True),
        (5, 0, INT64_MAX, False),
    ],
)
@pytest.mark.parametrize("clock", ["processing", "event"])
def test_times_at_the_ends_of_64_bits(
    clock: Any, stamp: int, ttl: int, now: int, expired: bool
) -> None:
    store, state = timed_store(clock)
    state.ttl(ttl, clock=clock)
    store.set_time(clock, stamp)
    state.put("a", 1)
    store.set_time(clock, now)
    assert state.get("a") == (None if expired else 1)


def test_event_time_is_unknown_until_the_first_watermark_and_never_goes_back() -> None:
    store, state = timed_store("event")
    assert store.time("event") is None
    state.put("a", 1)
    store.set_time("event", 10**6)  # "a" counts as written now
    assert state.get("a") == 1
    store.set_time("event", 5)
    assert store.time("event") == 10**6
    store.set_time("event", 10**6 + TTL)
    assert state.get("a") is None


def test_the_system_clock_is_the_processing_time() -> None:
    store, state = timed_store()
    now = store.time()
    assert now is not None
    assert now > 1_600_000_000_000
    store.set_time("processing", 7)
    assert store.time() == 7
    store.set_time("processing", None)
    assert (store.time() or 0) >= now
    state.put("a", 1)
    assert state.get("a") == 1


def test_sweeps_give_memory_back() -> None:
    store = Store(*GEOMETRY)
    state = store.state("b", "bytes", int, timed=True)
    state.ttl(TTL)
    store.set_time("processing", 0)
    state.put_many(range(1000), [b"x" * 100] * 1000)
    used = store.bytes_used
    store.set_time("processing", TTL)
    removed = [store.sweep(100) for _ in range(12)]
    assert sum(removed) == 1000
    assert max(removed) <= 100
    assert store.stats().entries == 0
    assert store.bytes_used < used / 10


def test_timed_is_part_of_the_schema() -> None:
    store, state = timed_store()
    assert state.timed
    assert store.state("n", "i64", timed=True) is state
    with pytest.raises(SchemaError, match="timed"):
        store.state("n", "i64")
    state.put("a", 1)
    leaf = leaf_of(str, "a", *GEOMETRY)
    data = store.encode_leaf(leaf)
    other = Store(*GEOMETRY)
    other.decode_leaf(leaf, data)
    (found,) = other.states()
    assert found.timed
    clash = Store(*GEOMETRY)
    clash.state("n", "i64")
    with pytest.raises(SchemaError):
        clash.decode_leaf(leaf, data)


def test_blocks_have_stamps_and_untimed_ones_do_not() -> None:
    store, state = timed_store()
    store.set_time("processing", -12)
    state.put("a", 1)
    plain = store.state("plain", "i64")
    plain.put("a", 1)
    leaf = leaf_of(str, "a", *GEOMETRY)
    (block,) = Block.each(store.encode_leaf(leaf, state))
    assert block.is_timed
    assert block.stamps is not None
    assert block.stamps.tolist() == [-12]
    (block,) = Block.each(store.encode_leaf(leaf, plain))
    assert block.stamps is None


def test_a_homes_answer_has_its_own_stamp() -> None:
    store, state = timed_store()
    store.mark(0, store.leaves, "absent")
    store.set_time("processing", 1000)
    one = (1).to_bytes(8, "little")
    state.install("a", one, stamp=1000 - TTL)  # expired: there is none
    assert state.get("a") is None
    state.install("b", one, stamp=1000 - TTL + 1)
    state.install("c", one)  # counts as touched now
    assert [state.get("b"), state.get("c")] == [1, 1]
    assert store.stats().dirty == 1  # c: the home must be told when its time began
    store.set_time("processing", 1001)
    assert [state.get("b"), state.get("c")] == [None, 1]


def test_bad_arguments_say_so() -> None:
    store, state = timed_store()
    for call in (
        lambda: state.ttl(-1),
        lambda: state.ttl(2**63),
        lambda: state.ttl("1"),
        lambda: state.ttl(1, clock="wall"),
        lambda: store.state("plain", "i64").ttl(1),
        lambda: store.time("wall"),  # type: ignore[arg-type]
        lambda: store.set_time("event", 2**63),
        lambda: store.set_time("event", "x"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError):
            call()
    store.close()
    with pytest.raises(ClosedError):
        state.ttl(1)


# ---- Any order of calls


class TimedMachine(RuleBasedStateMachine):
    """One timed state in a whole store, with a replica made of a base and deltas."""

    @initialize(
        clock=st.sampled_from(["processing", "event"]),
        on_read=st.booleans(),
        track=st.booleans(),
        write_back=st.booleans(),
    )
    def start(self, clock: str, on_read: bool, track: bool, write_back: bool) -> None:
        self.clock, self.on_read, self.track = clock, on_read, track
        self.store, self.state = timed_store(clock, on_read=on_read)
        self.store.write_back(write_back)
        self.model: dict[str, list[Any]] = {}  # value, stamp; None: before the first watermark
        self.now: int | None = None
        self.replica: Store | None = None
        self.epoch = 0
        if clock == "processing":
            self.set_now(0)

    def set_now(self, now: int) -> None:
        self.store.set_time(self.clock, now)  # type: ignore[arg-type]
        if self.now is None:
            for entry in self.model.values():
                entry[1] = now
        self.now = now
        self.expire()

    def expire(self) -> None:
        if self.now is not None:
            self.model = {k: e for k, e in self.model.items() if e[1] + TTL > self.now}

    @rule(ms=st.sampled_from([0, 1, 30, 60, 99, 100, 5000]))
    def time_passes(self, ms: int) -> None:
        self.set_now((self.now or 0) + ms)

    @rule(key=st.sampled_from(KEYS), by=st.integers(-5, 5))
    def add(self, key: str, by: int) -> None:
        entry = self.model.setdefault(key, [0, None])
        entry[:] = [entry[0] + by, self.now]
        assert self.state.add(key, by) == entry[0]

    @rule(keys=st.lists(st.sampled_from(KEYS)))
    def add_many(self, keys: list[str]) -> None:
        for key in keys:
            entry = self.model.setdefault(key, [0, None])
            entry[:] = [entry[0] + 1, self.now]
        self.state.add_many(keys)

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: str) -> None:
        assert self.state.delete(key) == (self.model.pop(key, None) is not None)

    @rule(keys=st.lists(st.sampled_from(KEYS)), many=st.booleans())
    def get(self, keys: list[str], many: bool) -> None:
        found = self.state.get_many(keys).to_list() if many else list(map(self.state.get, keys))
        assert found == [self.model.get(key, [None])[0] for key in keys]
        for key in keys:
            if self.on_read and key in self.model:
                self.model[key][1] = self.now

    @rule(slots=st.integers(0, 20))
    def sweep(self, slots: int) -> None:
        assert self.store.sweep(slots) <= slots

    @rule(start=st.integers(0, 4), stop=st.integers(0, 4))
    def detach_and_attach(self, start: int, stop: int) -> None:
        self.store.attach(self.store.detach(min(start, stop), max(start, stop)))
        self.replica = None

    @rule(leaf=st.integers(0, 3))
    def encode_and_decode(self, leaf: int) -> None:
        data = self.store.encode_leaf(leaf)
        for block in Block.each(data):
            block.check()
        self.store.decode_leaf(leaf, data)
        assert self.store.encode_leaf(leaf) == data

    @rule()
    def snapshot(self) -> None:
        """A full one, or a delta over the replica; read after more time has passed."""
        since = None if self.replica is None else self.epoch
        self.replica = self.replica or timed_store(self.clock)[0]
        with self.store.snapshot(since) as snapshot:
            for leaf, data in snapshot:
                self.replica.decode_leaf(leaf, data, "over")
            self.epoch = snapshot.epoch
        if self.track:
            self.store.track(self.epoch)

    @precondition(lambda self: self.replica is not None)
    @rule()
    def restore(self) -> None:
        """What the replica has, as of now, is what the store has."""
        self.snapshot()
        replica, self.replica = self.replica, None
        assert replica is not None
        if self.now is not None:
            replica.set_time(self.clock, self.now)  # type: ignore[arg-type]
        assert contents(replica) == {key: entry[0] for key, entry in self.model.items()}

    @invariant()
    def entries_are_those_of_the_model(self) -> None:
        assert contents(self.store) == {key: entry[0] for key, entry in self.model.items()}


class HomedMachine(RuleBasedStateMachine):
    """Partial leaves and a home: what both have together is what the model has."""

    @initialize()
    def start(self) -> None:
        self.store, self.state = timed_store()
        self.home: dict[bytes, tuple[int, int]] = {}  # encoded key -> value, stamp
        self.model: dict[str, tuple[int, int]] = {}
        self.now = 0
        self.store.set_time("processing", 0)
        self.store.mark(0, self.store.leaves, "absent")

    def fetch(self, key: str) -> None:
        value, stamp = self.home.get(key.encode(), (None, None))
        encoded = None if value is None else value.to_bytes(8, "little", signed=True)
        self.state.install(key, encoded, stamp)

    @rule(ms=st.sampled_from([1, 30, 60, 100]))
    def time_passes(self, ms: int) -> None:
        self.now += ms
        self.store.set_time("processing", self.now)
        self.model = {k: e for k, e in self.model.items() if e[1] + TTL > self.now}

    @rule(key=st.sampled_from(KEYS), value=st.integers(-5, 5))
    def put(self, key: str, value: int) -> None:
        self.state.put(key, value)
        self.model[key] = (value, self.now)

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: str) -> None:
        self.fetch(key)
        assert self.state.get(key) == self.model.get(key, (None,))[0]

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: str) -> None:
        self.state.delete(key, blind=True)
        self.model.pop(key, None)

    @rule(leaf=st.integers(0, 3), arrives=st.booleans(), key=st.sampled_from(KEYS))
    def write_home(self, leaf: int, arrives: bool, key: str) -> None:
        data = self.store.dirty_take(leaf)
        self.put(key, 9)  # while it is being written
        for block in Block.each(data):
            assert block.stamps is not None
            for (encoded, value), stamp in zip(block, block.stamps, strict=True):
                if arrives and value is None:
                    self.home.pop(encoded, None)
                elif arrives:
                    assert stamp + TTL > self.now
                    self.home[encoded] = (value, stamp)
        self.store.dirty_done(leaf, arrives)

    @rule()
    def evict(self) -> None:
        self.store.evict(10**9)

    @rule()
    def sweep(self) -> None:
        self.store.sweep(1000)

    def teardown(self) -> None:
        for key in KEYS:
            self.get(key)
        self.now += TTL
        self.store.set_time("processing", self.now)
        for leaf in range(self.store.leaves):
            for block in Block.each(self.store.dirty_take(leaf)):
                for encoded, value in block:
                    assert value is None
                    self.home.pop(encoded, None)
        # The store knows nothing of entries that were written home and evicted: their stamps tell.
        assert all(self.state.is_expired(stamp) for _, stamp in self.home.values())
        assert not self.state.is_expired(self.now)


def contents(store: Store) -> dict[str, int]:
    return {key.decode(): value for state in store.states() for key, value in store.scan(state)}


_SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestTimed = TimedMachine.TestCase
TestTimed.settings = _SETTINGS
TestHomed = HomedMachine.TestCase
TestHomed.settings = _SETTINGS
