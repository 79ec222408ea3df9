"""Shadows: what is copied ahead, and how it becomes state. The oracle: a dict of what was written.

Both providers are in this process, with real servers on loopback; tests/faults has real processes.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from remote_util import TOKEN
from test_migration import GROUPS, HIGH, KEYS, LOW, SECONDS_MAX, States, keys_of, opened, pair

import statekit as sk
from statekit.errors import (
    ArgumentError,
    ClosedError,
    MemoryLimitError,
    MigrationError,
    NotOwnedError,
    OccupiedError,
    PeerLostError,
    PeerRefusedError,
)
from statekit.migration import shading, shadow
from statekit.migration.shadow import Shadow
from statekit.protocol.calls import CopyCall, Piece, PieceKind, ShadeCall
from statekit.remote.channel import PeerChannel


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def until(is_so: Callable[[], bool], watched: Shadow) -> None:
    """Waits for it, looking after each round."""
    with watched._changed:
        assert watched._changed.wait_for(is_so, SECONDS_MAX), watched.progress


def next_round(watched: Shadow) -> None:
    """A round that begins from now on, and all of it."""
    now = watched.progress.rounds
    until(lambda: watched.progress.rounds >= now + 2, watched)


# ---- What is copied, and taken


def test_every_type_of_state_is_copied_changed_and_taken_over(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.advance_watermark(500)
    old = States(source)
    old.fill(KEYS)
    copies = target.shadow(address, key_groups=HIGH)
    copies.wait(SECONDS_MAX)
    assert (source.key_groups, target.key_groups) == ((range(GROUPS),), ())
    for key in KEYS[::3]:  # change, replace, delete
        old.count.add(key, 1000)
        old.clicks[key].append(old.clicks[key][0])
        old.prefs[key]["volume"] = 0.9
        del old.prefs[key]["speed"]
        old.orders[key]["2026-12"].append(7)
        old.timers.cancel(key)
        old.timers.set(key, 77)
    for key in KEYS[1::3]:
        del old.name[key]
        del old.clicks[key]
        old.total.add(key, 5)
        old.timers.cancel(key)

    def read(states: States, key: str) -> tuple[Any, ...]:
        return (
            states.count[key], states.share[key], states.name.get(key), list(states.clicks[key]),
            dict(states.prefs[key]), set(states.tags[key]),
            {month: list(some) for month, some in states.orders[key].items()},
            states.total.get(key), states.seen.get(key), states.timers[key],
        )  # fmt: skip

    expected = {key: read(old, key) for key in KEYS}
    arrival = copies.take()
    assert arrival.done, "all of it was in the answer"
    assert arrival.fetches == 0
    assert copies.is_dropped
    assert (source.key_groups, target.key_groups) == ((LOW,), (HIGH,))
    new = States(target)
    for key in keys_of(target, HIGH):
        assert read(new, key) == expected[key], key
    arrival.wait(SECONDS_MAX)
    for key in keys_of(source, LOW):
        assert read(old, key) == expected[key]


def test_a_step_brings_only_what_has_changed(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    keys = [f"k{i}" for i in range(20_000)]
    count = source.value("count", int)
    count.put_many(keys, range(len(keys)))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    assert copies.progress.bytes > 20 * len(keys)
    count.put("k7", -1)
    arrival = copies.take()
    assert arrival.done
    assert arrival.bytes_received < 2000
    assert target.value("count", int).get("k7") == -1
    assert list(target.value("count", int).get_many(keys[8:])) == list(range(8, len(keys)))


def test_random_changes_during_rounds_and_steps_are_all_there(stack: ExitStack) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    source, target, address = pair(stack)
    keys = [f"k{i}" for i in range(500)]
    old, new = source.value("count", int), target.value("count", int)
    oracle: dict[str, int] = {}

    def change(kv: Any, key: str) -> None:
        if rng.random() < 0.3 and key in oracle:
            del kv[key]
            del oracle[key]
        else:
            oracle[key] = rng.randrange(1 << 40)
            kv[key] = oracle[key]

    for key in keys:
        change(old, key)
    copies = target.shadow(address)
    while copies.key_groups:
        for _ in range(rng.randrange(4)):
            for key in rng.choices(keys, k=rng.randrange(300)):
                there = target.key_group_of(key) not in set().union(*copies.key_groups)
                change(new if there else old, key)
            if rng.random() < 0.5:
                next_round(copies)
        left = [group for part in copies.key_groups for group in part]
        copies.take(rng.sample(left, min(len(left), rng.randrange(1, 5)))).wait(SECONDS_MAX)
    found = {key: new.get(key) for key in keys}
    assert found == {key: oracle.get(key) for key in keys}, f"seed {seed}"


def test_writers_in_threads_lose_nothing_while_key_groups_are_taken(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    old = source.value("count", int, default=0)
    new = target.value("count", int, default=0)
    done = [dict.fromkeys(KEYS, 0) for _ in range(3)]
    stop = threading.Event()

    def write(mine: dict[str, int]) -> None:
        at = 0
        while not stop.is_set() or at % len(KEYS):
            key = KEYS[at % len(KEYS)]
            for one in (old, new):
                with suppress(NotOwnedError):
                    one.add(key, 1)
                    mine[key] += 1
                    at += 1
                    break

    threads = [threading.Thread(target=write, args=(mine,)) for mine in done]
    for thread in threads:
        thread.start()
    with target.shadow(address) as copies:
        for group in range(GROUPS):
            next_round(copies)
            copies.take([group])
    stop.set()
    for thread in threads:
        thread.join(SECONDS_MAX)
    assert target.key_groups == (range(GROUPS),)
    assert {key: new[key] for key in KEYS} == {key: sum(mine[key] for mine in done) for key in KEYS}


# ---- What a shadow is not


def test_a_shadow_is_not_state(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    old = States(source)
    old.fill(KEYS)
    copies = target.shadow(address, key_groups=HIGH)
    copies.wait(SECONDS_MAX)
    assert copies.progress.memory > 0
    new = States(target)
    for key in KEYS:
        with pytest.raises(NotOwnedError):
            new.count[key]
    assert len(new.count) == 0
    assert new.timers.pop_due(1 << 60) == []
    assert target.metrics().bytes == sum(one.bytes for one in target.metrics().states.values())
    assert target.metrics().moved.shadow_bytes > 0
    assert target.metrics().moved.copied_in > 0
    assert source.metrics().moved.shadowed_by == 1
    with sk.connect(target.serve().address) as remote, pytest.raises(NotOwnedError):
        remote.value("count", int).get(KEYS[0])
    copies.drop()
    assert copies.progress.memory == 0
    assert target.metrics().moved.shadow_bytes == 0


def test_a_shadow_takes_no_leases_and_another_may_take_the_key_groups(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    third = opened(stack, owned=())
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    third.fetch_from(address, key_groups=LOW).wait(SECONDS_MAX)
    until(lambda: copies.progress.leaves_refused > 0, copies)
    with pytest.raises(NotOwnedError):
        copies.take(LOW)
    for key in keys_of(source, HIGH):
        source["count"].add(key, 1)
    arrival = copies.take(HIGH)
    arrival.wait(SECONDS_MAX)
    for key in keys_of(target, HIGH):
        assert target.value("count", int)[key] == KEYS.index(key) + 1


def test_key_groups_that_were_away_and_came_back_are_copied_as_they_are(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    third = opened(stack, owned=())
    count = source.value("count", int)
    count.put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    third.fetch_from(address, key_groups=LOW).wait(SECONDS_MAX)
    other = third.value("count", int)
    low = keys_of(third, LOW)
    for key in low[::2]:
        other.put(key, -5)
    for key in low[1::2]:
        del other[key]
    source.fetch_from(third.serve().address).wait(SECONDS_MAX)
    copies.take().wait(SECONDS_MAX)
    new = target.value("count", int)
    assert [new.get(key) for key in low] == [None if i % 2 else -5 for i in range(len(low))]
    for key in keys_of(target, HIGH):
        assert new[key] == KEYS.index(key)


# ---- Deltas that do not fit


def test_changes_that_are_damaged_or_lost_make_all_of_the_leaf_come(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, address = pair(stack)
    count = source.value("count", int)
    count.put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    copy = PeerChannel.copy
    lost = 0

    def breaks(channel: PeerChannel, call: CopyCall, **options: Any) -> Iterator[Piece]:
        nonlocal lost
        for piece in copy(channel, call, **options):
            if piece.kind is PieceKind.HERE and piece.blocks and piece.leaf % 3 < 2:
                lost += 1
                if piece.leaf % 3:  # a piece that never comes; and one that is not what was sent
                    continue
                piece = piece._replace(blocks=bytes(piece.blocks)[:-1] + b"\xff")
            yield piece

    with monkeypatch.context() as patch:
        patch.setattr(PeerChannel, "copy", breaks)
        for key in KEYS:
            count.add(key, 1)
        before = copies._machine.number
        until(lambda: copies._machine.number >= before + 2 and lost > 0, copies)
    for key in KEYS[::2]:
        count.add(key, 1)
    copies.take().wait(SECONDS_MAX)
    new = target.value("count", int)
    assert [new[key] for key in KEYS] == [i + 1 + (i % 2 == 0) for i in range(len(KEYS))]


@pytest.mark.parametrize("off", [-1, 1, 1000])
def test_a_delta_onto_another_copy_than_it_was_made_for_is_not_applied(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, off: int
) -> None:
    source, target, address = pair(stack)
    count = source.value("count", int)
    count.put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    shading_ = source._as_peer().shading
    since = shading_.since
    monkeypatch.setattr(shading_, "since", lambda *asked: max(0, since(*asked) + off))
    for key in KEYS:
        count.add(key, 1)
    arrival = copies.take()
    arrival.wait(SECONDS_MAX)
    new = target.value("count", int)
    assert [new[key] for key in KEYS] == [i + 1 for i in range(len(KEYS))]
    assert arrival.bytes_received > 20 * len(KEYS), "all of it came"


def test_types_that_differ_are_fitted_or_refused_before_anything_is_copied(
    stack: ExitStack,
) -> None:
    source, target, address = pair(stack)
    source.value("share", int).put_many(KEYS, range(len(KEYS)))
    wider = target.value("share", float)
    copies = target.shadow(address, key_groups=HIGH)
    copies.wait(SECONDS_MAX)
    source["share"].put(keys_of(source, HIGH)[0], 9)
    copies.take().wait(SECONDS_MAX)
    high = keys_of(target, HIGH)
    assert [wider[key] for key in high] == [9.0, *(float(KEYS.index(key)) for key in high[1:])]
    third = opened(stack, owned=())
    third.list("share", str)
    with pytest.raises(sk.errors.SchemaError):
        third.shadow(address, key_groups=LOW)
    assert third.shadows == ()


def test_a_state_that_is_declared_anew_during_rounds_is_right_after_them(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("share", int).put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    names = source.value("name", str)
    names.put_many(KEYS, [key * 2 for key in KEYS])
    next_round(copies)
    source["share"].clear()
    copies.take().wait(SECONDS_MAX)
    assert target.value("name", str)[KEYS[3]] == KEYS[3] * 2
    assert len(target.value("share", int)) == 0


# ---- Limits, refusals, ends


def test_what_does_not_fit_is_refused_with_what_to_do(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("name", str).put_many(KEYS, ["x" * 2000] * len(KEYS))
    with pytest.raises(MemoryLimitError, match="Shadow fewer"):
        target.shadow(address, memory=100_000)
    assert target.shadows == ()
    copies = target.shadow(address, memory=3_000_000)
    copies.wait(SECONDS_MAX)
    source["name"].put_many(KEYS, ["y" * 20_000] * len(KEYS))  # it grows meanwhile
    until(lambda: copies.error is not None, copies)
    assert isinstance(copies.error, MemoryLimitError)
    assert copies.is_dropped
    assert source.key_groups == (range(GROUPS),)
    with pytest.raises(ArgumentError):
        target.shadow(address, memory=0)
    with pytest.raises(ArgumentError):
        target.shadow(address, pace=-1)


def test_a_peer_that_knows_no_shadows_refuses_clearly(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, _ = stack_pair = pair(stack)
    del stack_pair
    peer = source._as_peer()
    assert peer._server is not None
    del peer._server._handlers["/statekit.v1.Peer/Shade"]
    with pytest.raises(PeerRefusedError, match="older statekit"):
        target.shadow(peer.address)
    assert target.shadows == ()


def test_a_shadow_needs_the_token(stack: ExitStack) -> None:
    source, target = opened(stack), opened(stack, owned=())
    address = source.serve(token=TOKEN).address
    with pytest.raises(PeerRefusedError):
        target.shadow(address)
    target.shadow(address, token=TOKEN).wait(SECONDS_MAX)


def test_key_groups_that_are_not_there_or_are_ours_are_refused(stack: ExitStack) -> None:
    _, target, address = pair(stack)
    target.fetch_from(address, key_groups=HIGH).wait(SECONDS_MAX)
    with pytest.raises(OccupiedError):
        target.shadow(address, key_groups=HIGH)
    with pytest.raises(NotOwnedError):
        opened(stack, owned=()).shadow(address, key_groups=HIGH)
    copies = target.shadow(address, key_groups=LOW)
    with pytest.raises(ArgumentError, match="not in this shadow"):
        copies.take(HIGH)
    with pytest.raises(ArgumentError):
        copies.take([])
    copies.drop()
    with pytest.raises(ClosedError):
        copies.wait(SECONDS_MAX)


def test_dropping_forgets_everything_on_both_sides(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    peer = source._as_peer()
    assert len(peer.shading) == 1
    copies.drop()
    assert len(peer.shading) == 0
    assert "nobody" in repr(source._residence.tracking)
    assert target.shadows == ()
    assert target.key_groups == ()
    copies.drop()


def test_orphans_end_by_themselves_on_either_side(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shading, "SHADE_SECONDS", 0.2)
    monkeypatch.setattr(shadow, "LOST_SECONDS", 0.2)
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    peer = source._as_peer()
    call = ShadeCall("0" * 32, 0, "somebody", (range(GROUPS),))
    peer.shade(call)  # and is not heard of again
    gone = threading.Event()
    drop = peer.shading._drop
    monkeypatch.setattr(peer.shading, "_drop", lambda name: (drop(name), gone.set()))
    assert gone.wait(SECONDS_MAX)
    assert len(peer.shading) == 0

    copies = target.shadow(address, timeout=0.3)
    assert peer._server is not None
    peer._server.close()
    until(lambda: copies.is_dropped, copies)
    assert isinstance(copies.error, PeerLostError)
    assert copies.progress.memory == 0


def test_a_shadow_that_the_source_has_forgotten_says_so(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    shading_ = source._as_peer().shading
    with shading_._lock:
        shading_._drop(copies.id)
    until(lambda: copies.is_dropped, copies)
    with pytest.raises(MigrationError, match="make another"):
        raise copies.error or AssertionError


def test_a_step_that_nobody_answers_leaves_the_old_owner_in_possession(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address, timeout=0.3)
    copies.wait(SECONDS_MAX)
    peer = source._as_peer()
    assert peer._server is not None
    peer._server.close()
    with pytest.raises(PeerLostError):
        copies.take(HIGH)
    assert source.key_groups == (range(GROUPS),)
    assert target.key_groups == ()
    source["count"].add(KEYS[0], 1)


# ---- Others who need changes


def test_checkpoints_and_shadows_track_changes_together(stack: ExitStack, tmp_path: Any) -> None:
    source, target, address = pair(stack)
    count = source.value("count", int)
    count.put_many(KEYS, range(len(KEYS)))
    source.checkpoint(str(tmp_path))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    for key in KEYS[::2]:
        del count[key]
    source.checkpoint(str(tmp_path))  # raises what checkpoints need
    next_round(copies)
    for key in KEYS[1::4]:
        del count[key]
    source.checkpoint(str(tmp_path))
    left = {key: count.get(key) for key in KEYS}
    copies.take().wait(SECONDS_MAX)
    assert {key: target.value("count", int).get(key) for key in KEYS} == left
    back = stack.enter_context(sk.restore(str(tmp_path), lazy=False))
    assert {key: back.value("count", int).get(key) for key in KEYS} == left


def test_two_shadows_and_a_hand_over_of_one_of_them(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    third = opened(stack, owned=())
    count = source.value("count", int)
    count.put_many(KEYS, range(len(KEYS)))
    first, second = target.shadow(address), third.shadow(address)
    first.wait(SECONDS_MAX)
    second.wait(SECONDS_MAX)
    for key in KEYS[::5]:
        del count[key]
    first.take(LOW).wait(SECONDS_MAX)
    second.take(HIGH).wait(SECONDS_MAX)
    for kv in (target, third):
        for key in keys_of(kv, kv.key_groups[0]):
            at = KEYS.index(key)
            assert kv.value("count", int).get(key) == (at if at % 5 else None)


# ---- Homes


def test_into_a_home_and_out_of_one(stack: ExitStack, tmp_path: Any) -> None:
    pytest.importorskip("rocksdict")
    source, _, address = pair(stack)
    old = States(source)
    old.fill(KEYS)
    expected = {key: old.read(key) for key in KEYS}
    home = opened(stack, f"rocksdb:{tmp_path}/home", owned=())
    copies = home.shadow(address)
    copies.wait(SECONDS_MAX)
    copies.take().wait(SECONDS_MAX)
    new = States(home)
    assert {key: new.read(key) for key in KEYS} == expected

    after = opened(stack, owned=())
    back = after.shadow(home.serve().address)  # nothing can be copied ahead
    back.wait(SECONDS_MAX)
    assert back.progress.leaves_refused == back.progress.leaves_total
    back.take().wait(SECONDS_MAX)
    last = States(after)
    assert {key: last.read(key) for key in KEYS} == expected


def test_a_shadow_of_more_leaves_than_a_message_names_is_refused(stack: ExitStack) -> None:
    source = stack.enter_context(sk.open("memory:", key_groups=128, subgroups=1024))
    target = stack.enter_context(sk.open("memory:", key_groups=128, subgroups=1024, owned=()))
    address = source.serve().address
    with pytest.raises(ArgumentError, match="64 key-groups at a time"):
        target.shadow(address)
    assert target.shadows == ()
    count = source.value("count", int)
    count.put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address, key_groups=range(64))
    copies.wait(SECONDS_MAX)
    copies.take().wait(SECONDS_MAX)
    for key in keys_of(target, range(64)):
        assert target.value("count", int)[key] == KEYS.index(key)
