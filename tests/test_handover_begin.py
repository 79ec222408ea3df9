"""The beginning of a hand-over: an answer may be late or lost, and many leaves are cheap."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from remote_util import wait_until

import statekit as sk
from statekit.errors import ArgumentError, MigrationError, PeerLostError, SchemaError
from statekit.migration.new_owner import NewOwnerShell
from statekit.migration.old_owner import OldOwnerShell
from statekit.remote.channel import PeerChannel

GROUPS, SUBGROUPS = 8, 2
KEYS = [f"key-{i}" for i in range(200)]
SECONDS_MAX = 60.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, **options: Any) -> sk.KVProvider:
    options = {"key_groups": GROUPS, "subgroups": SUBGROUPS} | options
    return stack.enter_context(sk.open("memory:", **options))


def pair(stack: ExitStack) -> tuple[sk.KVProvider, sk.KVProvider, str]:
    source, target = opened(stack), opened(stack, owned=())
    source.value("n", int).put_many(KEYS, range(len(KEYS)))
    return source, target, source.serve().address


def content(*providers: sk.KVProvider) -> dict[str, int]:
    found: dict[str, int] = {}
    for kv in providers:
        for key, value in kv.value("n", int).items():
            assert key not in found
            found[key] = value
    return dict(sorted(found.items()))


ALL = dict(sorted((key, i) for i, key in enumerate(KEYS)))


class Held:
    """Calls of Begin that outlast their time-out, without looking at a clock.

    The caller gives up when the source has the call. The call is held at the source, before or
    after it is done, until the test lets it go on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
        self.ids: list[str] = []
        self.is_impatient = False
        self._where = where
        self._came, self._release = threading.Semaphore(0), threading.Event()
        self._calls: list[threading.Thread] = []
        answer, call = OldOwnerShell.begin, PeerChannel.begin

        def held(peer: OldOwnerShell, asked: Any) -> Any:
            self.ids.append(asked.migration)
            is_held = self.is_impatient
            if is_held and where == "before":
                self._hold()
            reply = answer(peer, asked)
            if is_held and where == "after":
                self._hold()
            return reply

        def ask(channel: PeerChannel, asked: Any, **options: Any) -> Any:
            if not self.is_impatient:
                return call(channel, asked, **options)
            # A channel of its own, because the caller that gives up closes the other one.
            own = PeerChannel(channel.address, timeout_s=SECONDS_MAX)
            thread = threading.Thread(target=call, args=(own, asked))
            thread.start()
            self._calls.append(thread)
            assert self._came.acquire(timeout=SECONDS_MAX)
            raise PeerLostError("it has not answered", peer=channel.address, seconds=0.1)

        monkeypatch.setattr(OldOwnerShell, "begin", held)
        monkeypatch.setattr(PeerChannel, "begin", ask)

    def _hold(self) -> None:
        self._came.release()
        assert self._release.wait(SECONDS_MAX)

    def fail(self, target: sk.KVProvider, address: str, **options: Any) -> None:
        """fetch_from() must fail as it does when the answer does not come."""
        self.is_impatient = True
        with pytest.raises(PeerLostError) as caught:
            target.fetch_from(address, **options)
        self.is_impatient = False
        assert "fetch_from() again" in "".join(caught.value.__notes__)

    def let_go(self) -> None:
        self._release.set()
        for thread in self._calls:
            thread.join(SECONDS_MAX)
            assert not thread.is_alive()


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("is_over", [True, False])
def test_a_plain_retry_goes_on_with_what_was_begun(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, where: str, is_over: bool
) -> None:
    """The request or the answer is late; the next try comes after it, or before it."""
    source, target, address = pair(stack)
    held = Held(monkeypatch, where)
    held.fail(target, address)
    if is_over:
        held.let_go()
        assert source.key_groups == ()  # this made it look as if there were nothing to fetch
    migration = target.fetch_from(address)
    held.let_go()
    migration.wait(SECONDS_MAX)
    assert target.key_groups == (range(GROUPS),)
    assert content(target) == ALL
    assert {migration.id} == set(held.ids)
    assert source.migrations == () == target.migrations


def test_nobody_who_retries_waits_for_a_slow_begin_twice(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes, the same hand-over is not begun anew with each try."""
    source, target, address = pair(stack)
    held = Held(monkeypatch, "before")
    begun: list[str] = []
    depart = OldOwnerShell._depart

    def counted(peer: OldOwnerShell, call: Any, *rest: Any) -> Any:
        begun.append(call.migration)
        return depart(peer, call, *rest)

    monkeypatch.setattr(OldOwnerShell, "_depart", counted)
    for _ in range(3):
        held.fail(target, address)
    held.let_go()
    target.fetch_from(address).wait(SECONDS_MAX)
    assert len(begun) == 1
    assert len(held.ids) == 4
    assert content(target) == ALL
    assert source.key_groups == ()


def test_who_never_comes_back_gives_it_back_when_it_is_closed(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, address = pair(stack)
    held = Held(monkeypatch, "after")
    held.fail(target, address)
    held.let_go()
    assert source.key_groups == ()
    target.close()
    assert source.key_groups == (range(GROUPS),)
    assert content(source) == ALL


def test_the_old_owner_can_take_it_back_and_the_retry_begins_anew(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, address = pair(stack)
    held = Held(monkeypatch, "after")
    held.fail(target, address)
    held.let_go()
    (departure,) = source.migrations
    departure.abort()  # type: ignore[union-attr]
    source.value("n", int).add_many(KEYS, [1000] * len(KEYS))
    migration = target.fetch_from(address)
    migration.wait(SECONDS_MAX)
    assert migration.id != held.ids[0]
    assert content(target) == {key: value + 1000 for key, value in ALL.items()}


@pytest.mark.parametrize("groups", [range(2), range(6, 8), range(8)], ids=str)
def test_what_is_asked_for_next_may_be_something_else(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, groups: range
) -> None:
    source, target, address = pair(stack)
    held = Held(monkeypatch, "after")
    held.fail(target, address, key_groups=range(4))
    held.let_go()
    target.fetch_from(address, key_groups=groups).wait(SECONDS_MAX)
    assert target.key_groups == (groups,)
    wait_until(lambda: not target.migrations, SECONDS_MAX)
    if groups.start >= 4:  # the hand-over of these is still open
        target.fetch_from(address, key_groups=range(4)).wait(SECONDS_MAX)
    assert content(source, target) == ALL


def test_all_that_the_peer_has_is_what_it_offered_before_too(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, address = pair(stack)
    held = Held(monkeypatch, "after")
    held.fail(target, address, key_groups=range(4))
    held.let_go()
    assert source.key_groups == (range(4, GROUPS),)
    target.fetch_from(address).wait(SECONDS_MAX)
    assert target.key_groups == (range(GROUPS),)
    assert content(target) == ALL


def test_another_base_is_not_taken_for_the_first(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, target, address = pair(stack)
    source.checkpoint(tmp_path)
    source.value("n", int).add_many(KEYS[:10], [1000] * 10)
    held = Held(monkeypatch, "after")
    held.fail(target, address, base=str(tmp_path))
    held.let_go()
    migration = target.fetch_from(address)  # without a base: what comes must not be changes to one
    migration.wait(SECONDS_MAX)
    assert not migration.is_based
    assert content(target) == ALL | {key: ALL[key] + 1000 for key in KEYS[:10]}


def test_a_source_that_was_started_anew_is_asked_anew(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, address = pair(stack)
    held = Held(monkeypatch, "after")
    held.fail(target, address)
    held.let_go()
    source.close()
    again = opened(stack)
    again.value("n", int).put_many(KEYS, range(len(KEYS)))
    again.serve(address)
    target.fetch_from(address).wait(SECONDS_MAX)
    assert content(target) == ALL


def test_what_cannot_be_taken_over_is_the_old_owners_again(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer came but could not be used, and the first attempts to give back did not arrive."""
    source, target, address = pair(stack)
    accept, tries = NewOwnerShell._accept, []

    def failing(peer: NewOwnerShell, channel: Any, *rest: Any) -> Any:
        tries.append(channel)
        if len(tries) == 1:
            channel.close()
            raise SchemaError("on purpose")
        return accept(peer, channel, *rest)

    monkeypatch.setattr(NewOwnerShell, "_accept", failing)
    with pytest.raises(SchemaError, match="on purpose"):
        target.fetch_from(address)
    assert source.key_groups == ()
    target.fetch_from(address).wait(SECONDS_MAX)
    assert content(target) == ALL


def test_a_begin_that_comes_again_after_all_was_taken_back_begins_nothing(
    stack: ExitStack,
) -> None:
    source, target, address = pair(stack)
    calls: list[Any] = []
    begin = OldOwnerShell.begin
    peer = source._as_peer()
    peer.begin = lambda call: calls.append(call) or begin(peer, call)  # type: ignore[method-assign, func-returns-value]
    migration = target.fetch_from(address, strategy="on_demand")
    migration.give_back()
    with pytest.raises(MigrationError, match="taken back"):
        begin(peer, calls[0])  # a late repetition
    assert source.key_groups == (range(GROUPS),)


def test_who_has_had_a_leaf_before_takes_it_from_one_who_was_opened_anew(stack: ExitStack) -> None:
    """It remembers epochs. The new owner, which has lost or never had them, must exceed them."""
    other = opened(stack, owned=())
    others_address = other.serve().address
    for _ in range(4):  # each time there and back makes the epochs higher
        source, target, address = pair(stack)
        target.fetch_from(address, strategy="all_at_once").wait()
        other.fetch_from(target.serve().address, strategy="all_at_once").wait()
        back = opened(stack, owned=())
        back.fetch_from(others_address, strategy="all_at_once").wait()
        assert content(back) == ALL
        source.close()
    assert content(other) == {}


def test_nothing_to_fetch_is_still_said(stack: ExitStack) -> None:
    source, target, _ = pair(stack)
    empty = opened(stack, owned=())
    with pytest.raises(ArgumentError, match="no key-groups"):
        target.fetch_from(empty.serve().address)
    assert content(source) == ALL


# ---- Many leaves


def lines_in(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What a function returns, and how many lines of statekit ran: each turn of a loop is one."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if "/statekit/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function(*args), count
    finally:
        sys.settrace(before)


def test_the_lines_that_are_run_are_counted() -> None:
    assert lines_in(sk.assign, 128, 64)[1] > 64


@pytest.mark.parametrize("has_timers", [False, True])
def test_no_step_of_beginning_is_done_leaf_by_leaf(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, has_timers: bool
) -> None:
    groups, subgroups = 16, 8192
    a = opened(stack, key_groups=groups, subgroups=subgroups)
    b = opened(stack, key_groups=groups, subgroups=subgroups, owned=())
    a.value("n", int).put_many(KEYS, range(len(KEYS)))
    if has_timers:
        a.timers("t").set(KEYS[0], 10)
    lines: dict[str, int] = {}
    begin, take_on = OldOwnerShell.begin, NewOwnerShell._begin_any

    def giving(*args: Any) -> Any:
        found, lines["giving"] = lines_in(begin, *args)
        return found

    def taking(*args: Any) -> Any:
        found, lines["taking"] = lines_in(take_on, *args)
        return found

    monkeypatch.setattr(OldOwnerShell, "begin", giving)
    monkeypatch.setattr(NewOwnerShell, "_begin_any", taking)
    peers, lines["owning"] = lines_in(lambda: (a._as_peer(), b._as_peer()))
    b.fetch_from(a.serve().address, strategy="on_demand")
    assert len(peers) == 2
    leaves = groups * subgroups
    assert sorted(lines) == ["giving", "owning", "taking"]
    assert all(found < leaves // 16 for found in lines.values()), lines
    assert b.value("n", int)[KEYS[7]] == 7


def test_timers_in_more_places_than_a_message_can_name_are_no_obstacle(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then leaves between them are fetched early, too."""
    from statekit.migration import departure

    monkeypatch.setattr(departure, "RANGES_MAX", 3)
    source, target, address = pair(stack)
    timers = source.timers("t")
    for i, key in enumerate(KEYS[:6]):
        timers.set(key, i + 1)
    target.fetch_from(address, strategy="on_demand")
    (going,) = source.migrations
    assert len(going.timer_leaves) <= 3  # type: ignore[union-attr]
    due = target.timers("t").pop_due(100)
    assert sorted(key for _, key in due) == sorted(KEYS[:6])
