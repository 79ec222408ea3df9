"""A case of the migration tests: two workers, writers that never rest, and what must be true.

    writers ──> source worker  <── Proxy <── target worker <── writers
                     └────────> Proxy ──────────┘                (only Propose goes that way)

Each writer has keys of its own and sends one increment after the other, to the worker that it
believes to own the key; now and then to the other one, which must refuse it. So the oracle is
simple, and outside of the system: the increments of a key that were acknowledged have returned 1,
2, 3, ... without gap or repeat. An increment whose worker was killed meanwhile is *unknown*.

Single ownership is proven from the times of the acknowledged writes. Take the longest chain of
writes to a key-group in which each write is at the other worker than the write before it, and began
after that write had ended. It must not have more links than the key-group has changed hands.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from migration_worker import KEY_GROUPS, SECONDS_MAX, SUBGROUPS, Gone, Process
from proxy import Proxy

from statekit import errors
from statekit.keys import key_codec
from statekit.native.columns import route

TIMEOUT_S = 0.25  # of calls between workers: most faults cost this much, once
KEYS_PER_LEAF = 2
PACE_SECONDS = 0.002  # between the increments of a writer: these tests are not about speed
BLOB_BYTES = 288 << 10
PATIENCE_SECONDS = SECONDS_MAX  # of users: what is not done by then will never be done
BLOBS = 4  # in one leaf: more than a megabyte
PROBE_SHARE = 0.15  # of increments go to the worker that should refuse them

#: Errors that a user gets while a peer cannot be reached, and after which the user tries again.
PASSING = (errors.PeerError, errors.MigrationError, errors.DamagedError, TimeoutError)

_numbers = itertools.count()


@cache
def keys_of_leaves() -> tuple[tuple[int, ...], ...]:
    """KEYS_PER_LEAF keys of each leaf."""
    leaves = KEY_GROUPS * SUBGROUPS
    found: list[list[int]] = [[] for _ in range(leaves)]
    for key in itertools.count():
        (leaf,) = route([key], key_codec(int), leaves).tolist()
        if len(found[leaf]) < KEYS_PER_LEAF:
            found[leaf].append(key)
        if all(len(keys) == KEYS_PER_LEAF for keys in found):
            return tuple(map(tuple, found))
    raise AssertionError


def keys_of(groups: Iterable[int]) -> list[int]:
    leaves = keys_of_leaves()
    return [
        key
        for group in groups
        for leaf in range(group * SUBGROUPS, (group + 1) * SUBGROUPS)
        for key in leaves[leaf]
    ]


def group_of(key: int) -> int:
    return leaf_of(key) // SUBGROUPS


@cache
def leaf_of(key: int) -> int:
    return next(leaf for leaf, keys in enumerate(keys_of_leaves()) if key in keys)


class Side:
    """A node of a worker, by name."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.node = f"{name}-{next(_numbers)}"
        self.address = ""

    def open(self, owned: Sequence[int], home: str = "memory:") -> None:
        self.address = self.process.call(None, "open", self.node, owned, home)

    def restore(self, place: str, owned: Sequence[int], generation: int) -> None:
        self.address = self.process.call(None, "restore", self.node, place, owned, generation)

    def __call__(self, name: str, *args: Any) -> Any:
        return self.process.call(self.node, name, *args)

    def close(self) -> None:
        self.process.call(None, "forget", self.node)

    def __repr__(self) -> str:
        return self.name


class Write(NamedTuple):
    """A write that was acknowledged."""

    side: str
    key: int
    count: int
    began: float
    ended: float


def chain_of(writes: Iterable[Write]) -> int:
    """How many changes of owner the times of writes prove; see above."""
    by_end = sorted(writes, key=lambda write: write.ended)
    longest = 0
    for first in {write.side for write in by_end}:
        side, ended, links = first, float("-inf"), -1
        is_first = True
        for write in by_end:
            wanted = write.side == first if is_first else write.side != side
            if wanted and write.began > ended:
                side, ended, links = write.side, write.ended, links + 1
                is_first = False
        longest = max(longest, links)
    return longest


class Oracle:
    """What was acknowledged, by key."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.unknown: dict[int, int] = {}  # increments whose worker was killed
        self.writes: list[Write] = []
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def preloaded(self, keys: Iterable[int]) -> None:
        self.counts.update(dict.fromkeys(keys, 1))

    def acknowledged(self, side: str, key: int, result: tuple[int, float, float]) -> None:
        count, began, ended = result
        with self.lock:
            due = self.counts.get(key, 0) + 1
            if count != due:
                self.wrong.append(
                    f"key {key} of group {group_of(key)} at {side}: {count}, not {due}"
                )
            self.counts[key] = count
            self.writes.append(Write(side, key, count, began, ended))

    def is_unknown(self, key: int) -> None:
        with self.lock:
            self.unknown[key] = self.unknown.get(key, 0) + 1

    def count_at(self, side: str, key: int) -> int:
        """The last count that this side acknowledged."""
        with self.lock:
            counts = [
                write.count for write in self.writes if (write.side, write.key) == (side, key)
            ]
        return max(counts, default=1)


class Writers:
    """Threads that increment keys until they are told to rest."""

    def __init__(
        self, oracle: Oracle, sides: Sequence[Side], keys: Sequence[int], seed: int
    ) -> None:
        self._oracle = oracle
        self._sides = list(sides)
        self._rest = threading.Event()
        self._believed: dict[int, Side] = {}
        self._moved = threading.Condition()
        self._done: dict[str, int] = {}  # acknowledged, by side
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(keys[at::2], random.Random(seed + at)))
            for at in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, keys: Sequence[int], chance: random.Random) -> None:
        try:
            for key in itertools.cycle(keys):
                if self._rest.wait(PACE_SECONDS):
                    return
                group = group_of(key)
                side = self._believed.get(group, self._sides[0])
                if chance.random() < PROBE_SHARE:
                    side = chance.choice(self._sides)
                self._write(side, key)
        except BaseException as error:
            self.errors.append(error)

    def _write(self, side: Side, key: int) -> None:
        group = group_of(key)
        try:
            result = side("add", key)
        except errors.NotOwnedError:
            others = [one for one in self._sides if one is not side]
            self._believed[group] = others[0] if others else side
        except PASSING:
            return  # the leaf cannot come now, and nothing was counted
        except Gone:
            self._oracle.is_unknown(key)
            self.lose(side)
        else:
            self._believed[group] = side
            self._oracle.acknowledged(side.name, key, result)
            with self._moved:
                self._done[side.name] = self._done.get(side.name, 0) + 1
                self._moved.notify_all()

    def lose(self, side: Side) -> None:
        """The worker of that side is gone for good."""
        if len(self._sides) > 1 and side in self._sides:
            self._sides.remove(side)
        for group, believed in [*self._believed.items()]:
            if believed is side:
                self._believed[group] = self._sides[0]

    def wait_more(self, side: Side, count: int) -> None:
        """Waits until that side has acknowledged `count` more increments."""
        with self._moved:
            due = self._done.get(side.name, 0) + count
            assert self._moved.wait_for(
                lambda: self._done.get(side.name, 0) >= due or self.errors, SECONDS_MAX
            ), f"{side} acknowledges nothing"

    def rest(self) -> None:
        self._rest.set()
        for thread in self._threads:
            thread.join(SECONDS_MAX)
            assert not thread.is_alive(), "a writer hangs"
        if self.errors:
            raise self.errors[0]


def again(
    function: Callable[[], Any],
    *passing: type[BaseException],
    patience: float = SECONDS_MAX,
    may_give_up: Callable[[], bool] = lambda: True,
) -> Any:
    """Tries again what a fault prevented, as a user would. It must end, or the test fails."""
    until = time.monotonic() + patience
    while True:
        try:
            return function()
        except (*PASSING, *passing):
            if time.monotonic() > until and may_give_up():
                raise
            time.sleep(0.01)  # a user's patience; the call itself does the waiting


class Case:
    """A source with all key-groups but the last, a target with that, and writers on both.

    The large leaf is the last one of key-group 1. Key-group 2 is left alone by writers, so that
    nobody touches it. Spare key-groups are for writers that a test adds itself.
    """

    QUIET = 2
    LARGE = 1

    def __init__(
        self,
        source: Process,
        target: Process,
        seed: int = 0,
        *,
        large: bool = False,
        quiet: bool = False,
        spare: Sequence[int] = (),
        home: str = "memory:",
    ) -> None:
        """home: of the target."""
        self.oracle = Oracle()
        self.source, self.target = Side("source", source), Side("target", target)
        self.source.open(range(KEY_GROUPS - 1))
        self.target.open([KEY_GROUPS - 1], home)
        streams = {
            "streamed_requests": ("Stream",),
            "streamed_replies": ("Stream", "FetchLong", "Copy"),
        }
        self.to_source = Proxy(self.source.address, seed=seed, **streams)
        self.to_target = Proxy(self.target.address, seed=seed + 1, **streams)
        self.source("be_at", self.to_source.address)
        leaf = (self.LARGE + 1) * SUBGROUPS - 1
        self.blobs = self._more_keys(leaf) if large else []
        self.source("preload", keys_of(range(KEY_GROUPS - 1)), self.blobs, BLOB_BYTES)
        self.target("preload", keys_of([KEY_GROUPS - 1]), [], 0)
        self.oracle.preloaded(keys_of(range(KEY_GROUPS)))
        self.patience = PATIENCE_SECONDS  # how long something may fail
        self.may_give_up = threading.Event()  # whether to give up after that
        self.may_give_up.set()
        self.given = ""  # the migration that is given back
        self.hand_overs: dict[int, int] = {}  # how often a key-group may have changed hands
        left = {*spare, self.QUIET} if quiet else {*spare}
        busy = [group for group in range(KEY_GROUPS) if group not in left]
        self._busy, self._seed = keys_of(busy), seed
        self.write_again()

    def write_again(self) -> None:
        """Sets writers to work."""
        sides = [self.source, self.target]
        self.writers = Writers(self.oracle, sides, self._busy, self._seed)

    def extra_writers(self, side: Side, keys: Sequence[int]) -> Writers:
        """More writers, for spare keys; they know one side only."""
        return Writers(self.oracle, [side], keys, self._seed)

    @staticmethod
    @cache
    def _more_keys(leaf: int) -> list[int]:
        found: list[int] = []
        for key in itertools.count(1_000_000):
            if route([key], key_codec(int), KEY_GROUPS * SUBGROUPS)[0] == leaf:
                found.append(key)
            if len(found) == BLOBS:
                return found
        raise AssertionError

    # ---- What users do

    def again(self, function: Callable[[], Any], *passing: type[BaseException]) -> Any:
        patience, may_give_up = self.patience, self.may_give_up.is_set
        return again(function, *passing, patience=patience, may_give_up=may_give_up)

    def fetch(self, groups: Sequence[int], strategy: str, timeout: float = TIMEOUT_S) -> str:
        """The target takes over."""
        for group in groups:
            self.hand_overs[group] = self.hand_overs.get(group, 0) + 1
        address = self.to_source.address
        migration: str = self.again(
            lambda: self.target("fetch", address, groups, strategy, timeout)
        )
        return migration

    def migrate(self, groups: Sequence[int], strategy: str, timeout: float = TIMEOUT_S) -> None:
        """The source hands over, unless an earlier attempt that seemed to fail has done so."""
        for group in groups:
            self.hand_overs[group] = self.hand_overs.get(group, 0) + 1

        def attempt() -> None:
            # An attempt that raised may have succeeded nevertheless, or for some key-groups: those
            # of which something was sent are not taken back. They belong to the target now.
            if mine := sorted(set(groups) & set(self.source("groups"))):
                self.source("migrate", self.to_target.address, mine, strategy, timeout)
            self.target("load", keys_of(groups))

        self.again(attempt, errors.NotOwnedError, errors.OccupiedError)

    def load(self, groups: Sequence[int]) -> None:
        self.again(lambda: self.target("load", keys_of(groups)))

    def finish(self) -> None:
        """Waits until nothing moves any more, on either side."""
        self.again(lambda: self.target("wait_all", self.patience))
        self.again(lambda: self.source("wait_all", self.patience))

    # ---- What must be true

    def check(self, at_target: Iterable[int]) -> None:
        """Checks that everything is where it should be, and as it should be."""
        self.writers.rest()
        oracle = self.oracle
        assert not oracle.wrong, oracle.wrong
        mine, theirs = self.source("groups"), self.target("groups")
        expected = sorted({*at_target, KEY_GROUPS - 1})
        assert theirs == expected, f"target has {theirs}, not {expected}"
        assert sorted(mine + theirs) == [*range(KEY_GROUPS)], (
            f"{mine} at source, {theirs} at target"
        )
        for side, groups in ((self.source, mine), (self.target, theirs)):
            keys = keys_of(groups)
            assert side("get", keys) == [oracle.counts[key] for key in keys], side
        self.check_blobs(self.target if self.LARGE in theirs else self.source)
        self.check_single()
        for side in (self.source, self.target):
            assert side("moving") == [], f"{side} is not done"

    def check_blobs(self, side: Side) -> None:
        expected = [key.to_bytes(4, "little") * (BLOB_BYTES // 4) for key in self.blobs]
        assert side("get_blobs", self.blobs) == expected

    def check_single(self) -> None:
        """I2: no key-group had two owners."""
        by_group: dict[int, list[Write]] = {}
        for write in self.oracle.writes:
            by_group.setdefault(group_of(write.key), []).append(write)
        for group, writes in by_group.items():
            proven, allowed = chain_of(writes), self.hand_overs.get(group, 0)
            assert proven <= allowed, f"group {group} changed hands {proven} times, not {allowed}"

    def faults(self) -> list[str]:
        """What workers logged as errors."""
        return [
            fault
            for side in (self.source, self.target)
            for fault in side.process.call(None, "seen_faults")
        ]

    def close(self) -> None:
        try:
            self.writers.rest()
        finally:
            self.to_source.reset()
            self.to_target.reset()
            for side in (self.target, self.source):
                try:
                    side.close()
                except (Gone, KeyError):
                    continue
            self.to_source.stop()
            self.to_target.stop()

    def __enter__(self) -> "Case":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# ---- Migrations to disturb


def on_demand(case: Case) -> list[int]:
    """Leaves come as they are touched; one key-group is given back untouched."""
    case.fetch([0, 1], "on_demand")
    case.load([0, 1])
    case.again(lambda: give_back(case))
    case.finish()
    return [0, 1]


def give_back(case: Case) -> None:
    """Takes the quiet key-group over, and gives it back."""
    quiet = [case.QUIET]
    if case.target("groups") != [0, 1, case.QUIET, KEY_GROUPS - 1]:
        if quiet[0] in case.source("groups") and case.hand_overs.get(case.QUIET):
            return  # an earlier attempt did it
        case.given = case.fetch(quiet, "on_demand")
        case.hand_overs[case.QUIET] += 1
    case.target("give_back", case.given)


def stream(case: Case) -> list[int]:
    """Leaves come by themselves, one after the other."""
    case.fetch([0, 1], "gradual")
    case.finish()
    return [0, 1]


def proposed(case: Case) -> list[int]:
    """The old owner begins; hot leaves come first, and a large one in pieces."""
    case.migrate([0, 1], "prioritised")
    case.finish()
    return [0, 1]


def seamless(case: Case) -> list[int]:
    """Leaves are copied while they are used, and taken over key-group by key-group."""
    for group in (0, 1):
        case.hand_overs[group] = case.hand_overs.get(group, 0) + 1
    address = case.to_source.address
    passing = errors.NotOwnedError, errors.OccupiedError, errors.MigrationError, errors.ClosedError
    case.again(lambda: case.target("seamless", address, [0, 1], TIMEOUT_S), *passing)
    case.finish()
    return [0, 1]


MIGRATIONS = {each.__name__: each for each in (on_demand, stream, proposed)}
KILLED = {**MIGRATIONS, "seamless": seamless}  # how many messages that has is a matter of time
