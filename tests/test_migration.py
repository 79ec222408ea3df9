"""Leaves move between providers while both are used: what a user sees of it.

Both providers are in this process, with real servers on loopback; tests/faults has real processes.
The oracle is a dict of what was written.
"""

import operator
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from remote_util import TOKEN, Authority

import statekit as sk
from statekit.errors import (
    ArgumentError,
    CheckpointError,
    FencedError,
    LeaseError,
    MigrationError,
    NotOwnedError,
    OccupiedError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    SchemaError,
)
from statekit.migration.report import Reports
from statekit.migration.shell import Credentials
from statekit.migration.strategies import WHOLE as STRATEGIES
from statekit.protocol.calls import (
    FetchCall,
    GiveBackCall,
    InstalledCall,
    PickCall,
    PickReply,
    ProposeCall,
    StreamCall,
)

GROUPS, SUBGROUPS = 16, 4
KEYS = [f"key-{i}" for i in range(400)]
LOW, HIGH = range(8), range(8, 16)
SECONDS_MAX = 120.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, url: str = "memory:", **options: Any) -> sk.KVProvider:
    return stack.enter_context(sk.open(url, key_groups=GROUPS, subgroups=SUBGROUPS, **options))


def pair(stack: ExitStack) -> tuple[sk.KVProvider, sk.KVProvider, str]:
    """A source with all key-groups, a target with none, and where the source is served."""
    source, target = opened(stack), opened(stack, owned=())
    return source, target, source.serve().address


class Click(NamedTuple):
    page: str
    at: int


class States:
    """One state of every type, and what is in them."""

    def __init__(self, kv: sk.KVProvider) -> None:
        self.count = kv.value("count", int, default=0)
        self.share = kv.value("share", float)
        self.name = kv.value("name", str)
        self.clicks = kv.list("clicks", Click)
        self.prefs = kv.map("prefs", str, float)
        self.tags = kv.state("tags", set[str])
        self.orders = kv.state("orders", dict[str, list[int]])
        self.total = kv.reduce("total", int, operator.add)
        self.seen = kv.value("seen", int, ttl=sk.TTL(1000, time="event"))
        self.timers = kv.timers("expiry")

    def fill(self, keys: list[str]) -> None:
        for i, key in enumerate(keys):
            self.count[key] = i
            self.share[key] = i / 3
            self.name[key] = key * 3
            self.clicks[key].extend([Click("/home", i), Click("/away", i + 1)])
            self.prefs[key].update({"volume": 0.5, "speed": float(i)})
            self.tags[key] |= {"a", str(i)}
            self.orders[key]["2026-11"].append(i)
            self.total.add(key, i)
            self.seen[key] = i
            self.timers.set(key, 10_000 + i)

    def read(self, key: str) -> tuple[Any, ...]:
        return (
            self.count[key],
            self.share[key],
            self.name[key],
            list(self.clicks[key]),
            dict(self.prefs[key]),
            set(self.tags[key]),
            {month: list(orders) for month, orders in self.orders[key].items()},
            self.total.get(key),
            self.seen.get(key),
            self.timers[key],
        )


def many(state: Any, keys: list[str]) -> list[Any]:
    """What a batch gives."""
    return list(state.get_many(keys))


def keys_of(kv: sk.KVProvider, groups: Any, keys: list[str] = KEYS) -> list[str]:
    wanted = set(groups)
    return [key for key in keys if kv.key_group_of(key) in wanted]


# ---- What moves


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_type_of_state_moves_with_its_timers_and_times_to_live(
    stack: ExitStack, strategy: Any
) -> None:
    source, target, address = pair(stack)
    source.advance_watermark(500)
    old = States(source)
    old.fill(KEYS)
    expected = {key: old.read(key) for key in KEYS}
    migration = target.fetch_from(address, key_groups=HIGH, strategy=strategy)
    new = States(target)
    assert source.key_groups == (LOW,)
    assert target.key_groups == (HIGH,)
    for key in keys_of(target, HIGH):
        assert new.read(key) == expected[key], key
        with pytest.raises(NotOwnedError):
            old.count[key]
    for key in keys_of(source, LOW):
        assert old.read(key) == expected[key]
    migration.wait(SECONDS_MAX)
    assert migration.done
    assert target.loading is None
    assert {key for key, _ in new.count.items()} == set(keys_of(target, HIGH))
    due = {timer.key for timer in new.timers.pop_due(1 << 40)}
    assert due == set(keys_of(target, HIGH))
    assert {timer.key for timer in old.timers.pop_due(1 << 40)} == set(keys_of(source, LOW))
    target.advance_watermark(1_000_499)  # they were written at 500, and live for 1000 s
    assert len(list(new.seen.items())) == len(due)
    target.advance_watermark(1_000_500)
    assert not list(new.seen.items())


def test_timers_of_leaves_that_have_not_come_fire_at_the_new_owner_only(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    old = source.timers("expiry")
    for i, key in enumerate(KEYS):
        old.set(key, i)
    target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    new = target.timers("expiry")
    fired = [*new.pop_due(200), *old.pop_due(200)]
    assert sorted(timer.due for timer in fired) == list(range(201))
    assert new.next_due is not None
    assert {timer.key for timer in new.pop_due(1 << 40)} <= set(keys_of(target, HIGH))


def test_what_was_deleted_or_never_there_is_missing_at_the_new_owner(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    visits = source.value("visits", int)
    visits["here"] = 1
    visits["gone"] = 1
    del visits["gone"]
    target.fetch_from(address, strategy="on_demand")
    there = target.value("visits", int)
    assert there["here"] == 1
    assert there.get("gone") is None
    assert there.get("never") is None
    assert "gone" not in there


def test_a_state_that_the_target_never_declared_moves_on(stack: ExitStack) -> None:
    source, middle, address = pair(stack)
    source.value("visits", int)["alice"] = 7
    middle.fetch_from(address).wait(SECONDS_MAX)
    last = opened(stack, owned=())
    last.fetch_from(middle.serve().address)
    assert last.value("visits", int)["alice"] == 7


# ---- Writing while it moves


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blind_writes_to_what_has_not_come_are_over_what_comes(
    stack: ExitStack, strategy: Any
) -> None:
    source, target, address = pair(stack)
    visits = source.value("visits", int)
    clicks = source.list("clicks", int)
    for key in KEYS:
        visits[key] = 1
        clicks[key].append(1)
    target.fetch_from(address, strategy=strategy)
    visits, clicks = target.value("visits", int), target.list("clicks", int)
    for at, key in enumerate(KEYS):
        if at % 3 == 0:
            visits[key] = 2
        elif at % 3 == 1:
            visits.discard(key)
        clicks[key].append(2)
    for at, key in enumerate(KEYS):
        assert visits.get(key) == (2, None, 1)[at % 3]
        assert clicks[key] == [1, 2]


def test_batches_of_all_kinds_wait_for_what_they_need(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    numbers, names = source.value("numbers", int), source.value("names", str)
    numbers.put_many(KEYS, range(len(KEYS)))
    names.put_many(KEYS, KEYS)
    migration = target.fetch_from(address, strategy="on_demand")
    numbers, names = target.value("numbers", int), target.value("names", str)
    numbers.add_many(KEYS[:100])
    numbers.put_many(KEYS[100:200], [5] * 100)
    assert numbers.delete_many(KEYS[200:250]) == 50
    assert many(names, KEYS) == KEYS
    expected = [*range(1, 101), *[5] * 100, *[None] * 50, *range(250, 400)]
    assert [numbers.get(key) for key in KEYS] == expected
    migration.wait(SECONDS_MAX)
    assert [numbers.get(key) for key in KEYS] == expected


def test_a_batch_asks_for_all_its_leaves_at_once(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("numbers", int).put_many(KEYS, range(len(KEYS)))
    migration = target.fetch_from(address, strategy="on_demand")
    calls = []
    fetch = migration.channel.fetch
    migration.channel.fetch = lambda call: calls.append(call) or fetch(call)  # type: ignore[method-assign]
    assert many(target.value("numbers", int), KEYS) == list(range(len(KEYS)))
    assert len(calls) == 1
    assert len(calls[0].leases) == GROUPS * SUBGROUPS


def test_threads_that_miss_the_same_leaf_share_one_fetch(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("numbers", int)["alice"] = 1
    migration = target.fetch_from(address, strategy="on_demand")
    calls = []
    fetch = migration.channel.fetch
    start = threading.Barrier(8)

    def slowly(call: Any) -> Any:
        calls.append(call)
        return fetch(call)

    migration.channel.fetch = slowly  # type: ignore[method-assign]
    numbers = target.value("numbers", int)
    found: list[int] = []

    def read() -> None:
        start.wait()
        found.append(numbers["alice"])

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 8
    assert len(calls) == 1


def test_of_a_large_leaf_the_wanted_entries_come_first(stack: ExitStack) -> None:
    source, target = opened(stack), opened(stack, owned=())
    blobs = source.value("blobs", bytes)
    alike = keys_of(source, [source.key_group_of("a")], [f"k{i}" for i in range(2000)])
    for key in alike:
        blobs[key] = key.encode() * 20_000
    migration = target.fetch_from(source.serve().address, strategy="on_demand")
    blobs = target.value("blobs", bytes)
    assert blobs[alike[0]] == alike[0].encode() * 20_000
    assert blobs.get("missing-" + alike[0]) is None
    received = migration.progress.bytes
    blobs[alike[1]] = b"new"  # over what is still to come
    migration.wait(SECONDS_MAX)
    assert received < migration.progress.bytes / 4
    assert blobs[alike[1]] == b"new"
    for key in alike[2:]:
        assert blobs[key] == key.encode() * 20_000


def test_of_a_leaf_of_which_some_entries_are_here_the_others_are_absent(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reports, "_bring_rest", lambda *_: None)  # otherwise whole leaves follow
    source, target = (
        stack.enter_context(sk.open("memory:", key_groups=2, subgroups=1, **owned))
        for owned in ({}, {"owned": ()})
    )
    keys = [f"k{i}" for i in range(3000)]
    source.value("v", str).put_many(keys, ["x" * 300] * len(keys))
    target.fetch_from(source.serve().address, strategy="on_demand")
    asked = [*keys[:40], "missing"]
    target.prefetch({*keys[:40:2], "missing"}).result(SECONDS_MAX)  # any iterable will do
    assert [*target.absent(asked)] == list(range(1, 40, 2))
    assert [*target.absent(key for key in asked)] == list(range(1, 40, 2))
    assert target.is_here([*keys[:40:2], "missing"])
    assert not target.is_here(asked)
    target.prefetch(asked).result(SECONDS_MAX)
    assert not target.absent(asked)


def test_single_entries_are_given_for_their_lease_only(stack: ExitStack) -> None:
    source, target = opened(stack), opened(stack, owned=())
    values = source.value("v", str)
    values["a"] = "x"
    address = source.serve().address
    migration = target.fetch_from(address, strategy="on_demand")
    leaf = sk.leaf_of(str, "a", GROUPS, SUBGROUPS)
    epoch = migration.epoch_of(leaf)
    call = PickCall(migration.id, 0, ((leaf, epoch),), (("v", (b"a",)),))
    peer = source._as_peer()
    for wrong in (
        call._replace(leases=((leaf, epoch + 1),)),
        call._replace(leases=((leaf, epoch - 1),)),
        call._replace(migration="0" * 32),
        call._replace(keys=(("nothing", (b"a",)),)),
    ):
        assert peer.pick(wrong) == PickReply(b"", (leaf,))
    other = (leaf + 1) % (GROUPS * SUBGROUPS)
    assert peer.pick(call._replace(leases=((other, epoch),))).blocks == b""
    found = peer.pick(call)
    assert b"x" in found.blocks
    assert found.refused == ()


def test_sequences_have_no_gap_while_leaves_go_back_and_forth(stack: ExitStack) -> None:
    one, two = opened(stack), opened(stack, owned=())
    providers = {one: one.serve().address, two: two.serve().address}
    states = {kv: kv.value("n", int, default=0) for kv in providers}
    stop = threading.Event()
    written = dict.fromkeys(KEYS[:64], 0)
    failures: list[BaseException] = []

    def write(keys: list[str]) -> None:
        rng = random.Random(len(keys))
        try:
            while not stop.is_set():
                key = rng.choice(keys)
                for kv in providers:
                    try:
                        found = states[kv].add(key, 1)
                    except NotOwnedError:
                        continue
                    written[key] += 1
                    assert found == written[key], key
                    break
        except BaseException as error:
            failures.append(error)

    keys = [*written]
    threads = [threading.Thread(target=write, args=(keys[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(12):
            taker, giver = (two, one) if turn % 2 == 0 else (one, two)
            strategy = ("prioritised", "on_demand", "gradual")[turn % 3]
            arrival = taker.fetch_from(providers[giver], key_groups=HIGH, strategy=strategy)
            arrival.wait(SECONDS_MAX)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    assert sum(written.values()) > 0
    for key, count in written.items():
        owner = one if kv_owns(one, key) else two
        assert states[owner].get(key, 0) == count


def kv_owns(kv: sk.KVProvider, key: str) -> bool:
    return any(kv.key_group_of(key) in part for part in kv.key_groups)


# ---- For engines


def test_engines_see_what_is_not_here_and_can_ask_for_it(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    mine = keys_of(target, HIGH)
    assert [*target.absent(mine)] == list(range(len(mine)))
    assert not target.is_here(mine[:1])
    assert not target.absent(keys_of(target, LOW))  # owned by another: refused, not waited for
    target.prefetch(mine[:10]).result(SECONDS_MAX)
    assert target.is_here(mine[:10])
    target.prefetch(mine).result(SECONDS_MAX)
    assert not target.absent(mine)
    assert target.value("n", int)[mine[-1]] == KEYS.index(mine[-1])


def test_nothing_is_absent_in_a_provider_that_has_everything(stack: ExitStack) -> None:
    kv = opened(stack)
    assert kv.is_here(KEYS)
    assert kv.prefetch(KEYS).result(0) is None
    assert kv.migrations == ()


# ---- Who begins, and what is refused


def test_the_old_owner_can_begin_it(stack: ExitStack) -> None:
    source, target = opened(stack), opened(stack, owned=())
    source.serve()
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    departure = source.migrate(to=target.serve().address, key_groups=HIGH)
    assert target.key_groups == (HIGH,)
    departure.wait(SECONDS_MAX)
    assert departure.done
    mine = keys_of(target, HIGH)
    assert many(target.value("n", int), mine) == [KEYS.index(k) for k in mine]


def test_a_provider_that_is_not_served_cannot_hand_over(stack: ExitStack) -> None:
    source, target = opened(stack), opened(stack, owned=())
    with pytest.raises(MigrationError, match="serve"):
        source.migrate(to=target.serve().address, key_groups=HIGH)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"strategy": "fast"}, ArgumentError, "fast.*Use one of prioritised"),
        ({"key_groups": [3, 99]}, ArgumentError, "99"),
        ({"key_groups": []}, ArgumentError, "no key-groups"),
        ({"key_groups": [15]}, OccupiedError, "15"),
        ({"base": 5}, ArgumentError, "5 names no place"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    stack: ExitStack, options: Any, error: type[Exception], says: str
) -> None:
    source, target = opened(stack, owned=range(15)), opened(stack, owned=[15])
    with pytest.raises(error, match=says):
        target.fetch_from(source.serve().address, **options)
    assert source.key_groups == (range(15),)
    assert target.key_groups == (range(15, 16),)


def test_key_groups_that_the_peer_does_not_have_are_refused(stack: ExitStack) -> None:
    source, target = opened(stack, owned=LOW), opened(stack, owned=())
    with pytest.raises(NotOwnedError, match="8-15"):
        target.fetch_from(source.serve().address, key_groups=range(16))
    assert source.key_groups == (LOW,)
    assert target.key_groups == ()


def test_providers_of_another_geometry_are_refused(stack: ExitStack) -> None:
    source = stack.enter_context(sk.open("memory:", key_groups=8, subgroups=4))
    target = opened(stack, owned=())
    with pytest.raises(ArgumentError, match="8 key-groups x 4 sub-groups"):
        target.fetch_from(source.serve().address)


def test_states_that_do_not_agree_are_refused_before_anything_moves(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("n", str)["a"] = "x"
    target.value("n", int)
    with pytest.raises(SchemaError, match="'n'"):
        target.fetch_from(address)
    assert source.value("n", str)["a"] == "x"
    assert target.key_groups == ()


def test_nobody_there_is_said_with_the_address_and_at_once(stack: ExitStack) -> None:
    target = opened(stack, owned=())
    with pytest.raises(PeerLostError, match=r"nobody listens at 127\.0\.0\.1:1 ") as lost:
        target.fetch_from("127.0.0.1:1", timeout=SECONDS_MAX)
    assert lost.value.peer == "127.0.0.1:1"


def test_the_same_leaves_are_not_offered_to_two(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("n", int)["a"] = 1
    target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    other = opened(stack, owned=())
    with pytest.raises(NotOwnedError):
        other.fetch_from(address, key_groups=HIGH)


# ---- Chains, homes, lazy restores, splits


def test_leaves_go_on_while_they_are_still_arriving(stack: ExitStack) -> None:
    first, second, address = pair(stack)
    first.value("n", int).put_many(KEYS, range(len(KEYS)))
    second.fetch_from(address, strategy="on_demand")
    second.value("n", int).add(KEYS[0], 1000)
    third = opened(stack, owned=())
    third.fetch_from(second.serve().address, strategy="on_demand")
    numbers = third.value("n", int)
    assert numbers[KEYS[0]] == 1000
    assert many(numbers, KEYS[1:]) == list(range(1, len(KEYS)))
    assert second.key_groups == ()


@pytest.mark.parametrize("memory", ["64KiB", "64MiB"])
def test_state_at_home_moves_to_memory(stack: ExitStack, tmp_path: Path, memory: str) -> None:
    pytest.importorskip("rocksdict")
    source = opened(stack, f"rocksdb:{tmp_path}/db?memory={memory}")
    target = opened(stack, owned=())
    names = source.value("names", str)
    lists = source.list("lists", int)
    for i, key in enumerate(KEYS):
        names[key] = key * 100
        lists[key].extend([i, i + 1])
    del names[KEYS[0]]
    target.fetch_from(source.serve().address, key_groups=HIGH).wait(SECONDS_MAX)
    there, lists_there = target.value("names", str), target.list("lists", int)
    for i, key in enumerate(KEYS):
        if kv_owns(target, key):
            assert there.get(key) == (None if i == 0 else key * 100)
            assert lists_there[key] == [i, i + 1]
        else:
            assert names.get(key) == (None if i == 0 else key * 100)
    source.flush()


def test_a_lazily_restored_provider_hands_over_what_it_has_not_read(
    stack: ExitStack, tmp_path: Path
) -> None:
    with sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS) as kv:
        kv.value("n", int).put_many(KEYS, range(len(KEYS)))
        kv.checkpoint(tmp_path)
    source = stack.enter_context(sk.restore(tmp_path, lazy=True))
    target = opened(stack, owned=())
    source.value("n", int).add(KEYS[3], 1)
    target.fetch_from(source.serve().address).wait(SECONDS_MAX)
    expected = [i + (i == 3) for i in range(len(KEYS))]
    assert many(target.value("n", int), KEYS) == expected


def test_a_provider_that_is_being_restored_can_take_over_more(
    stack: ExitStack, tmp_path: Path
) -> None:
    with sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS) as kv:
        kv.value("n", int).put_many(KEYS, range(len(KEYS)))
        kv.checkpoint(tmp_path)
    target = stack.enter_context(sk.restore(tmp_path, key_groups=LOW, lazy=True))
    source = stack.enter_context(sk.restore(tmp_path, key_groups=HIGH, lazy=True))
    target.fetch_from(source.serve().address)
    assert many(target.value("n", int), KEYS) == list(range(len(KEYS)))
    target.wait_loaded(SECONDS_MAX)
    assert target.key_groups == (range(GROUPS),)


def test_split_and_merge_go_on_beside_migrations(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    (half,) = target.split([range(12, 16)])
    stack.callback(half.close)
    (low,) = source.split([range(4)])
    stack.callback(low.close)
    last = opened(stack, owned=())
    last.fetch_from(half.serve().address)
    last.fetch_from(low.serve().address)
    target.merge(last)
    with pytest.raises(NotOwnedError):
        opened(stack, owned=()).fetch_from(address, key_groups=range(2))
    target.fetch_from(address, key_groups=range(4, 8))
    assert target.key_groups == (range(GROUPS),)
    assert many(target.value("n", int), KEYS) == list(range(len(KEYS)))


# ---- Giving up


def test_the_source_takes_back_what_was_not_sent(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    numbers = source.value("n", int)
    numbers.put_many(KEYS, range(len(KEYS)))
    target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    (departure,) = source.migrations
    departure.abort()
    assert source.key_groups == (range(GROUPS),)
    numbers.add(keys_of(source, HIGH)[0], 1)
    with pytest.raises(NotOwnedError):
        target.value("n", int)[keys_of(source, HIGH)[0]]
    assert len(numbers) == len(KEYS)


def test_what_was_sent_is_taken_back_only_from_the_dead(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    numbers = source.value("n", int)
    numbers.put_many(KEYS, range(len(KEYS)))
    target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    touched = keys_of(source, HIGH)[0]
    departure = source.migrations[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reports, "report", lambda self: None)  # the source is not told
        assert target.value("n", int)[touched] == KEYS.index(touched)
        with pytest.raises(MigrationError, match="target_is_dead"):
            departure.abort()
        assert not kv_owns(source, touched)
        departure.abort(target_is_dead=True)
        assert source.key_groups == (range(GROUPS),)
        assert numbers[touched] == KEYS.index(touched)


def test_the_target_gives_back_what_has_not_come(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    numbers = source.value("n", int)
    numbers.put_many(KEYS, range(len(KEYS)))
    migration = target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    touched = keys_of(source, HIGH)[0]
    target.value("n", int).add(touched, 5)
    back = migration.give_back()
    kept = source.key_group_of(touched)
    assert target.key_groups == (range(kept, kept + 1),)
    assert {group for part in back for group in part} == set(HIGH) - {kept}
    for key in KEYS:
        owner = target if source.key_group_of(key) == kept else source
        wanted = KEYS.index(key) + (5 if key == touched else 0)
        assert owner.value("n", int)[key] == wanted


def test_a_target_that_is_closed_gives_back_what_has_not_come(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    numbers = source.value("n", int)
    numbers.put_many(KEYS, range(len(KEYS)))
    target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    target.close()
    assert source.key_groups == (range(GROUPS),)
    assert many(numbers, KEYS) == list(range(len(KEYS)))


def test_a_dead_source_is_abandoned_and_what_has_not_come_is_named(
    stack: ExitStack, tmp_path: Path
) -> None:
    source, target, address = pair(stack)
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    source.checkpoint(tmp_path)
    migration = target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    numbers = target.value("n", int)
    kept = target.key_group_of(keys_of(target, HIGH)[0])
    target.prefetch(keys_of(target, [kept])).result(SECONDS_MAX)
    for leaf in range(kept * SUBGROUPS, (kept + 1) * SUBGROUPS):
        target._residence.load_leaves([leaf])
    torn = keys_of(target, [group for group in HIGH if group != kept])[0]
    assert numbers[torn] == KEYS.index(torn)  # one leaf of another key-group
    migration.channel.timeout_s = 0.3
    source.close()
    lost = migration.abandon()
    assert {group for part in lost for group in part} == set(HIGH) - {kept}
    assert target.key_groups == (range(kept, kept + 1),)
    assert target.migrations == ()
    with pytest.raises(NotOwnedError):
        numbers[torn]
    with sk.restore(tmp_path, key_groups=lost, lazy=False) as rest:
        target.merge(rest)
    mine = keys_of(target, HIGH)
    assert many(numbers, mine) == [KEYS.index(key) for key in mine]
    target.wait_loaded(SECONDS_MAX)
    (half,) = target.split([[kept]])  # nobody else has a claim to it
    half.close()


def test_a_later_generation_fences_an_earlier_one(stack: ExitStack) -> None:
    source, target = opened(stack), opened(stack, owned=())
    source.value("n", int)["a"] = 1
    address = source.serve(token=TOKEN).address
    target.serve(generation=1, token=TOKEN)
    with pytest.raises(FencedError, match="generation 1"):
        target.fetch_from(address)
    assert source.key_groups == ()
    with pytest.raises(NotOwnedError):
        source.value("n", int)["a"]


def test_a_stranger_with_a_later_generation_is_refused_and_not_obeyed(stack: ExitStack) -> None:
    """Neither side has shown who it is: then only kv.fence() fences."""
    victim, stranger = opened(stack), opened(stack, owned=())
    victim.value("n", int).put_many(KEYS, range(len(KEYS)))
    address = victim.serve().address
    other = opened(stack, owned=())
    migration = other.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    stranger.serve(generation=5)
    with pytest.raises(PeerRefusedError, match=r"kv\.fence\(5\)"):
        stranger.fetch_from(address)
    channel = stranger._as_peer().connect(address, Credentials(), SECONDS_MAX)
    leases = ((0, 1),)
    for ask in (
        lambda: list(channel.fetch(FetchCall(migration.id, 5, leases))),
        lambda: channel.pick(PickCall(migration.id, 5, leases, ())),
        lambda: list(channel.stream(StreamCall(migration.id, 5), credit=1)),
        lambda: channel.installed(InstalledCall(migration.id, 5, leases)),
        lambda: channel.give_back(GiveBackCall(migration.id, 5, leases)),
        lambda: channel.propose(ProposeCall("0" * 32, 5, address, (LOW,), "gradual")),
    ):
        with pytest.raises(PeerRefusedError, match="not believed"):
            ask()
    channel.close()
    assert victim.key_groups == (LOW,)
    assert victim._as_peer().generation == 0
    migration.wait(SECONDS_MAX)
    victim.fence(5)
    assert victim.key_groups == ()


def test_a_home_that_was_fenced_stays_so_when_it_is_reopened(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/db"
    with sk.open(url) as kv:
        kv.value("n", int).put_many(KEYS, range(len(KEYS)))
        place = kv.checkpoint(f"{tmp_path}/ck")
        kv.fence(1)
        assert kv.key_groups == ()
    with sk.open(url) as kv:
        assert kv.key_groups == ()
    with sk.restore(place, home=url, replace=True) as kv:
        assert dict(kv.value("n", int).items()) == dict(zip(KEYS, range(len(KEYS)), strict=True))
    with sk.open(url) as kv:
        assert len(kv.value("n", int)) == len(KEYS)


def test_a_later_generation_of_a_server_that_is_not_known_is_not_obeyed(stack: ExitStack) -> None:
    source, target = opened(stack, owned=[0]), opened(stack, owned=[1])
    address = source.serve(generation=3).address
    with pytest.raises(PeerRefusedError, match="generation 3"):
        target.fetch_from(address)
    assert target.key_groups == (range(1, 2),)


def test_a_source_that_is_not_known_does_not_fence_who_fetches_from_it(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    migration = target.fetch_from(address, strategy="on_demand")
    source.fence(9)
    with pytest.raises(PeerRefusedError, match="generation 9"):
        target.value("n", int)[KEYS[0]]
    assert target._as_peer().generation == 0
    assert target.key_groups == (range(GROUPS),)
    migration.abandon()


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_provider_that_asks_nobody_who_they_are_says_so_once(
    stack: ExitStack, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    kv = opened(stack)
    server = kv.serve(token=token or None)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (0 if token else 1)
    assert all(server.address in one and "token=" in one for one in said)


# ---- Checkpoints


def test_checkpoints_of_both_sides_in_the_middle_have_each_key_once(
    stack: ExitStack, tmp_path: Path
) -> None:
    source, target, address = pair(stack)
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    migration = target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    numbers = target.value("n", int)
    touched = keys_of(target, HIGH)[:20]
    for key in touched[:10]:
        numbers.add(key, 1000)
    parts = [
        source.checkpoint(tmp_path / "source"),
        target.checkpoint_async(tmp_path / "target"),
    ]
    for key in touched:
        numbers.add(key, 1_000_000)  # after the checkpoint: not in it
    parts = [parts[0], parts[1].wait(SECONDS_MAX)]
    migration.wait(SECONDS_MAX)
    restored = stack.enter_context(sk.restore(parts, lazy=False))
    expected = [i + 1000 * (key in touched[:10]) for i, key in enumerate(KEYS)]
    assert many(restored.value("n", int), KEYS) == expected
    after = sk.restore([source.checkpoint(tmp_path / "source"), target.checkpoint(tmp_path / "t")])
    stack.callback(after.close)
    assert sum(many(after.value("n", int), KEYS)) == sum(expected) + 20_000_000


@pytest.mark.parametrize("order", ["source first", "target first", "between"])
def test_parts_of_one_barrier_have_each_leaf_once(
    stack: ExitStack, tmp_path: Path, order: str
) -> None:
    """The barrier passes source and target at different times around the hand-over."""
    source, target, address = pair(stack)
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    parts: list[Any] = []

    def take(kv: sk.KVProvider, name: str) -> None:
        parts.append(kv.checkpoint_async(tmp_path / name, barrier=1))

    if order == "source first":
        take(source, "source")
    if order == "target first":
        take(target, "target")
    migration = target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    numbers = target.value("n", int)
    if order == "between":
        take(source, "source")
        take(target, "target")
    for key in keys_of(target, HIGH):
        numbers.add(key, 1000)  # after the hand-over: in no part of barrier 1
    if order == "source first":
        take(target, "target")
    if order == "target first":
        take(source, "source")
    if migration.late_checkpoint is not None:
        parts.append(migration.late_checkpoint)
    done = [part.wait(SECONDS_MAX) for part in parts]
    covered = sorted(group for part in done for span in part.key_groups for group in span)
    assert covered == list(range(GROUPS))
    restored = stack.enter_context(sk.restore(done, lazy=False))
    assert many(restored.value("n", int), KEYS) == list(range(len(KEYS)))
    with pytest.raises(CheckpointError, match="barrier 1"):
        target.checkpoint(tmp_path / "again", barrier=1)


def whole(stack: ExitStack, parts: list[Any]) -> list[int]:
    """What parts of one checkpoint hold together. Each key-group must be in one of them."""
    covered = sorted(group for part in parts for span in part.key_groups for group in span)
    assert covered == list(range(GROUPS))
    restored = stack.enter_context(sk.restore(parts, lazy=False))
    return many(restored.value("n", int), KEYS)


@pytest.mark.parametrize("ending", ["give back", "abort", "close"])
@pytest.mark.parametrize("with_home", [False, True])
def test_what_is_back_after_the_barrier_passed_is_in_the_old_owners_part(
    stack: ExitStack, tmp_path: Path, ending: str, with_home: bool
) -> None:
    """It was on offer when the barrier passed, so neither side had it then."""
    if with_home:
        pytest.importorskip("rocksdict")
    url = f"rocksdb:{tmp_path}/db?memory=2MiB" if with_home else "memory:"
    source, target = opened(stack, url), opened(stack, owned=())
    numbers = source.value("n", int)
    numbers.put_many(KEYS, range(len(KEYS)))
    migration = target.fetch_from(source.serve().address, key_groups=HIGH, strategy="on_demand")
    (departure,) = source.migrations
    parts = [source.checkpoint(tmp_path / "source", barrier=1)]
    if ending == "give back":
        assert migration.give_back() == (HIGH,)
    elif ending == "abort":
        departure.abort()
    else:
        target.close()
    numbers.put_many(KEYS, [-1] * len(KEYS))  # after the barrier
    if ending == "give back":
        parts.append(target.checkpoint(tmp_path / "target", barrier=1))
    parts += [job.wait(SECONDS_MAX) for job in source.late_parts(1)]
    assert whole(stack, parts) == list(range(len(KEYS)))
    assert source.late_parts(2) == ()


def test_what_is_back_is_in_the_parts_of_all_barriers_that_passed(
    stack: ExitStack, tmp_path: Path
) -> None:
    source, target, address = pair(stack)
    numbers = source.value("n", int)
    numbers.put_many(KEYS, range(len(KEYS)))
    migration = target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    first = source.checkpoint(tmp_path / "1", barrier=1)
    numbers.add_many(keys_of(source, LOW), [1000] * len(keys_of(source, LOW)))
    second = source.checkpoint(tmp_path / "2", barrier=2)
    migration.give_back()
    numbers.put_many(KEYS, [-1] * len(KEYS))
    plain = [source.late_parts(number) for number in (1, 2)]
    late = [[job.wait(SECONDS_MAX) for job in jobs] for jobs in plain]
    expected = list(range(len(KEYS)))
    assert whole(stack, [first, *late[0]]) == expected
    low = set(keys_of(source, LOW))
    expected = [n + 1000 * (key in low) for n, key in enumerate(KEYS)]
    assert whole(stack, [second, *late[1]]) == expected


def test_what_comes_after_several_barriers_is_in_the_new_owners_part_of_each(
    stack: ExitStack, tmp_path: Path
) -> None:
    source, target, address = pair(stack)
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    parts = {
        number: [target.checkpoint(tmp_path / f"t{number}", barrier=number)] for number in (1, 2)
    }
    target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    there = target.value("n", int)
    there.put_many(keys_of(target, HIGH), [-1] * len(keys_of(target, HIGH)))
    for number in (1, 2):
        parts[number].append(source.checkpoint(tmp_path / f"s{number}", barrier=number))
        parts[number] += [job.wait(SECONDS_MAX) for job in target.late_parts(number)]
        assert whole(stack, parts[number]) == list(range(len(KEYS)))


def test_nothing_is_added_to_a_checkpoint_that_is_over(stack: ExitStack, tmp_path: Path) -> None:
    """Who began after the barrier looks like one that it has not passed yet."""
    first = opened(stack, owned=[LOW])
    for number in (1, 2):
        first.checkpoint(tmp_path, barrier=number)
    late = opened(stack, owned=[HIGH])  # the key-groups of somebody who died, say
    address = late.serve().address
    half = range(HIGH.start, HIGH.stop - 1)
    first.fetch_from(address, key_groups=half).wait(SECONDS_MAX)
    assert [len(first.late_parts(number)) for number in (1, 2)] == [1, 1]
    for number in (1, 2):
        first.late_parts(number)[0].wait(SECONDS_MAX)
    first.end_barrier(2)
    migration = first.fetch_from(address)
    migration.wait(SECONDS_MAX)
    assert migration.late_checkpoint is None
    assert [len(first.late_parts(number)) for number in (1, 2)] == [1, 1]
    assert [one.number for one in sk.checkpoints(tmp_path)] == [1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="barrier 2 cannot pass here: 2 has"):
        first.checkpoint(tmp_path, barrier=2)
    third = first.checkpoint(tmp_path, barrier=3)
    assert third.key_groups == (range(GROUPS),)


@pytest.mark.parametrize("wrong", [0, -1, "1", True, 1.0, None])
def test_a_barrier_that_is_over_is_named_by_its_number(stack: ExitStack, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"barrier is .*Pass its number: 1 or greater"):
        opened(stack).end_barrier(wrong)


def test_who_is_told_that_a_checkpoint_is_over_gives_nothing_to_it(
    stack: ExitStack, tmp_path: Path
) -> None:
    first, late = opened(stack, owned=[LOW]), opened(stack, owned=[HIGH])
    first.checkpoint(tmp_path, barrier=1)
    late.end_barrier(1)
    first.fetch_from(late.serve().address).wait(SECONDS_MAX)
    assert first.late_parts(1) == ()


# ---- Deltas


def test_only_what_changed_since_the_base_goes_over_the_wire(
    stack: ExitStack, tmp_path: Path
) -> None:
    source, target, address = pair(stack)
    names, lists = source.value("names", str), source.list("lists", int)
    names.put_many(KEYS, [key * 50 for key in KEYS])
    for key in KEYS:
        lists[key].append(1)
    source.checkpoint(tmp_path)
    names[KEYS[0]] = "changed"
    del names[KEYS[1]]
    names["new"] = "new"
    lists[KEYS[2]].append(2)
    migration = target.fetch_from(address, base=str(tmp_path))
    migration.wait(SECONDS_MAX)
    assert migration.progress.bytes < 4000
    names, lists = target.value("names", str), target.list("lists", int)
    expected = {key: key * 50 for key in KEYS} | {KEYS[0]: "changed", "new": "new"}
    del expected[KEYS[1]]
    assert dict(names.items()) == expected
    assert lists[KEYS[2]] == [1, 2]
    assert lists[KEYS[3]] == [1]
    again = target.checkpoint(tmp_path / "again")
    with sk.restore([again], lazy=False) as restored:
        assert dict(restored.value("names", str).items()) == expected


def test_a_checkpoint_that_was_published_from_parts_is_a_base(
    stack: ExitStack, tmp_path: Path
) -> None:
    source, target, address = pair(stack)
    names = source.value("names", str)
    names.put_many(KEYS, [key * 50 for key in KEYS])
    sk.publish(tmp_path, [source.write_part(tmp_path, number=1)], number=1)
    names[KEYS[0]] = "changed"
    migration = target.fetch_from(address, base=str(tmp_path))
    migration.wait(SECONDS_MAX)
    assert migration.is_based
    assert migration.progress.bytes < 4000
    expected = {key: key * 50 for key in KEYS} | {KEYS[0]: "changed"}
    assert dict(target.value("names", str).items()) == expected


@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_checkpoint_beside_a_delta_hand_over_is_whole(
    stack: ExitStack, tmp_path: Path, is_lazy: bool
) -> None:
    source, target, address = pair(stack)
    names = source.value("names", str)
    names.put_many(KEYS, KEYS)
    source.checkpoint(tmp_path / "base")
    for key in KEYS[::2]:
        names[key] = key * 2
    migration = target.fetch_from(address, base=str(tmp_path / "base"), strategy="on_demand")
    if not is_lazy:
        migration.wait(SECONDS_MAX)
    taken = target.checkpoint(tmp_path / "target")
    with sk.restore(taken, lazy=False) as restored:
        found = dict(restored.value("names", str).items())
    assert found == {key: key * (2 - i % 2) for i, key in enumerate(KEYS)}


def test_a_base_that_is_not_the_sources_last_is_not_used(stack: ExitStack, tmp_path: Path) -> None:
    source, target, address = pair(stack)
    names = source.value("names", str)
    names.put_many(KEYS, KEYS)
    with sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS) as other:
        other.value("names", str)["alice"] = "not this"
        other.checkpoint(tmp_path)
    migration = target.fetch_from(address, base=str(tmp_path))
    migration.wait(SECONDS_MAX)
    assert dict(target.value("names", str).items()) == {key: key for key in KEYS}


def test_a_base_is_known_by_its_contents_not_by_its_place_and_number(
    stack: ExitStack, tmp_path: Path
) -> None:
    """The place was wiped, and used by another provider, which has come to the same number."""
    source, target, address = pair(stack)
    names = source.value("names", str)
    names.put_many(KEYS, KEYS)
    mine = source.checkpoint(tmp_path / "place")
    shutil.rmtree(tmp_path / "place")
    with opened(stack) as other:
        other.value("names", str).put_many(KEYS, ["a stranger's"] * len(KEYS))
        assert other.checkpoint(tmp_path / "place").number == mine.number
    migration = target.fetch_from(address, base=str(tmp_path / "place"))
    migration.wait(SECONDS_MAX)
    assert not migration.is_based
    assert dict(target.value("names", str).items()) == {key: key for key in KEYS}


def test_a_base_may_lie_elsewhere_for_the_other_side(stack: ExitStack, tmp_path: Path) -> None:
    source, target, address = pair(stack)
    names = source.value("names", str)
    names.put_many(KEYS, KEYS)
    source.checkpoint(tmp_path / "here")
    names[KEYS[0]] = "changed"
    (tmp_path / "here").rename(tmp_path / "there")  # as if mounted elsewhere on another machine
    migration = target.fetch_from(address, base=str(tmp_path / "there"))
    migration.wait(SECONDS_MAX)
    assert migration.is_based
    assert dict(target.value("names", str).items()) == {key: key for key in KEYS} | {
        KEYS[0]: "changed"
    }


_ELSEWHERE = """
import sys
import statekit as sk
kv = sk.open("memory:", key_groups=16, subgroups=4)
kv.value("names", str).put_many([f"key-{i}" for i in range(400)], ["elsewhere"] * 400)
print(kv.checkpoint("memory://base").number, kv.serve().address, flush=True)
sys.stdin.read()
"""


def test_the_same_url_in_another_process_is_another_base(stack: ExitStack) -> None:
    pytest.importorskip("fsspec")
    with opened(stack) as other:
        other.value("names", str).put_many(KEYS, ["here"] * len(KEYS))
        mine = other.checkpoint("memory://base")
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", _ELSEWHERE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
    )  # fmt: skip
    assert process.stdout is not None
    number, address = process.stdout.readline().split()
    assert int(number) == mine.number
    target = opened(stack, owned=())
    migration = target.fetch_from(address, base="memory://base")
    migration.wait(SECONDS_MAX)
    assert not migration.is_based
    assert set(many(target.value("names", str), KEYS)) == {"elsewhere"}


# ---- Looking


def test_a_migration_says_how_far_it_is(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    migration = target.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    (departure,) = source.migrations
    assert migration.progress[:2] == (0, 32)
    assert departure.progress[:2] == (0, 32)
    assert "8-15" in repr(migration)
    assert "8-15" in repr(departure)
    migration.wait(SECONDS_MAX)
    departure.wait(SECONDS_MAX)
    assert migration.progress[:2] == (32, 32)
    assert migration.progress.fraction == 1.0
    assert departure.progress.bytes == migration.progress.bytes > 0
    assert target.migrations == ()
    assert source.migrations == ()
    moved = target.metrics().moved
    assert (moved.migrations, moved.leaves_in, moved.bytes_in) == (0, 32, migration.progress.bytes)
    assert source.metrics().moved.leaves_out == 32
    assert source.metrics().as_dict()["moved"]["bytes_out"] == moved.bytes_in


def test_leases_that_are_not_here_cannot_be_offered(stack: ExitStack) -> None:
    source, _, _ = pair(stack)
    peer = source._as_peer()
    peer._participant.disown([0])
    with pytest.raises(LeaseError, match="leaf 0"):
        peer._participant.begin("m", "other", [0])


# ---- Who may


def test_state_moves_over_mutual_tls_with_a_token_and_to_nobody_else(stack: ExitStack) -> None:
    ca, strangers = Authority(), Authority("strangers")
    server, client, stranger = ca.sign(), ca.sign("worker-1"), strangers.sign("worker-1")
    source, target = opened(stack), opened(stack, owned=())
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    tls = sk.TLS(server.cert, server.key, ca.cert)
    address = source.serve(tls=tls, token=TOKEN).address
    own = sk.TLS(client.cert, client.key, ca.cert)
    for wrong in (
        {"tls": own, "token": TOKEN[:-1] + "?"},
        {"tls": own},
        {"tls": sk.TLS(ca=ca.cert), "token": TOKEN},
        {"tls": sk.TLS(stranger.cert, stranger.key, ca.cert), "token": TOKEN},
        {"tls": sk.TLS(client.cert, client.key, strangers.cert), "token": TOKEN},
    ):
        with pytest.raises(PeerRefusedError):
            target.fetch_from(address, timeout=SECONDS_MAX, **wrong)  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="both or neither use TLS"):
        target.fetch_from(address, timeout=1, token=TOKEN)
    assert source.key_groups == (range(GROUPS),)
    target.fetch_from(address, tls=own, token=TOKEN).wait(SECONDS_MAX)
    assert many(target.value("n", int), KEYS) == list(range(len(KEYS)))


def test_a_proposal_is_for_this_machine_unless_peers_say_who_they_are(stack: ExitStack) -> None:
    target = opened(stack, owned=())
    proposal = ProposeCall("0" * 32, 0, "203.0.113.1:7000", (range(1),), "prioritised")
    with pytest.raises(PeerError, match=r"203\.0\.113\.1:7000"):
        target._as_peer().propose(proposal)
