"""The new owner of a hand-over has a RocksDB home, and is killed at system calls (nightly: at all).

The old owner lives in this process. Whatever the moment, the home that is left and the old owner
have each key-group once between them: what is complete at home is as of the last commit, and what
is not goes on when it is fetched again. Nothing is lost that was committed or not yet moved.
"""

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import arriving_steps
import pytest
from arriving_steps import GROUPS, HIGH, LAST, LOW, SUBGROUPS, keys_of, url_of
from harness import CLEAN, KILLED, ForkServer, Outcome
from shim import CHANGES, KILLS, Rule

import statekit as sk
from statekit.errors import MigrationError, NotOwnedError, OccupiedError

pytest.importorskip("rocksdict")

NIGHTLY = bool(os.environ.get("STATEKIT_NIGHTLY"))
POINTS = 1_000_000 if NIGHTLY else 60
SEED = int(os.environ.get("STATEKIT_SEED", "1"))
SECONDS_MAX = 120.0


@pytest.fixture
def data(place: Path) -> Path:
    directory = place / "data"
    directory.mkdir()
    return directory


@pytest.fixture
def server(library: Path, data: Path) -> Iterator[ForkServer]:
    with ForkServer(library, watch=data, prepare="arriving_steps:keys_first") as server:
        yield server


def filled() -> sk.KVProvider:
    kv = sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS)
    kv.value("n", int).put_many(keys_of(range(GROUPS)), [1] * len(keys_of(range(GROUPS))))
    return kv


def groups_of(kv: sk.KVProvider) -> set[int]:
    return {group for part in kv.key_groups for group in part}


def reopened(old: sk.KVProvider, address: str, data: Path) -> sk.KVProvider:
    """What an operator does: opens the home with what was handed over, and fetches the rest."""
    given = sorted({*HIGH} - groups_of(old))
    geometry = {"key_groups": GROUPS, "subgroups": SUBGROUPS}
    try:
        kv = sk.open(url_of(data), owned=given, **geometry)  # type: ignore[arg-type]
        if not given:
            assert not kv._recorded.arriving or old.key_groups == (range(GROUPS),)
    except NotOwnedError as error:
        if "only in part" not in str(error):
            raise
        kv = sk.open(url_of(data), owned=(), **geometry)  # type: ignore[arg-type]
    if rest := {*given} - groups_of(kv):
        kv.fetch_from(address, key_groups=rest).wait(SECONDS_MAX)
    elif given and kv._recorded.arrivals:  # all of it is at home, and the old owner is told so now
        with pytest.raises(OccupiedError):
            kv.fetch_from(address, key_groups=given)
    if left := {*HIGH} - groups_of(kv):
        # It was given back, or never taken on: then the old owner has it, or can take it back.
        for departure in old.migrations:
            with suppress(MigrationError):
                departure.abort()  # type: ignore[union-attr]
        kv.fetch_from(address, key_groups=left).wait(SECONDS_MAX)
    return kv


def check(old: sk.KVProvider, address: str, outcome: Outcome, data: Path) -> int:
    """Returns the number of the commit that the home was found at."""
    with reopened(old, address, data) as kv:
        assert groups_of(kv) == {*HIGH}
        assert groups_of(old) == {*LOW}
        numbers = kv.value("n", int, default=0)
        found = {numbers[key] for key in keys_of(HIGH)}
        assert len(found) == 1, f"parts of two commits: {found}"
        (number,) = found
        least = max([1, *outcome.acknowledged])
        most = max([1, *outcome.intended])
        assert least <= number <= most, (least, number, most)
        assert {*old.value("n", int).get_many(keys_of(LOW))} == {1}
        assert old.migrations == ()
        assert kv._recorded.arrivals == ()
        numbers.put_many(keys_of(HIGH), [99] * len(keys_of(HIGH)))
    with sk.open(url_of(data), owned=HIGH) as kv:
        assert {*kv.value("n", int).get_many(keys_of(HIGH))} == {99}
    return int(number)


@pytest.mark.parametrize("strategy", ["on_demand", "gradual"])
def test_killed_at_a_system_call_each_leaf_has_one_owner(
    server: ForkServer, data: Path, strategy: str
) -> None:
    def run(*rules: Rule) -> tuple[Outcome, int]:
        shutil.rmtree(data)
        data.mkdir()
        with filled() as old:
            address = old.serve().address
            outcome = server.run(
                "arriving_steps:take_over",
                directory=str(data),
                address=address,
                strategy=strategy,
                rules=rules,
            )
            try:
                return outcome, check(old, address, outcome, data)
            except BaseException as error:
                error.add_note(f"{rules}: told {outcome.acknowledged}, {outcome.trace}")
                raise

    clean, number = run()
    assert clean.status == CLEAN, clean.trace
    assert number == LAST
    print("STATEKIT_SEED =", SEED)
    chance = random.Random(SEED)
    points = [(nth, action) for nth in range(1, clean.count(CHANGES) + 1) for action in KILLS]
    if len(points) > POINTS:
        points = chance.sample(points, POINTS)
    seen = []
    for nth, action in sorted(points):
        outcome, number = run(Rule(nth, action))
        assert outcome.status in (KILLED, CLEAN), (nth, action, outcome.trace)
        seen.append((outcome.status, number))
    print(f"{len(seen)} kills of {clean.count(CHANGES)} calls; commits {sorted({*seen})}")
    assert {status for status, _ in seen} >= {KILLED}
    assert len({number for _, number in seen}) > 1


def test_the_steps_touch_and_commit_while_leaves_are_coming() -> None:
    assert len(arriving_steps.keys_of(HIGH)) > 4 * SUBGROUPS
