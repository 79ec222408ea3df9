"""Rows 15 (at random), 16 and 17: bad networks, processes that stand still, slow links, clocks."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from migration_cases import KILLED, MIGRATIONS, TIMEOUT_S, Case, again, keys_of
from migration_worker import KEY_GROUPS, SECONDS_MAX, Nursery, Process
from proxy import Direction, Fault, Rule
from relay import Relay, Way

from statekit.errors import NotOwnedError, OccupiedError, StateKitError

REQUEST, REPLY = Direction
NIGHTLY = bool(os.environ.get("STATEKIT_NIGHTLY"))
SEEDS = 500 if NIGHTLY else 20
AT_ONCE = 3
LOSS_MAX, DUPLICATES_MAX = 0.3, 0.5
OTHERS = 60  # increments that other key-groups must accept meanwhile
STOPPED_INCREMENTS = 400  # of two writers that pause after each: takes more than two time-outs
STATE_BYTES = 96 << 20
MEMORY_SLACK_BYTES = 40 << 20  # three times a leaf, windows, buffers of gRPC and the allocator

Workers = tuple[Process, Process]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture(scope="module")
def workers(nursery: Nursery) -> Workers:
    return nursery.worker(), nursery.worker()


@pytest.fixture
def own_workers(nursery: Nursery) -> Iterator[Workers]:
    """For tests that stop them, or turn their clocks."""
    both = nursery.worker(), nursery.worker()
    yield both
    for worker in both:
        worker.close()


# ---- At random


def run_at_random(workers: Workers, seed: int) -> str:
    """Faults while the migration is tried for a while; then none, and it must end well."""
    loss, doubles = LOSS_MAX * (seed % 7) / 6, DUPLICATES_MAX * (seed % 5) / 4
    name = [*KILLED][seed % len(KILLED)]
    with Case(*workers, seed, large=seed % 2 == 0, quiet=name == "on_demand") as case:
        for proxy in (case.to_source, case.to_target):
            rates = {
                Fault.DROP: loss / 2,
                Fault.BREAK: loss / 2,
                Fault.DUPLICATE: doubles,
                Fault.DELAY: 0.1,
            }
            proxy.mix(rates, TIMEOUT_S)
        try:
            case.patience = 6 * TIMEOUT_S
            with suppress(StateKitError, TimeoutError):
                KILLED[name](case)
            for proxy in (case.to_source, case.to_target):
                proxy.mix({}, 0.0)
            case.patience = SECONDS_MAX
            bring_to_an_end(case)
        except Exception as error:
            return f"seed {seed}, {name}, loss {loss:.2f}, duplicates {doubles:.2f}: {error!r}"
    return ""


def bring_to_an_end(case: Case) -> None:
    """The target takes over what it does not have yet; the quiet key-group goes to the source."""
    target, source = case.target, case.source

    def attempt() -> None:
        if case.QUIET in target("groups"):
            if case.given:
                target("give_back", case.given)
            else:  # the answer with its name was lost
                target("give_back_all")
        missing = [group for group in (0, 1) if group not in target("groups")]
        if missing:
            target("fetch", case.to_source.address, missing, "prioritised", 4 * TIMEOUT_S)
        target("load", keys_of([0, 1]))
        # A proposal that had no answer in time is withdrawn: perhaps while this was going on.
        assert {0, 1} <= {*target("groups")}, "key-groups went back to the source"
        if case.QUIET not in source("groups"):
            source("take_back_all")  # nobody has asked for it
        assert case.QUIET in source("groups"), "the quiet key-group is on its way"

    # OccupiedError: a proposal came late, and the target has what it was about to fetch.
    case.again(attempt, NotOwnedError, OccupiedError, AssertionError)
    case.finish()
    # Each attempt may have moved key-groups there and, since it failed, back.
    attempts = case.to_source.count("Begin", REQUEST)
    case.hand_overs = dict.fromkeys((0, 1, case.QUIET), 2 * attempts)
    case.check([0, 1])


def test_lossy_networks() -> None:
    with Nursery() as nursery:
        workers = nursery.worker(), nursery.worker()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = [*pool.map(lambda seed: run_at_random(workers, seed), range(SEEDS))]
    wrong = [result for result in results if result]
    assert not wrong, "\n".join(wrong)


# ---- Peers that stand still


STOPS: list[tuple[str, str, str, Direction]] = [
    ("source", "on_demand", "Begin", REPLY),
    ("source", "on_demand", "Fetch", REQUEST),
    ("source", "on_demand", "Installed", REQUEST),
    ("source", "on_demand", "GiveBack", REQUEST),
    ("source", "stream", "Stream", REPLY),
    ("source", "proposed", "Propose", REPLY),
    ("target", "on_demand", "Begin", REPLY),
    ("target", "on_demand", "Fetch", REPLY),
    ("target", "stream", "Stream", REPLY),
    ("target", "stream", "Installed", REPLY),
    ("target", "proposed", "Propose", REQUEST),
    ("source", "seamless", "Shade", REPLY),
    ("source", "seamless", "Copy", REPLY),
    ("source", "seamless", "Begin", REPLY),
    ("target", "seamless", "Copy", REPLY),
    ("target", "seamless", "Begin", REPLY),
]


@pytest.mark.parametrize(("victim", "name", "method", "direction"), STOPS)
def test_a_process_that_stands_still_holds_up_nobody_else(
    victim: str, name: str, method: str, direction: Direction, own_workers: Workers
) -> None:
    spare = [5, KEY_GROUPS - 1]
    with Case(*own_workers, large=True, quiet=name == "on_demand", spare=spare) as case:
        stopped, other = (
            (case.source, case.target) if victim == "source" else (case.target, case.source)
        )
        proxy = case.to_target if method == "Propose" else case.to_source
        rule = proxy.arm(Rule(Fault.HOLD, 1, method, direction))
        with ThreadPoolExecutor(1) as pool:
            migration = pool.submit(KILLED[name], case)
            assert rule.wait_reached()
            stopped.process.stop()
            rule.release.set()
            try:
                # It stands still for longer than the time-out, measured by the increments that
                # others do meanwhile.
                keys = keys_of([KEY_GROUPS - 1] if other is case.target else [5])
                writers = case.extra_writers(other, keys)
                writers.wait_more(other, STOPPED_INCREMENTS)
                writers.rest()
            finally:
                stopped.process.go_on()
            where = migration.result()
        # The process that stood still has handed over its key-groups: it accepts nothing for them.
        for key in keys_of(where):
            with pytest.raises(NotOwnedError):
                case.source("add", key)
        case.check(where)


def move_slowly(case: Case, relay: Relay, strategy: str) -> None:
    case.hand_overs.update({0: 1, 1: 1})
    case.target("fetch", relay.address, [0, 1], strategy, SECONDS_MAX)
    case.writers.wait_more(case.source, OTHERS)
    case.writers.wait_more(case.target, 10)


@pytest.mark.parametrize("strategy", ["prioritised", "gradual"])
def test_a_slow_link_holds_up_only_what_goes_over_it(strategy: str, workers: Workers) -> None:
    with Case(*workers) as case, Relay(case.source.address) as relay:
        relay.limit(10_000)
        move_slowly(case, relay, strategy)
        case.finish()
        case.check([0, 1])


def test_a_copy_over_a_slow_link_holds_up_nobody(workers: Workers) -> None:
    with Case(*workers) as case, Relay(case.source.address) as relay:
        relay.limit(20_000)
        case.hand_overs.update({0: 1, 1: 1})
        with ThreadPoolExecutor(1) as pool:
            moved = pool.submit(case.target, "seamless", relay.address, [0, 1], SECONDS_MAX)
            case.writers.wait_more(case.source, OTHERS)
            moved.result()
        case.writers.wait_more(case.target, 10)
        case.finish()
        case.check([0, 1])


def test_a_full_receive_window_takes_no_memory(own_workers: Workers) -> None:
    """The source holds one leaf that it is sending, not all that it has to send."""
    moving = [*range(6)]
    spare = [KEY_GROUPS - 1]
    with Case(*own_workers, spare=spare) as case, Relay(case.source.address) as relay:
        source, target = case.source, case.target
        source("fill", keys_of(moving), STATE_BYTES)
        before = source.process.call(None, "bytes_now")
        target("fetch", relay.address, moving, "gradual", SECONDS_MAX)
        relay.partition(Way.DOWN)  # nothing is read any more: windows and buffers fill
        case.hand_overs = dict.fromkeys(moving, 1)
        own = case.extra_writers(target, keys_of(spare))
        own.wait_more(target, OTHERS)
        own.rest()
        grown = source.process.call(None, "bytes_now") - before
        relay.heal()
        assert grown < MEMORY_SLACK_BYTES, f"{grown >> 20} MiB for {STATE_BYTES >> 20} MiB of state"
        case.finish()
        case.check(moving)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("count", [200, 3_000, 400_000])
def test_connections_that_are_cut_in_a_message(way: Way, count: int, workers: Workers) -> None:
    with Case(*workers, large=True) as case, Relay(case.source.address) as relay:
        relay.cut_after(way, count)
        case.hand_overs.update({0: 1, 1: 1})
        case.again(
            lambda: case.target("fetch", relay.address, [0, 1], "prioritised", 4 * TIMEOUT_S)
        )
        case.finish()
        case.check([0, 1])


# ---- Clocks


CLOCKS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "source an hour ahead": ((3600.0, 1.0), (0.0, 1.0)),
    "target an hour behind": ((0.0, 1.0), (-3600.0, 1.0)),
    "both stand still": ((0.0, 0.0), (0.0, 0.0)),
    "years apart": ((1e9, 1.0), (-1e9, 1.0)),
    "backwards and too fast": ((0.0, -50.0), (0.0, 50.0)),
}


@pytest.mark.parametrize("clocks", CLOCKS)
def test_clocks_do_not_matter(clocks: str, own_workers: Workers) -> None:
    """Clocks jump while leaves are on their way, and once more in the other direction."""
    with Case(*own_workers, large=True) as case:
        rule = case.to_source.arm(Rule(Fault.HOLD, 2, "Stream", REPLY))
        with ThreadPoolExecutor(1) as pool:
            migration = pool.submit(MIGRATIONS["stream"], case)
            assert rule.wait_reached()
            for side, (offset, speed) in zip(
                (case.source, case.target), CLOCKS[clocks], strict=True
            ):
                side.process.call(None, "turn_clock", offset, speed)
            rule.release.set()
            where = migration.result()
        for side, (offset, speed) in zip((case.source, case.target), CLOCKS[clocks], strict=True):
            side.process.call(None, "turn_clock", -offset, speed)
        case.hand_overs[4] = 1
        again(lambda: case.target("fetch", case.to_source.address, [4], "prioritised", TIMEOUT_S))
        case.finish()
        case.check([*where, 4])
