"""Everything that the participant asks for is carried out: the shell drops no action."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
from remote_util import wait_until

import statekit as sk
from statekit.migration.peer import Peer
from statekit.migration.shell import EFFECTS, SEEN_TO, Shell
from statekit.protocol.messages import (
    Action,
    AddToPart,
    Drop,
    Expect,
    Fence,
    Install,
    Lost,
    Reopen,
    Restore,
    Send,
    Serve,
    Shut,
    TakeBack,
    Unexpect,
    WritePart,
)
from statekit.protocol.participant import Participant

SECONDS_MAX = 120.0
KEYS = [f"k{i}" for i in range(500)]
#: Methods of the participant that return actions.
ASKED = (
    *("on", "own", "fence", "take", "declare_dead"),
    *("begin", "abort", "make_way", "taken_back", "send"),
    *("ask", "unask", "want", "give_back", "decline", "open_stream", "stream_ended", "received"),
    *("unreported", "unreturned", "uncompleted"),
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, **options: Any) -> sk.KVProvider:
    return stack.enter_context(sk.open("memory:", key_groups=4, subgroups=2, **options))


def test_somebody_sees_to_every_action_that_there_is() -> None:
    assert {Send, *EFFECTS, *SEEN_TO} == set(get_args(Action))
    assert not SEEN_TO & EFFECTS.keys()
    for name in EFFECTS.values():
        assert callable(getattr(Peer, name))


@pytest.mark.parametrize("kind", sorted(SEEN_TO, key=str))
def test_an_action_that_its_caller_does_not_see_to_is_an_error(stack: ExitStack, kind: Any) -> None:
    peer = opened(stack)._as_peer()
    action = kind(*[0] * len(kind._fields))
    with pytest.raises(AssertionError, match=kind.__name__):
        peer._carry_out([action])
    assert peer._carry_out([action], kind) == []


def test_an_action_that_nobody_has_heard_of_is_an_error(stack: ExitStack) -> None:
    class Dance(tuple[int]):
        pass

    with pytest.raises(AssertionError, match="nobody carries out"):
        opened(stack)._as_peer()._carry_out([Dance((1,))])  # type: ignore[list-item]


class Recorder:
    """What participants have asked for, and what their shells have carried out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # By type, too: an action is a tuple, and equal to other actions with the same fields.
        self.asked: Counter[tuple[type, Action]] = Counter()
        self.taken: Counter[tuple[type, Action]] = Counter()
        for name in ASKED:
            monkeypatch.setattr(Participant, name, self._listening(getattr(Participant, name)))
        carry_out = Shell._carry_out

        def taking(peer: Shell, actions: Any, *seen_to: type) -> Any:
            actions = list(actions)
            self.taken.update((type(action), action) for action in actions)
            return carry_out(peer, actions, *seen_to)

        monkeypatch.setattr(Shell, "_carry_out", taking)
        self._depth = threading.local()

    def _listening(self, method: Any) -> Any:
        def ask(*arguments: Any, **named: Any) -> Any:
            depth = getattr(self._depth, "now", 0)
            self._depth.now = depth + 1  # methods call each other: on() calls begin(), say
            try:
                found = method(*arguments, **named)
            finally:
                self._depth.now = depth
            if not depth:
                actions = found[0] if isinstance(found, tuple) else found
                self.asked.update((type(action), action) for action in actions)
            return found

        return ask


def test_all_that_participants_ask_for_in_hand_overs_is_taken_on(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    a, b = opened(stack), opened(stack, owned=())
    a.value("n", int).put_many(KEYS, range(len(KEYS)))
    here, there = a.serve().address, b.serve().address
    b.fetch_from(here, key_groups=[0, 1]).wait(SECONDS_MAX)
    a.fetch_from(there, key_groups=[0], strategy="on_demand").wait(SECONDS_MAX)
    migration = b.fetch_from(here, key_groups=[0, 2], strategy="on_demand")
    b.value("n", int)[next(key for key in KEYS if a.key_group_of(key) == 2)]
    a.checkpoint(tmp_path / "a", barrier=1)
    assert migration.give_back() == (range(1),)
    (job,) = a.late_parts(1)
    job.wait(SECONDS_MAX)
    again = b.fetch_from(here, key_groups=[0], strategy="on_demand")
    (departure,) = (one for one in a.migrations if one.id == again.id)
    departure.abort()
    again.wait(SECONDS_MAX)  # the target learns that it was taken back
    migration.wait(SECONDS_MAX)
    back = a.fetch_from(there, key_groups=[1], strategy="on_demand")
    back.abandon()
    b.fetch_from(here, key_groups=[3], strategy="on_demand")
    a.migrations[0].abort(target_is_dead=True)
    b.fence(3)
    kinds = {kind for kind, _ in recorder.asked}
    wanted = {AddToPart, Drop, Expect, Fence, Install, Reopen, Send, Serve, Shut, TakeBack}
    assert kinds >= wanted | {Unexpect, WritePart}
    assert not kinds & {Lost, Restore}
    # Threads that report what has come may be between asking and doing. Serve is read out later.
    wait_until(lambda: {kind for kind, _ in recorder.asked - recorder.taken} <= {Serve})
