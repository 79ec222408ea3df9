"""What the tests of migrations with faults have found, each as a small test.

Both providers are in this process: what matters is what they say to each other.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from migration_cases import keys_of, leaf_of
from migration_worker import KEY_GROUPS, SUBGROUPS
from proxy import Direction, Fault, Proxy, Rule
from remote_util import wait_until

import statekit as sk
from statekit.errors import (
    ArgumentError,
    FencedError,
    MigrationError,
    NotOwnedError,
    PeerLostError,
)
from statekit.migration import report as report_module
from statekit.migration import stream as stream_module
from statekit.protocol.calls import BeginCall, ProposeCall
from statekit.remote.channel import PeerChannel

REQUEST, REPLY = Direction
ALL = [*range(KEY_GROUPS)]
SHORT_S = 0.3  # the time-out of a call that is never answered because of a fault
LONG_S = 120.0
_STREAMS = {"streamed_requests": ("Stream",), "streamed_replies": ("Stream", "FetchLong")}


class Pair:
    """A source with everything, a target with nothing, and the network between them."""

    def __init__(self) -> None:
        self.source = sk.open(key_groups=KEY_GROUPS, subgroups=SUBGROUPS)
        self.target = sk.open(key_groups=KEY_GROUPS, subgroups=SUBGROUPS, owned=())
        self.there = self.source.value("counts", int, default=0, key=int)
        self.here = self.target.value("counts", int, default=0, key=int)
        for key in keys_of(ALL):
            self.there.add(key, key + 1)
        self.server, self.target_server = self.source.serve(), self.target.serve()
        self.proxy = Proxy(self.server.address, **_STREAMS)
        self.back = Proxy(self.target_server.address, **_STREAMS)
        self.server.address = self.proxy.address  # what the source tells others

    def fetch(self, groups: list[int], strategy: Any = "on_demand") -> Any:
        return self.target.fetch_from(
            self.proxy.address, key_groups=groups, strategy=strategy, timeout=LONG_S
        )

    def fetch_in_vain(self, groups: list[int], rule: Rule, patch: pytest.MonkeyPatch) -> None:
        """A fetch that gives up waiting for the answer to Begin, because the rule holds it."""
        begin = PeerChannel.begin

        def gives_up(channel: PeerChannel, call: BeginCall, **options: Any) -> Any:
            own = PeerChannel(channel.address, timeout_s=LONG_S)
            threading.Thread(target=_in_vain, args=(begin, own, call), daemon=True).start()
            assert rule.wait_reached()
            raise PeerLostError("it has not answered", peer=channel.address, seconds=LONG_S)

        with patch.context() as within:
            within.setattr(PeerChannel, "begin", gives_up)
            with pytest.raises(PeerLostError):
                self.fetch(groups)

    def groups(self, provider: sk.KVProvider) -> list[int]:
        return [group for part in provider.key_groups for group in part]

    def close(self) -> None:
        self.proxy.reset()
        self.back.reset()
        self.target.close()
        self.source.close()
        self.proxy.stop()
        self.back.stop()


def _in_vain(begin: Any, channel: PeerChannel, call: BeginCall) -> None:
    with channel, suppress(sk.StateKitError):
        begin(channel, call)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    for module in (stream_module, report_module):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    pair = Pair()
    yield pair
    pair.close()


def wait_gone(provider: sk.KVProvider) -> None:
    """Until nothing is on its way."""
    wait_until(lambda: not provider.migrations)


def test_an_arrival_that_is_given_back_is_over(pair: Pair) -> None:
    arrival = pair.fetch([2])
    assert arrival.give_back() == (range(2, 3),)
    wait_gone(pair.target)
    wait_gone(pair.source)
    assert pair.target.loading is None
    assert pair.groups(pair.source) == ALL


@pytest.mark.parametrize("direction", Direction)
def test_a_give_back_that_was_lost_is_said_again(pair: Pair, direction: Direction) -> None:
    """It was not: nobody had the key-groups, for ever."""
    arrival = pair.fetch([2])
    arrival.channel.timeout_s = SHORT_S
    pair.proxy.arm(Rule(Fault.DROP, 1, "GiveBack", direction))
    with pytest.raises(PeerLostError):
        arrival.give_back()
    arrival.channel.timeout_s = LONG_S
    wait_gone(pair.target)
    assert pair.groups(pair.source) == ALL
    assert pair.there[keys_of([2])[0]] == keys_of([2])[0] + 1


def test_the_end_of_one_arrival_does_not_end_another_that_is_not_reported(pair: Pair) -> None:
    """The source kept its leaves for ever, because the report about them was never sent."""
    rule = pair.proxy.arm(Rule(Fault.HOLD, 1, "Installed", REQUEST))
    pair.fetch([0])
    pair.target.prefetch(keys_of([0]), key=int).result(LONG_S)
    assert rule.wait_reached()
    second = pair.fetch([1], "gradual")
    second.wait(LONG_S)
    wait_until(lambda: second not in pair.target.migrations)  # a thread of its own finishes it
    rule.release.set()
    wait_gone(pair.target)
    wait_gone(pair.source)


def test_a_fetch_that_lost_a_race_does_not_raise_that_all_is_done(pair: Pair) -> None:
    """An operation raised ClosedError, because the stream had brought the last leaf meanwhile."""
    rule = pair.proxy.arm(Rule(Fault.HOLD, 1, "Fetch", REPLY))
    stream = pair.proxy.arm(Rule(Fault.HOLD, 1, "Stream", REPLY))
    pair.fetch([0, 1], "prioritised")  # one small key-group would come with the answer to Begin
    key = keys_of([0])[0]
    with ThreadPoolExecutor(1) as pool:
        count = pool.submit(pair.here.add, key)
        assert rule.wait_reached()
        stream.release.set()
        wait_gone(pair.target)
        assert count.result(LONG_S) == key + 2


def test_a_migration_that_failed_leaves_key_groups_with_their_owner(pair: Pair) -> None:
    """migrate() raised, and the key-groups were offered to a target that did not know it."""
    pair.proxy.arm(Rule(Fault.TRUNCATE, 1, "Begin", REPLY))
    with pytest.raises((MigrationError, ConnectionError)):
        pair.source.migrate(pair.back.address, key_groups=[0], timeout=LONG_S)
    assert pair.groups(pair.source) == ALL
    pair.source.migrate(pair.back.address, key_groups=[0], timeout=LONG_S).wait(LONG_S)
    assert pair.groups(pair.target) == [0]


@pytest.mark.parametrize("direction", Direction)
def test_a_proposal_that_comes_twice_is_taken_on_once(pair: Pair, direction: Direction) -> None:
    """The second one raised OccupiedError, though all had gone well."""
    pair.back.arm(Rule(Fault.DUPLICATE, 1, "Propose", direction))
    departure = pair.source.migrate(pair.back.address, key_groups=[0], timeout=LONG_S)
    departure.wait(LONG_S)
    assert (pair.groups(pair.target), pair.groups(pair.source)) == ([0], ALL[1:])
    for key in keys_of([0]):
        assert pair.here.add(key) == key + 2


def test_a_late_begin_takes_nothing_away(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took key-groups from a later migration, or from the source, for a target that gave up."""
    rule = pair.proxy.arm(Rule(Fault.DELAY, 1, "Begin", REQUEST))
    pair.fetch_in_vain([0], rule, monkeypatch)
    arrival = pair.fetch([0])
    rule.release.set()
    assert rule.wait_over()
    assert pair.here.add(keys_of([0])[0]) == keys_of([0])[0] + 2
    arrival.wait(LONG_S)
    pair.fetch([1]).give_back()
    assert pair.groups(pair.source) == ALL[1:]


def test_a_late_begin_finds_what_was_given_back_where_it_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = pair.proxy.arm(Rule(Fault.DELAY, 1, "Begin", REQUEST))
    pair.fetch_in_vain([0], rule, monkeypatch)
    pair.fetch([0]).give_back()
    rule.release.set()
    assert rule.wait_over()
    assert pair.groups(pair.source) == ALL


def test_a_key_group_of_which_a_part_died_with_its_owner_is_not_taken_back(pair: Pair) -> None:
    """The source owned it again, without the leaves that it had let go of."""
    pair.fetch([0, 1])
    first = keys_of([0])[:1]
    pair.target.prefetch(first, key=int).result(LONG_S)
    (departure,) = pair.source.migrations
    wait_until(lambda: departure.progress.leaves_done == 1)
    pair.target_server.close()
    with pytest.raises(MigrationError, match=r"key-groups 0 are lost"):
        departure.abort(target_is_dead=True)
    assert pair.groups(pair.source) == ALL[1:]
    for key in keys_of([0]):
        with pytest.raises(NotOwnedError):
            pair.there.add(key)
    for key in keys_of([1]):
        assert pair.there.add(key) == key + 2
    wait_gone(pair.source)


@pytest.mark.parametrize("migration", ["", "zz" * 16, "ab" * 15, "AB" * 16, "ab" * 17])
def test_a_migration_that_has_no_proper_name_shuts_nothing(pair: Pair, migration: str) -> None:
    """Its key-groups were shut before the name was looked at, and then nobody had them."""
    begin = BeginCall(migration, 0, "somebody", (range(1),), 0)
    propose = ProposeCall(migration, 0, pair.proxy.address, (range(1),), "on_demand")
    to_source = PeerChannel(pair.proxy.address, timeout_s=LONG_S)
    to_target = PeerChannel(pair.target_server.address, timeout_s=LONG_S)
    with to_source, pytest.raises((ArgumentError, ConnectionError)):
        to_source.begin(begin)
    with to_target, pytest.raises((ArgumentError, ConnectionError)):
        to_target.propose(propose)
    assert pair.groups(pair.source) == ALL
    assert pair.there.add(keys_of([0])[0]) == keys_of([0])[0] + 2


def test_who_is_fenced_takes_nothing_over(pair: Pair) -> None:
    """A fenced process asked the new generation for key-groups, and could not take what it got."""
    pair.source.fence(1)
    pair.target.fence(1)
    with pytest.raises(FencedError):
        pair.fetch([0])


def test_many_who_wait_for_a_leaf_of_a_dead_peer_are_told_when_one_has_asked_in_vain(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them waited for a time-out of its own, one after the other."""
    arrival = pair.fetch([0])
    key, count = keys_of([0])[0], 12
    asked: list[int] = []
    is_dead = threading.Event()

    def fetch(*_: Any, **options: Any) -> Iterator[Any]:
        asked.append(1)
        assert is_dead.wait(LONG_S)
        raise PeerLostError("it does not answer", peer=pair.proxy.address, seconds=LONG_S)

    monkeypatch.setattr(arrival.channel, "fetch", fetch)

    def touch() -> None:
        with pytest.raises(PeerLostError, match=f"leaf {leaf_of(key)} "):
            pair.here.add(key)

    with ThreadPoolExecutor(count) as pool:
        all_of_them = [pool.submit(touch) for _ in range(count)]
        wait_until(lambda: arrival._waiting == count - 1)  # one asks, the others wait for it
        is_dead.set()
        for done in all_of_them:
            done.result(LONG_S)
    assert len(asked) == 1
    monkeypatch.undo()
