"""Row 12: the source or the target is killed (SIGKILL) before and after each kind of message.

The proxy holds the call at the message, then the process is killed. What must be true after it:

    target dead   the source goes on when it is told so: with everything it had not let go of, as it
                  was when handed over. What it had let go of comes from the last checkpoint.
    the same, with a home   it is opened again: what is complete there is there, with every write
                  that was acknowledged; the rest comes from the source when it is fetched again.
    source dead   what had come stays usable at the target. For what had not come, PeerLostError
                  names leaf and peer.
    either        a restart from the last checkpoint in a new generation, and a replay of all writes
                  acknowledged since, gives exact counts. Survivors of the old generation are
                  fenced.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import migration_cases as cases
import pytest
from migration_cases import TIMEOUT_S, Case, Side, keys_of, leaf_of
from migration_worker import KEY_GROUPS, SECONDS_MAX, Gone, Nursery
from proxy import Direction, Fault, Rule

from statekit.errors import (
    FencedError,
    MigrationError,
    NotOwnedError,
    OccupiedError,
    PeerLostError,
    StateKitError,
)

REQUEST, REPLY = Direction
AT_ONCE = 3
#: The messages of each migration. A message is listed at the first migration that has it.
METHODS = {
    "on_demand": ("Hello", "Begin", "Fetch", "FetchLong", "Pick", "Installed", "GiveBack"),
    "stream": ("Stream",),
    "proposed": ("Propose",),
    "seamless": ("Shade", "Copy", "Begin"),
}
POINTS = [
    (name, method, direction, fault)
    for name, methods in METHODS.items()
    for method in methods
    for direction in Direction
    for fault in (Fault.HOLD, Fault.HOLD_AFTER)
]
ALL = [*range(KEY_GROUPS)]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


class Killing:
    """One migration that is cut short by a kill."""

    def __init__(
        self, nursery: Nursery, place: Path, name: str, seed: int, with_home: bool = False
    ) -> None:
        self._nursery = nursery
        memory = "64MiB" if name == "seamless" else "1MiB"  # a shadow must fit into it
        self.home = f"rocksdb:{place}/home?memory={memory}&sync=0" if with_home else "memory:"
        self.case = Case(
            nursery.worker(),
            nursery.worker(),
            seed,
            large=True,
            quiet=name == "on_demand",
            home=self.home,
        )
        self.place = str(place)
        self.name = name
        self.saved: dict[int, int] = {}

    def save(self) -> None:
        """A checkpoint of both sides, while nobody writes; the oracle notes what is in it."""
        case = self.case
        case.writers.rest()
        case.source("checkpoint", f"{self.place}/source")
        case.target("checkpoint", f"{self.place}/target")
        self.saved = dict(case.oracle.counts)
        case.write_again()

    def kill_at(self, victim: str, method: str, direction: Direction, fault: Fault) -> None:
        """Runs until that message, kills, and returns when the migration has given up."""
        case = self.case
        proxy = case.to_target if method == "Propose" else case.to_source
        rule = proxy.arm(Rule(fault, 1, method, direction))
        case.patience = 4 * TIMEOUT_S
        case.may_give_up.clear()  # on a busy machine the message may come only after several tries
        with ThreadPoolExecutor(1) as pool:
            migration = pool.submit(cases.KILLED[self.name], case)
            try:
                assert rule.wait_reached(), rule
            finally:
                case.may_give_up.set()
            side = case.source if victim == "source" else case.target
            side.process.kill()
            case.writers.lose(side)
            rule.release.set()
            # Waits until a late request has arrived, and everything that was sent again before the
            # kill.
            assert rule.wait_over(), rule
            assert proxy.wait_answered()
            with suppress(StateKitError, Gone, TimeoutError):
                migration.result()

    def reopen(self, groups: list[int]) -> Side:
        """A new worker with the home of the target: with key-groups of it, if they are whole."""
        side = Side("reopened", self._nursery.worker())
        try:
            side.open([*groups, KEY_GROUPS - 1], self.home)
        except NotOwnedError as error:
            if "only in part" not in str(error):
                raise
            side.open([KEY_GROUPS - 1], self.home)
        return side

    def restart(self, groups: list[int], generation: int) -> Side:
        """A new worker with key-groups of the last checkpoint; then what came since, again."""
        side = Side("restarted", self._nursery.worker())
        first = [group for group in groups if group != KEY_GROUPS - 1]
        parts = [f"{self.place}/source"] if first else []
        if KEY_GROUPS - 1 in groups:
            parts.append(f"{self.place}/target")
        side.restore(parts, groups, generation)
        keys = keys_of(groups)
        counts = self.case.oracle.counts
        assert side("get", keys) == [self.saved[key] for key in keys]
        for key in keys:
            for expected in range(self.saved[key] + 1, counts[key] + 1):
                assert side("add", key)[0] == expected
        return side

    def close(self) -> None:
        self.case.close()
        for side in (self.case.source, self.case.target):
            side.process.close()


def check_common(killing: Killing) -> None:
    case = killing.case
    case.writers.rest()
    assert not case.oracle.wrong, case.oracle.wrong
    case.check_single()


def after_target_died(killing: Killing) -> None:
    case, source = killing.case, killing.case.source
    case.writers.rest()
    source("abort_all")
    mine = source("groups")
    # Keys that are there go on from the hand-over, or from the last write at the source.
    for key in keys_of(mine):
        last = case.oracle.count_at("source", key)
        assert source("get", [key]) == [last], f"key {key} of {mine}"
        assert source("add", key)[0] == last + 1
    # Keys that are not there are refused. A key-group is lost as a whole or not at all.
    lost = [group for group in ALL if group not in mine]
    for key in keys_of(lost):
        with pytest.raises(NotOwnedError):
            source("add", key)
    assert source("moving") == []
    # They come from the checkpoint. Their new owner has other key-groups than the source, so the
    # generation stays the same.
    side = killing.restart(lost, 0)
    assert sorted(mine + side("groups")) == ALL
    # And all can be brought together again.
    arrival = side("fetch", source.address, mine, "prioritised", SECONDS_MAX)
    side("wait", arrival, SECONDS_MAX)
    source("wait_all", SECONDS_MAX)
    for key in keys_of(mine):
        assert side("get", [key]) == [case.oracle.count_at("source", key) + 1]
    if case.LARGE in mine or case.LARGE in lost:
        case.check_blobs(side)
    side.process.close()


def after_target_with_home_died(killing: Killing) -> None:
    case, source = killing.case, killing.case.source
    case.writers.rest()
    mine = source("groups")
    side = killing.reopen([group for group in ALL[:-1] if group not in mine])
    for group in ALL[:-1]:
        if group in mine or group in side("groups"):
            continue
        try:
            side("fetch", source.address, [group], "prioritised", SECONDS_MAX)
        except MigrationError:  # it was given back, which the source does not know
            source("take_back_all")
            side("fetch", source.address, [group], "prioritised", SECONDS_MAX)
    for group in side("held"):
        with suppress(OccupiedError):  # so it is told
            side("fetch", source.address, [group], "prioritised", SECONDS_MAX)
    side("wait_all", SECONDS_MAX)
    source("wait_all", SECONDS_MAX)
    assert source("groups") == mine
    assert side("groups") == [group for group in ALL if group not in mine]
    oracle = case.oracle
    for one, groups in ((source, mine), (side, side("groups"))):
        for key in keys_of(groups):
            (count,) = one("get", [key])
            least = oracle.counts[key]
            assert least <= count <= least + oracle.unknown.get(key, 0), (one, key, count, least)
    case.check_blobs(source if case.LARGE in mine else side)
    for key in keys_of(mine):
        with pytest.raises(NotOwnedError):
            side("add", key)
    side.process.close()


def check_lost(error: PeerLostError, key: int, address: str) -> None:
    leaf = leaf_of(key)
    assert (error.leaf, error.peer) == (leaf, address)
    assert f"leaf {leaf} " in str(error)
    assert address in str(error)


def after_source_died(killing: Killing) -> None:
    case, target = killing.case, killing.case.target
    case.writers.rest()
    mine = target("groups")
    absent: set[int] = set()  # leaves
    for key in keys_of(mine):
        if leaf_of(key) in absent:
            continue
        try:
            count = target("add", key)[0]
        except PeerLostError as error:
            check_lost(error, key, case.to_source.address)
            absent.add(leaf_of(key))
        except NotOwnedError as error:  # the source had taken it back and said so before it died
            if "not this provider's any more" not in str(error):
                raise
        else:
            assert count == case.oracle.counts[key] + 1
            case.oracle.counts[key] = count
    for key in keys_of(group for group in ALL if group not in mine):
        with pytest.raises(NotOwnedError):
            target("add", key)
    # Everything from the checkpoints, in a new generation; increments of the dead are replayed.
    side = killing.restart(ALL, 1)
    target("fence", 1)
    for key in keys_of(mine):
        with pytest.raises((NotOwnedError, FencedError)):
            target("add", key)
    assert target("groups") == []
    with pytest.raises((FencedError, MigrationError, NotOwnedError)):
        target("fetch", side.address, [0], "on_demand", TIMEOUT_S)
    assert side("groups") == ALL
    assert side("get", keys_of(ALL)) == [case.oracle.counts[key] for key in keys_of(ALL)]
    case.check_blobs(side)
    side.process.close()


@pytest.mark.parametrize("with_home", [False, True], ids=["memory", "home"])
@pytest.mark.parametrize("victim", ["target", "source"])
@pytest.mark.parametrize("name", METHODS)
def test_killed_before_and_after_each_message(
    name: str, victim: str, with_home: bool, nursery: Nursery, place: Path
) -> None:
    if with_home:
        pytest.importorskip("rocksdict")
    after = {
        ("target", False): after_target_died,
        ("target", True): after_target_with_home_died,
    }.get((victim, with_home), after_source_died)

    def run(at: int, method: str, direction: Direction, fault: Fault) -> str:
        here = place / str(at)
        here.mkdir()
        killing = Killing(nursery, here, name, at, with_home)
        try:
            killing.save()
            killing.kill_at(victim, method, direction, fault)
            check_common(killing)
            after(killing)
        except Exception as error:
            return f"{victim} killed at {fault} {method} {direction}: {error!r}"
        finally:
            killing.close()
        return ""

    chosen = [point[1:] for point in POINTS if point[0] == name]
    if with_home:  # where leaves move in as wholes, and entries are never asked for
        chosen = [point for point in chosen if point[0] != "Pick"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = [*pool.map(run, itertools.count(), *zip(*chosen, strict=True))]
    wrong = [result for result in results if result]
    assert not wrong, f"{len(wrong)} of {len(chosen)}:\n" + "\n".join(wrong)
