"""The old owner of a hand-over has a RocksDB home, and is killed at system calls (nightly: at all).

The new owner is in the same process: in memory, or with a home of its own, and is killed with it.
Afterwards no key-group has two owners: a key-group that the new owner was told it may use does not
belong to the home any more, and one that came back does. And the home has what was last flushed.
"""

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from harness import CLEAN, KILLED, ForkServer, Outcome
from migration_home_steps import GROUPS, HIGH, LOW, keys_of, url_of
from shim import CHANGES, KILLS, Rule

import statekit as sk
from statekit.errors import NotOwnedError

pytest.importorskip("rocksdict")

NIGHTLY = bool(os.environ.get("STATEKIT_NIGHTLY"))
POINTS = 1_000_000 if NIGHTLY else 40
SEED = int(os.environ.get("STATEKIT_SEED", "1"))


@pytest.fixture
def data(place: Path) -> Path:
    directory = place / "data"
    directory.mkdir()
    return directory


@pytest.fixture
def server(library: Path, data: Path) -> Iterator[ForkServer]:
    with ForkServer(library, watch=data, prepare="migration_home_steps:keys_first") as server:
        yield server


def run(server: ForkServer, data: Path, with_home: bool, *rules: Rule) -> Outcome:
    shutil.rmtree(data)
    data.mkdir()
    step = "migration_home_steps:hand_over"
    return server.run(step, directory=str(data), with_home=with_home, rules=rules)


def numbers_of(outcome: Outcome, groups: range) -> tuple[int, int]:
    """The least and the greatest number that keys of some key-groups may have: the one that was
    flushed, or the one that was being flushed.
    """
    safe = [one[1] for one in outcome.acknowledged if covers(one, groups)]
    meant = [one[1] for one in outcome.intended if covers(one, groups)]
    return max(safe, default=0), max(meant, default=0)


def covers(told: object, groups: range) -> bool:
    return isinstance(told, tuple) and {*groups} <= {*told[0]}


def check(outcome: Outcome, data: Path) -> None:
    told, meant = outcome.acknowledged, outcome.intended
    if not meant:
        return  # it had no state yet
    with sk.open(url_of(data), key_groups=GROUPS, subgroups=1) as kv:
        owned = {group for part in kv.key_groups for group in part}
        check_other(outcome, data, owned)
        assert owned in ({*LOW}, {*range(GROUPS)}), owned
        if "given" not in meant or "back" in told:
            assert owned == {*range(GROUPS)}, "it owns what is its own"
        if "given" in told and "back" not in meant:
            assert owned == {*LOW}, "the new owner has the rest"
        numbers = kv.value("n", int, default=0)
        least, most = numbers_of(outcome, LOW)
        assert all(least <= numbers[key] <= most for key in keys_of(LOW))
        if owned != {*LOW}:
            least, most = numbers_of(outcome, HIGH)
            if "back" in meant and "given" in told:  # with what the new owner did
                least, most = max(least, 2), max(most, 2)
            assert all(least <= numbers[key] <= most for key in keys_of(HIGH))
    if owned == {*LOW}:
        if "there" in meant and (data / "other").exists():
            return  # to reclaim it would be wrong: the new owner has a home, and is not gone
        with ExitStack() as stack:
            stack.enter_context(
                suppress(NotOwnedError)
            )  # it is not all there any more, and says so
            back = stack.enter_context(sk.open(url_of(data), reclaim=True))
            found = {back.value("n", int, default=0)[key] for key in keys_of(HIGH)}
            assert found == {1}, "as it was at the last flush before it was handed over"


def check_other(outcome: Outcome, data: Path, at_first: set[int]) -> None:
    """The new owner's home has what is not the old one's; at_first: what that has."""
    told, meant = outcome.acknowledged, outcome.intended
    if not (data / "other" / "STATEKIT").exists():
        return
    with sk.open(url_of(data, "other"), key_groups=GROUPS, subgroups=1) as kv:
        owned = {group for part in kv.key_groups for group in part}
        found = dict(kv.value("n", int).items())
    if at_first >= {*HIGH}:
        assert not found, "the old owner has it"
    elif owned >= {*HIGH} and found:
        assert set(found) == {*keys_of(HIGH)}, "a key-group is there as a whole or not at all"
        least, most = (2 if "there" in told else 1), (2 if "there" in meant else 1)
        assert all(least <= number <= most for number in found.values()), found
    if "there" in told and "back" not in meant:
        assert found, "it was flushed there"


@pytest.mark.parametrize("with_home", [False, True])
def test_killed_at_a_system_call_nothing_is_owned_twice(
    server: ForkServer, data: Path, with_home: bool
) -> None:
    clean = run(server, data, with_home)
    assert clean.status == CLEAN, clean.trace
    assert clean.intended == clean.acknowledged
    check(clean, data)
    print("STATEKIT_SEED =", SEED)
    chance = random.Random(SEED)
    points = [(nth, action) for nth in range(1, clean.count(CHANGES) + 1) for action in KILLS]
    if len(points) > POINTS:
        points = chance.sample(points, POINTS)
    killed = 0
    for nth, action in sorted(points):
        outcome = run(server, data, with_home, Rule(nth, action))
        assert outcome.status in (KILLED, CLEAN), (nth, action, outcome.trace)
        killed += outcome.status == KILLED
        try:
            check(outcome, data)
        except Exception as error:
            error.add_note(f"killed at call {nth} ({action.name}); told {outcome.acknowledged}")
            raise
    assert killed, "RocksDB's threads may do less in one run, but not always"
