"""Sources: which leaf comes from where, and who lets go of what."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from statekit.residence.sources import PullSource, PushSource, Sources


class Pull(PullSource):
    """Leaves that say where they are from."""

    def __init__(self, name: bytes) -> None:
        super().__init__()
        self.name = name
        self.is_closed = False

    def read_leaf(self, leaf: int) -> list[bytes]:
        return [self.name]

    def _close(self) -> None:
        self.is_closed = True


class Push(PushSource):
    """A process that is asked, and does nothing."""

    advice = ""
    is_settled = True
    is_ended = False
    next_due = None

    def __init__(self, name: bytes) -> None:
        self.kept = Pull(name)
        self.releases = 0

    def bring(self, leaves: Sequence[int], loading: Any) -> None: ...
    def bring_keys(self, leaves: Sequence[int], wanted: Any, loading: Any) -> None: ...
    def bring_timers(self, watermark: int, loading: Any) -> None: ...
    def taken(self, leaf: int, steps: Any) -> None: ...

    def expects(self, leaf: int) -> bool:
        return True

    def wait_here(self, timeout: float | None) -> bool:
        return True

    def to_read(self) -> PullSource:
        return self.kept

    def attaching(self) -> AbstractContextManager[bool]:
        return nullcontext(False)

    def release(self) -> None:
        self.releases += 1


def test_a_leaf_comes_from_the_process_that_handed_it_over_last() -> None:
    first, second, pull = Push(b"1"), Push(b"2"), Pull(b"p")
    sources = Sources(pull).with_push(first, range(4)).with_push(second, range(2, 6))
    assert [sources.push_of(leaf) for leaf in range(7)] == [first] * 2 + [second] * 4 + [None]
    assert sources.by_push([6, 5, 0, 3]) == {second: [5, 3], first: [0]}
    assert sources.has_push
    assert not Sources(pull).has_push


def test_hand_overs_that_are_done_are_let_go_of_once_when_another_comes() -> None:
    done, lasting, new = Push(b"1"), Push(b"2"), Push(b"3")
    before = Sources(None).with_push(lasting, [0]).with_push(done, [1])
    done.is_ended = True
    after = before.with_push(new, [2])
    assert after.pushes == [new, lasting]
    after.release()
    assert [push.releases for push in (done, lasting, new)] == [1, 1, 1]


def test_a_checkpoint_reads_each_leaf_where_it_comes_from() -> None:
    push, pull = Push(b"1"), Pull(b"p")
    reading = Sources(pull).with_push(push, [3]).to_read()
    assert [reading.read_leaf(leaf) for leaf in (2, 3)] == [[b"p"], [b"1"]]
    pull.release()  # the provider is done with it
    assert not pull.is_closed
    reading.release()
    assert pull.is_closed
    assert push.kept.is_closed
    assert push.releases == 0  # a checkpoint that is done ends no hand-over


def test_a_leaf_that_comes_from_nowhere_is_not_read_as_an_empty_one() -> None:
    reading = Sources(None).with_push(Push(b"1"), [3]).to_read()
    with pytest.raises(AssertionError, match="leaf 2 comes from nowhere"):
        reading.read_leaf(2)


def test_two_providers_are_one_only_over_the_same_checkpoint_and_without_processes() -> None:
    pull = Pull(b"p")
    assert Sources(pull).is_one_with(Sources(pull))
    assert not Sources(pull).is_one_with(Sources(Pull(b"p")))
    assert not Sources(pull).is_one_with(Sources(pull).with_push(Push(b"1"), [0]))
