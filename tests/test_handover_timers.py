"""Timers while their leaves are handed over, against a plain set of (due, key).

With the offer comes when the first timer of each leaf is due. So timers fire on time, and in order,
without any leaf that has none that are due.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import statekit as sk
from statekit.migration import old_owner
from statekit.native.timers import TimersState

KEYS = [f"k{i}" for i in range(60)]
LAST = 2**63 - 1
SIZE: Any = {"key_groups": 16, "subgroups": 4}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(stack: ExitStack, url: str = "memory:") -> tuple[sk.KVProvider, sk.KVProvider]:
    old = stack.enter_context(sk.open("memory:", **SIZE))
    return old, stack.enter_context(sk.open(url, owned=(), **SIZE))


@pytest.mark.parametrize("home", ["memory", "rocksdb"])
@pytest.mark.parametrize("seed", range(8))
def test_timers_are_a_set_while_they_are_handed_over(
    stack: ExitStack, tmp_path: Path, home: str, seed: int
) -> None:
    rng = random.Random(seed)
    old, new = pair(stack, "memory:" if home == "memory" else f"rocksdb:{tmp_path}/db?memory=1MiB")
    model: set[tuple[int, str]] = set()
    times = [1 - 2**63, -7, 0, *range(20, 90), LAST]

    def work(timers: Any, count: int) -> None:
        for _ in range(count):
            key, due = rng.choice(KEYS), rng.choice(times)
            match rng.choice(["set", "set", "cancel", "cancel all", "move", "get", "pop", "next"]):
                case "set":
                    timers.set(key, due)
                    model.add((due, key))
                case "cancel":
                    assert timers.cancel(key, due) == ((due, key) in model), seed
                    model.discard((due, key))
                case "cancel all":
                    assert timers.cancel(key) == any(one[1] == key for one in model), seed
                    model.difference_update([one for one in model if one[1] == key])
                case "move":
                    timers.move(key, due)
                    model.difference_update([one for one in model if one[1] == key])
                    model.add((due, key))
                case "get":
                    assert timers[key] == tuple(sorted(d for d, k in model if k == key)), seed
                case "next":
                    assert timers.next_due == min((d for d, _ in model), default=None), seed
                case "pop":
                    due = min(due, rng.choice([15, 30, 60, LAST]))
                    limit = rng.choice([None, None, 2])
                    expected = sorted(one for one in model if one[0] <= due)[:limit]
                    assert timers.pop_due(due, limit) == expected, seed
                    model.difference_update(expected)

    old_timers = old.timers("t")
    for key in KEYS:
        old_timers.set(key, due := rng.choice(times))
        model.add((due, key))
    work(old_timers, rng.choice([0, 30]))
    other = old.timers("u")  # whose timers are due earlier than those of the first
    other.set("x", -100)
    strategy = rng.choice(["on_demand", "prioritised", "order_unaware"])
    arrival = new.fetch_from(old.serve().address, strategy=strategy)  # type: ignore[call-overload]
    work(new.timers("t"), 80)
    assert new.timers("u").next_due == -100
    arrival.wait(120)
    work(new.timers("t"), 30)
    assert new.timers("t").pop_due(LAST) == sorted(model), seed


def test_only_leaves_with_due_timers_are_fetched(stack: ExitStack) -> None:
    old, new = pair(stack)
    timers = old.timers("t")
    for i in range(1000):
        timers.set(f"k{i}", 1000 + i)
    arrival = new.fetch_from(old.serve().address, strategy="on_demand")
    came = new.timers("t")
    assert came.pop_due(999) == []
    assert arrival.progress.leaves_done == 0
    assert came.next_due == 1000
    assert arrival.progress.leaves_done == 1
    assert came.pop_due(1002) == [(1000, "k0"), (1001, "k1"), (1002, "k2")]
    assert arrival.progress.leaves_done <= 3
    assert came.pop_due(1020) == [(1000 + i, f"k{i}") for i in range(3, 21)]
    assert arrival.progress.leaves_done < arrival.progress.leaves_total
    assert came.pop_due(LAST) == [(1000 + i, f"k{i}") for i in range(21, 1000)]


def test_timers_that_have_fired_are_not_waited_for(stack: ExitStack) -> None:
    """What a leaf is said to be due at follows what is left in it."""
    old, new = pair(stack)
    timers = old.timers("t")
    for key in KEYS:
        timers.set(key, 10)
        timers.set(key, 100)
    assert len(timers.pop_due(10)) == len(KEYS)
    arrival = new.fetch_from(old.serve().address, strategy="on_demand")
    assert new.timers("t").pop_due(99) == []
    assert arrival.progress.leaves_done == 0


def test_timers_of_a_restored_owner_are_known_too(stack: ExitStack, tmp_path: Path) -> None:
    """They came in blocks: nobody has looked at them yet."""
    old, new = pair(stack)
    for i, key in enumerate(KEYS):
        old.timers("t").set(key, 100 + i)
    old.checkpoint(str(tmp_path))
    again = stack.enter_context(sk.restore(str(tmp_path), lazy=False))
    arrival = new.fetch_from(again.serve().address, strategy="on_demand")
    assert new.timers("t").pop_due(100) == [(100, KEYS[0])]
    assert arrival.progress.leaves_done == 1


def test_an_old_owner_that_does_not_tell_has_all_leaves_with_timers_fetched(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = old_owner.OldOwnerShell._answer_begin

    def silent(self: Any, *args: Any) -> Any:
        reply = answer(self, *args)
        return reply._replace(timer_dues=reply.timer_dues[:0])

    monkeypatch.setattr(old_owner.OldOwnerShell, "_answer_begin", silent)
    old, new = pair(stack)
    for key in KEYS:
        old.timers("t").set(key, 100)
    arrival = new.fetch_from(old.serve().address, strategy="on_demand")
    assert new.timers("t").pop_due(99) == []
    (raw,) = old._residence.store.states()
    leaves = {raw.leaf_of_encoded(key.encode()) for key in KEYS}
    assert arrival.progress.leaves_done == len(leaves)


def test_mutant_that_tells_times_that_are_too_late_is_caught(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = TimersState.lower_dues

    def late(self: TimersState, dues: Any) -> None:
        lower(self, dues)
        for leaf, due in enumerate(dues):
            dues[leaf] = min(due + 1, LAST)

    monkeypatch.setattr(TimersState, "lower_dues", late)

    def all_seeds() -> None:
        for seed in range(8):
            test_timers_are_a_set_while_they_are_handed_over(stack, tmp_path, "memory", seed)

    with pytest.raises(AssertionError):
        all_seeds()


def test_next_due_sees_a_leaf_that_comes_while_it_looks(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random lives found it: what was to come had come, after the look at what is here."""
    old, new = pair(stack)
    old.timers("t").set(KEYS[0], 44)
    new.fetch_from(old.serve().address, strategy="on_demand")
    theirs = new.timers("t")
    other = next(key for key in KEYS if new.key_group_of(key) != new.key_group_of(KEYS[0]))
    theirs.set(other, 49)
    kind = type(new._residence)
    asked = kind.next_due_elsewhere.fget
    assert asked is not None

    def come_first(residence: Any) -> int | None:
        residence.bring_timers(LAST)
        return asked(residence)

    monkeypatch.setattr(kind, "next_due_elsewhere", property(come_first))
    assert theirs.next_due == 44
