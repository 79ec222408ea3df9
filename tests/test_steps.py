"""Ownership that moves in steps: fluid and batched, and what comes with the offer.

The oracle is a dict of what was written, and who was asked.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from test_migration import GROUPS, HIGH, KEYS, LOW, SECONDS_MAX, States, keys_of, opened, pair

import statekit as sk
from statekit.errors import (
    ArgumentError,
    ClosedError,
    NotOwnedError,
    OccupiedError,
    PeerLostError,
    PeerRefusedError,
)
from statekit.migration.new_owner import INLINE_BYTES
from statekit.migration.strategies import ALIASES, STEPPED, STRATEGIES, WHOLE, canonical
from statekit.protocol.calls import BeginCall
from statekit.remote.channel import PeerChannel


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Gate:
    """on_step that lets the next step go when the test says so."""

    def __init__(self) -> None:
        self.steps: list[tuple[range, ...]] = []
        self.came = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def __call__(self, groups: tuple[range, ...]) -> None:
        self.steps.append(groups)
        self.came.release()
        assert self.go.acquire(timeout=SECONDS_MAX)


# ---- Names


def test_former_names_mean_the_present_ones() -> None:
    assert canonical("gradual") == "order_unaware"
    assert canonical("gradual_batched") == "order_unaware_batched"
    assert not set(ALIASES) & set(STRATEGIES)
    assert STRATEGIES == WHOLE + STEPPED


@pytest.mark.parametrize("name", ["gradual", "gradual_batched"])
def test_a_former_name_moves_everything(stack: ExitStack, name: Any) -> None:
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    migration = target.fetch_from(address, strategy=name)
    migration.wait(SECONDS_MAX)
    assert migration.strategy == ALIASES[name]
    assert list(target.value("count", int).get_many(KEYS)) == list(range(len(KEYS)))


def test_what_is_no_strategy_is_refused_with_those_there_are(stack: ExitStack) -> None:
    _, target, address = pair(stack)
    wrong: Any
    for wrong in ("slowly", "", None, 3):
        with pytest.raises(ArgumentError, match=r"prioritised.*fluid"):
            target.fetch_from(address, strategy=wrong)


# ---- Steps


@pytest.mark.parametrize(
    ("strategy", "step", "size"), [("fluid", None, 1), ("batched", 3, 3), ("seamless", 3, 3)]
)
def test_key_groups_come_a_few_at_a_time_and_the_others_are_served_where_they_were(
    stack: ExitStack, strategy: Any, step: int | None, size: int
) -> None:
    source, target, address = pair(stack)
    old = States(source)
    old.fill(KEYS)
    expected = {key: old.read(key) for key in KEYS}
    gate = Gate()
    steps = target.fetch_from(address, key_groups=HIGH, strategy=strategy, step=step, on_step=gate)
    new = States(target)
    came: list[int] = []
    while len(came) < len(HIGH):
        assert gate.came.acquire(timeout=SECONDS_MAX)
        (part,) = gate.steps[-1]
        came += part
        assert len(part) == min(size, len(HIGH) - len(came) + len(part))
        assert [*steps.owned[0]] == came == sorted(came)
        for key in KEYS:
            group = source.key_group_of(key)
            mine, other = (new, old) if group in came else (old, new)
            assert mine.read(key) == expected[key]
            with pytest.raises(NotOwnedError):
                other.count[key]
        gate.go.release()
    steps.wait(SECONDS_MAX)
    assert steps.done
    assert steps.error is None
    assert steps.progress.fraction == 1.0
    assert (source.key_groups, target.key_groups) == ((LOW,), (HIGH,))


@pytest.mark.parametrize("strategy", STEPPED)
def test_writes_between_steps_are_where_their_key_group_is(stack: ExitStack, strategy: Any) -> None:
    source, target, address = pair(stack)
    old, new = source.value("count", int, default=0), target.value("count", int, default=0)
    gate = Gate()
    counts = dict.fromkeys(KEYS, 0)
    size = None if strategy == "fluid" else 1
    steps = target.fetch_from(address, strategy=strategy, step=size, on_step=gate)
    for _ in range(GROUPS):
        assert gate.came.acquire(timeout=SECONDS_MAX)
        for key in KEYS:
            counts[key] += 1
            owner = new if target.key_group_of(key) in steps.owned[0] else old
            assert owner.add(key, 1) == counts[key]
        gate.go.release()
    steps.wait(SECONDS_MAX)
    assert {key: new[key] for key in KEYS} == counts


@pytest.mark.parametrize("strategy", STEPPED)
def test_a_migration_in_steps_that_the_old_owner_begins(stack: ExitStack, strategy: Any) -> None:
    source, target, _ = pair(stack)
    States(source).fill(KEYS)
    expected = {key: States(source).read(key) for key in KEYS}
    leaving = source.migrate(target.serve().address, key_groups=HIGH, strategy=strategy)
    leaving.wait(SECONDS_MAX)
    assert leaving.done
    assert leaving.owned == (HIGH,)
    assert (source.key_groups, target.key_groups) == ((LOW,), (HIGH,))
    for key in keys_of(target, HIGH):
        assert States(target).read(key) == expected[key]


def test_stopped_steps_leave_the_rest_where_it_was(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    gate = Gate()
    steps = target.fetch_from(address, key_groups=HIGH, strategy="fluid", on_step=gate)
    assert gate.came.acquire(timeout=SECONDS_MAX)
    steps.end()
    gate.go.release()
    assert steps.stop() == (range(9, 16),)
    with pytest.raises(ClosedError, match=r"9-15"):
        steps.wait(SECONDS_MAX)
    assert source.key_groups == (range(9),) or source.key_groups == (range(8), range(9, 16))
    target.fetch_from(address, key_groups=range(9, 16)).wait(SECONDS_MAX)
    assert target.key_groups == (HIGH,)


def test_what_on_step_raises_is_raised_by_wait_and_ends_the_steps(stack: ExitStack) -> None:
    source, target, address = pair(stack)

    def on_step(groups: tuple[range, ...]) -> None:
        raise KeyError("whatever")

    steps = target.fetch_from(address, strategy="fluid", on_step=on_step)
    with pytest.raises(KeyError, match="whatever"):
        steps.wait(SECONDS_MAX)
    assert steps.owned == (range(1),)
    assert source.key_groups == (range(1, GROUPS),)


def test_an_old_owner_that_is_gone_keeps_what_had_not_its_turn(stack: ExitStack) -> None:
    source, target, _ = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    server = source._peer._server if source._peer else None
    assert server is not None
    gate = Gate()
    steps = target.fetch_from(
        server.address, key_groups=HIGH, strategy="fluid", on_step=gate, timeout=0.3
    )
    assert gate.came.acquire(timeout=SECONDS_MAX)
    server.close()
    gate.go.release()
    with pytest.raises(PeerLostError):
        steps.wait(SECONDS_MAX)
    assert steps.owned == (range(8, 9),)
    assert source.key_groups == (range(8), range(9, 16))
    steps.stop()


def test_arguments_that_do_not_fit_are_refused_before_anything_moves(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    fetch: Any = target.fetch_from
    for options, words in (
        ({"strategy": "fluid", "base": "/nowhere"}, "base="),
        ({"strategy": "fluid", "step": 2}, "batched"),
        ({"strategy": "batched", "step": 0}, "1 or more"),
        ({"strategy": "batched", "step": "x"}, "1 or more"),
        ({"strategy": "prioritised", "step": 2}, "fluid"),
        ({"on_step": print}, "fluid"),
    ):
        with pytest.raises(ArgumentError, match=words):
            fetch(address, **options)
    assert source.key_groups == (range(GROUPS),)
    target.fetch_from(address, key_groups=LOW).wait(SECONDS_MAX)
    with pytest.raises(NotOwnedError, match="0-7"):
        opened(stack, owned=()).fetch_from(address, key_groups=LOW, strategy="fluid")
    with pytest.raises(OccupiedError):
        target.fetch_from(address, key_groups=LOW, strategy="fluid")


def test_a_provider_that_is_closed_in_the_middle_leaves_each_key_group_with_one_owner() -> None:
    with ExitStack() as stack:
        source, target, address = pair(stack)
        source.value("count", int).put_many(KEYS, range(len(KEYS)))
        gate = Gate()
        steps = target.fetch_from(address, strategy="fluid", on_step=gate)
        assert gate.came.acquire(timeout=SECONDS_MAX)
        steps.arrivals[0].wait(SECONDS_MAX)
        steps.end()
        gate.go.release()
        target.close()
        assert source.key_groups == (range(1, GROUPS),)
        for key in keys_of(source, range(1, GROUPS)):
            assert source["count"][key] == KEYS.index(key)


# ---- What comes with the offer, and warm channels


def test_a_small_key_group_comes_with_its_offer_on_a_channel_that_is_kept(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    calls: list[str] = []
    ask = PeerChannel._ask

    def counting(channel: PeerChannel, method: str, *rest: Any) -> bytes:
        calls.append(method)
        return ask(channel, method, *rest)

    monkeypatch.setattr(PeerChannel, "_ask", counting)
    channels = set()
    for group in range(3):
        calls.clear()
        arrival = target.fetch_from(address, key_groups=range(group, group + 1))
        assert arrival.done, "all of it was in the answer to Begin"
        began = [name for name in calls if name in ("Hello", "Begin", "Fetch")]
        assert began == (["Hello", "Begin"] if group == 0 else ["Begin"])
        arrival.wait(SECONDS_MAX)
        channels.add(arrival.channel)
    assert len(channels) == 1
    count = target.value("count", int)
    for key in keys_of(target, range(3)):
        assert count[key] == KEYS.index(key)


def test_what_is_too_large_for_the_answer_comes_as_ever(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    key = keys_of(source, range(1))[0]
    source.value("name", str)[key] = "x" * 2 * INLINE_BYTES
    arrival = target.fetch_from(address, key_groups=range(1))
    arrival.wait(SECONDS_MAX)
    assert target.value("name", str)[key] == "x" * 2 * INLINE_BYTES


def test_the_answer_to_begin_said_twice_has_the_same_content(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    source.value("count", int).put_many(KEYS, range(len(KEYS)))
    peer = target._as_peer()
    channel = peer.connect(address, peer.credentials, SECONDS_MAX)
    call = BeginCall(peer.new_id(), 0, peer.name, (range(1),), 0, inline_bytes=1 << 20)
    first, second = channel.begin(call), channel.begin(call)
    assert first.pieces
    assert [bytes(one.blocks) for one in first.pieces] == [
        bytes(one.blocks) for one in second.pieces
    ]
    channel.close()


def test_a_channel_whose_peer_was_lost_is_not_kept(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    target.fetch_from(address, key_groups=range(1)).wait(SECONDS_MAX)
    assert source._peer is not None
    assert source._peer._server is not None
    source._peer._server.close()
    for _ in range(2):  # at once, and not after the time-out: nobody listens there
        with pytest.raises(PeerLostError, match="nobody listens"):
            target.fetch_from(address, key_groups=range(1, 2), timeout=SECONDS_MAX)


def test_the_command_line_knows_present_and_former_names() -> None:
    from click.testing import CliRunner

    from statekit.cli.serving import fetch

    told = CliRunner().invoke(fetch, ["--help"]).output
    assert all(name in told for name in STRATEGIES)
    again = CliRunner().invoke(fetch, ["127.0.0.1:1", "--strategy", "gradual", "--discard"])
    assert "is not one of" not in again.output
    assert sk.open  # the package imports


def test_seamless_steps_bring_what_has_changed_and_end_their_shadow(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    keys = [f"k{i}" for i in range(20_000)]
    source.value("count", int).put_many(keys, range(len(keys)))
    steps = target.fetch_from(address, strategy="seamless", step=4)
    steps.wait(SECONDS_MAX)
    assert steps.shadow is not None
    assert steps.shadow.is_dropped
    assert steps.progress.bytes < 10_000, "everything else was copied before"
    assert target.shadows == ()
    assert list(target.value("count", int).get_many(keys)) == list(range(len(keys)))


def test_seamless_ends_in_wait_if_the_peer_knows_no_shadows(stack: ExitStack) -> None:
    source, target, address = pair(stack)
    peer = source._as_peer()
    assert peer._server is not None
    del peer._server._handlers["/statekit.v1.Peer/Shade"]
    steps = target.fetch_from(address, strategy="seamless")
    with pytest.raises(PeerRefusedError, match="older statekit"):
        steps.wait(SECONDS_MAX)
    assert source.key_groups == (range(GROUPS),)
