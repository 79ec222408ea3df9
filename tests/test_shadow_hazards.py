"""What once went wrong with shadows and steps; each test says how.

Both providers are in this process, with real servers on loopback.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from test_migration import GROUPS, HIGH, KEYS, LOW, SECONDS_MAX, keys_of, opened, pair

import statekit as sk
from statekit.errors import (
    ArgumentError,
    ClosedError,
    MemoryLimitError,
    PeerError,
    PeerLostError,
)
from statekit.migration.arrival import Arrival
from statekit.native import Store
from statekit.protocol.calls import Limits
from statekit.remote.channel import PeerChannel
from statekit.residence.loading import Loading


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_checkpoint_that_begins_while_a_leaf_is_attached_has_it(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was looked whether a checkpoint waits for the leaf, and then it began to."""
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    move, to_read = Store.move, Arrival.to_read
    decided = threading.Event()  # the checkpoint has begun, or waits for the leaf
    threads: list[threading.Thread] = []

    def note_read(arrival: Arrival) -> Any:
        lock = getattr(arrival, "moving_in", None)
        if lock is not None and lock.locked():
            decided.set()
        return to_read(arrival)

    def checkpoint() -> None:
        job = target.checkpoint_async(str(tmp_path))
        decided.set()
        job.wait(SECONDS_MAX)

    def move_late(twin: Store, *where: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=checkpoint))
            threads[0].start()
            assert decided.wait(SECONDS_MAX)
        move(twin, *where)

    monkeypatch.setattr(Arrival, "to_read", note_read)
    monkeypatch.setattr(Store, "move", move_late)
    copies.take().wait(SECONDS_MAX)
    threads[0].join(SECONDS_MAX)
    back = stack.enter_context(sk.restore(str(tmp_path), lazy=False))
    assert list(back.value("count", int).get_many(KEYS)) == list(range(len(KEYS)))


def test_more_steps_than_departures_are_remembered_come_to_an_end(stack: ExitStack) -> None:
    """The first of them were forgotten, so that the last key-group had never gone."""
    source = stack.enter_context(sk.open("memory:", key_groups=128, subgroups=1))
    target = stack.enter_context(sk.open("memory:", key_groups=128, subgroups=1, owned=()))
    source.serve()
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    departure = source.migrate(target.serve().address, key_groups=range(128), strategy="fluid")
    departure.wait(SECONDS_MAX)
    assert departure.done
    assert departure.owned == (range(128),)
    assert list(target.value("count", int).get_many(KEYS)) == list(range(len(KEYS)))


@pytest.mark.parametrize(("groups", "subgroups"), [(64, 4), (8, 4), (16, 8)])
def test_a_warm_channel_to_a_process_with_other_numbers_takes_nothing_over(
    stack: ExitStack, groups: int, subgroups: int
) -> None:
    """What the one before it had said was believed: leaves were taken that were other leaves."""
    target = opened(stack, owned=())
    first = opened(stack)
    first.value("count", int).put_many(KEYS, range(len(KEYS)))
    address = first.serve().address
    target.fetch_from(address, key_groups=[0]).wait(SECONDS_MAX)
    first.close()
    other = stack.enter_context(sk.open("memory:", key_groups=groups, subgroups=subgroups))
    other.serve(address)
    other.value("count", int).put_many(KEYS, range(len(KEYS)))
    with pytest.raises(ArgumentError, match="same numbers"):
        target.fetch_from(address, key_groups=[1, 2])
    assert target.key_groups == (range(1),)
    assert other.key_groups == (range(groups),)
    assert list(other.value("count", int).get_many(KEYS)) == list(range(len(KEYS)))


def test_a_warm_channel_to_another_life_fetches_from_that(stack: ExitStack) -> None:
    target = opened(stack, owned=())
    first = opened(stack)
    address = first.serve().address
    target.fetch_from(address, key_groups=LOW).wait(SECONDS_MAX)
    first.close()
    other = opened(stack, owned=HIGH)
    other.serve(address)
    high = keys_of(other, HIGH)
    other.value("count", int).put_many(high, [7] * len(high))
    arrival = target.fetch_from(address, key_groups=HIGH)
    arrival.wait(SECONDS_MAX)
    assert target.key_groups == (range(GROUPS),)
    assert target._as_peer()._participant.asks(arrival.source_name) == []
    assert not target._as_peer()._asked
    assert {target.value("count", int)[key] for key in keys_of(target, HIGH)} == {7}


def test_a_proposal_whose_offer_is_lost_leaves_the_key_group_with_its_owner(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content went with the offer, so that it could not be taken back."""
    source, target, _ = pair(stack)
    address = target.serve().address
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    begin = PeerChannel.begin

    def lost(channel: PeerChannel, *call: Any, **options: Any) -> Any:
        begin(channel, *call, **options)
        raise PeerLostError(f"{channel.address} does not answer (lost by the test).")

    with monkeypatch.context() as patch:
        patch.setattr(PeerChannel, "begin", lost)
        with pytest.raises(PeerError):
            source.migrate(address, key_groups=[3])
    assert target.key_groups == ()
    assert source.key_groups == (range(GROUPS),)
    assert list(source.value("count", int).get_many(KEYS)) == list(range(len(KEYS)))
    source.migrate(address, key_groups=[3]).wait(SECONDS_MAX)
    assert target.key_groups == (range(3, 4),)


@pytest.mark.parametrize("is_declared", [True, False])
def test_what_had_expired_where_it_comes_from_does_not_come_back(
    stack: ExitStack, is_declared: bool
) -> None:
    """A sweep leaves no trace, and where the leaf went it was still earlier."""
    source, target, address = pair(stack)
    ttl = sk.TTL(1, time="event")
    source.advance_watermark(0)
    target.advance_watermark(0)
    old = source.value("seen", int, ttl=ttl)
    old.put_many(KEYS, range(len(KEYS)))
    if is_declared:
        target.value("seen", int, ttl=ttl)
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    source.advance_watermark(2000)
    source.sweep()
    assert old.get(KEYS[0]) is None
    copies.take().wait(SECONDS_MAX)
    new = target.value("seen", int, ttl=ttl)
    assert [key for key in KEYS if new.get(key) is not None] == []


def test_a_slow_round_ends_with_its_shadow_and_with_its_source(stack: ExitStack) -> None:
    """Its thread slept for as long as a leaf takes at that pace: hours."""
    source, target, address = pair(stack)
    source.value("name", str).put_many(KEYS, ["x" * 1000] * len(KEYS))
    before = {*threading.enumerate()}
    copies = target.shadow(address, pace=1)
    until_sent(source)
    copies.drop()
    joined(before)
    again = target.shadow(address, pace=1)
    until_sent(source)
    source.close()
    again.drop()
    target.close()
    joined(before)


def until_sent(source: sk.KVProvider) -> None:
    """Until a leaf was read out."""
    shading = source._as_peer().shading
    sent = shading.bytes_sent
    waited = threading.Event()
    for _ in range(6000):
        if shading.bytes_sent > sent:
            return
        waited.wait(0.01)
    raise AssertionError("nothing is sent")


def joined(before: set[threading.Thread]) -> None:
    """Threads of shadows and streams that have begun since end."""
    for thread in threading.enumerate():
        if thread not in before and thread.name in ("statekit-shadow", "statekit-stream"):
            thread.join(20.0)
            assert not thread.is_alive(), thread.name


def test_stopped_steps_leave_nothing_between_two_owners(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that nobody had answered stayed offered, and stop() said that it was there."""
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    begin = PeerChannel.begin
    is_lost = threading.Event()

    def lost(channel: PeerChannel, *call: Any, **options: Any) -> Any:
        begin(channel, *call, **options)
        is_lost.set()
        raise PeerLostError(f"{channel.address} does not answer (lost by the test).")

    with monkeypatch.context() as patch:
        patch.setattr(PeerChannel, "begin", lost)
        steps = target.fetch_from(address, strategy="fluid")
        assert is_lost.wait(SECONDS_MAX)
        with pytest.raises(PeerLostError):
            steps.wait(SECONDS_MAX)
    left = steps.stop()
    assert set().union(*left, *target.key_groups) == set(range(GROUPS))
    for arrival in steps.arrivals:
        arrival.wait(SECONDS_MAX)
    assert source.key_groups == left
    for kv in (source, target):
        for key in keys_of(kv, set().union(*kv.key_groups)):
            assert kv.value("count", int).get(key) == KEYS.index(key)


@pytest.mark.parametrize("moment", ["hello", "shade"])
def test_a_shadow_that_is_made_while_its_provider_is_closed_ends(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It began after the others were dropped, and went on for ever."""
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    before = {*threading.enumerate()}
    ask = getattr(PeerChannel, moment)

    def closes(channel: PeerChannel, *call: Any, **options: Any) -> Any:
        reply = ask(channel, *call, **options)
        target.close()
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(PeerChannel, moment, closes)
        with pytest.raises(ClosedError):
            target.shadow(address)
    joined(before)


def test_progress_can_be_read_while_the_shadow_is_dropped(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    copies = target.shadow(address)
    copies.wait(SECONDS_MAX)
    assert copies.progress.memory > 0
    copies._twin, twin = None, copies._twin
    copies.drop()
    assert twin is not None
    twin.close()
    copies._twin = twin  # what somebody who looks had seen before
    assert copies.progress.memory == 0


def test_content_that_comes_with_an_offer_fits_into_the_messages_of_who_asks(
    stack: ExitStack,
) -> None:
    """The owner had larger ones. The offer never arrived, however often it was asked for."""
    source, target, address = pair(stack)
    target.serve(limits=Limits(message_bytes=2 << 20))
    names = source.value("name", str)
    names.put_many(KEYS, ["x" * 9_000] * len(KEYS))
    steps = target.fetch_from(address, strategy="batched", step=GROUPS)
    steps.wait(SECONDS_MAX)
    assert list(target.value("name", str).get_many(KEYS)) == ["x" * 9_000] * len(KEYS)


def test_a_step_that_ran_out_of_memory_goes_on_when_there_is_some(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody tried again, although wait() said so."""
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))

    def full(*_: Any) -> None:
        raise MemoryLimitError("there is no memory (says the test).")

    with monkeypatch.context() as patch:
        patch.setattr(Loading, "fill", full)
        steps = target.fetch_from(address, key_groups=LOW, strategy="batched")
        with pytest.raises(MemoryLimitError):
            steps.wait(SECONDS_MAX)
        assert not steps.done
    with steps._changed:
        assert steps._changed.wait_for(lambda: not steps.is_running, SECONDS_MAX)
    steps.wait(SECONDS_MAX)
    assert target.key_groups == (LOW,)
