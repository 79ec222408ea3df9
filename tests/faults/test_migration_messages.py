"""Row 15: every single message of a migration between processes is lost, late, doubled or damaged.

Each migration is run undisturbed and its messages are counted; then it is run once for every
message and fault. The exact number of messages depends on threads, so a fault may not find its
message.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import pytest
from migration_cases import MIGRATIONS, TIMEOUT_S, Case, Write, chain_of
from migration_worker import Nursery, Process
from proxy import Direction, Fault, Rule
from remote_util import wait_until

from statekit.errors import StateKitError

FAULTS = [
    Fault.DROP,
    Fault.BREAK,
    Fault.DUPLICATE,
    Fault.DELAY,
    Fault.REORDER,
    Fault.CORRUPT,
    Fault.TRUNCATE,
]
COUNTING_RUNS = 3
AT_ONCE = 4  # cases at once: most of the time they wait for time-outs


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Process, Process]]:
    with Nursery() as nursery:
        yield nursery.worker(), nursery.worker()


Workers = tuple[Process, Process]
Kind = tuple[str, Direction]


class Point(NamedTuple):
    """A message of a migration."""

    method: str
    direction: Direction
    nth: int


def open_case(workers: Workers, name: str, seed: int = 0) -> Case:
    return Case(*workers, seed, large=True, quiet=name == "on_demand")


@pytest.fixture(scope="module")
def points(workers: Workers) -> dict[str, list[Point]]:
    """The messages of each migration: as many as came at most in several runs."""
    found = {}
    for name, migrate in MIGRATIONS.items():
        most: Counter[Kind] = Counter()
        for seed in range(COUNTING_RUNS):
            with open_case(workers, name, seed) as case:
                case.check(migrate(case))
                for proxy in (case.to_source, case.to_target):
                    most |= Counter((each.method, each.direction) for each in proxy.log)
        found[name] = [
            Point(*kind, nth) for kind, count in most.items() for nth in range(1, count + 1)
        ]
    return found


def test_all_calls_of_the_protocol_are_in_these_migrations(points: dict[str, list[Point]]) -> None:
    methods = {point.method for each in points.values() for point in each}
    assert methods == {
        "Hello", "Begin", "Fetch", "FetchLong", "Pick", "Stream", "Installed", "GiveBack",
        "Propose",
    }  # fmt: skip
    assert sum(map(len, points.values())) >= 40


def run_one(workers: Workers, name: str, fault: Fault, point: Point, seed: int) -> str:
    """What is wrong after a migration in which one message met a fault; "" if nothing is."""
    with open_case(workers, name, seed) as case:
        proxy = case.to_target if point.method == "Propose" else case.to_source
        rule = Rule(fault, point.nth, point.method, point.direction, seconds=2 * TIMEOUT_S)
        proxy.arm(rule)
        try:
            if fault is Fault.CORRUPT and not has_leaves(point):
                disturb(case, name)
                return ""
            where = MIGRATIONS[name](case)
            assert rule.wait_over(), "a message hangs in the proxy"
            case.check(where)
        except Exception as error:
            return f"{fault} of {point.method} {point.direction} {point.nth}: {error!r}"
        return "" if rule.is_reached.is_set() else "not reached"


def has_leaves(point: Point) -> bool:
    return point.direction is Direction.REPLY and point.method in ("Fetch", "FetchLong", "Stream")


def disturb(case: Case, name: str) -> None:
    """Runs a migration with a fault.

    Leaves have checksums from end to end. Other messages have those of TCP or TLS only, so a
    message that was changed on its way may stop a migration. But nothing is counted wrongly.
    """
    with suppress(StateKitError, TimeoutError):
        case.patience = 2 * TIMEOUT_S
        MIGRATIONS[name](case)
    case.writers.rest()
    assert not case.oracle.wrong, case.oracle.wrong
    case.check_single()


def run_all(tasks: list[Callable[[], str]]) -> list[str]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [each.result() for each in [pool.submit(task) for task in tasks]]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", MIGRATIONS)
def test_every_message(
    name: str, fault: Fault, workers: Workers, points: dict[str, list[Point]]
) -> None:
    chosen = points[name]
    results = run_all(
        [
            lambda at=at, point=point: run_one(workers, name, fault, point, at)
            for at, point in enumerate(chosen)
        ]
    )
    wrong = [result for result in results if result not in ("", "not reached")]
    assert not wrong, f"{len(wrong)} of {len(chosen)}:\n" + "\n".join(wrong)
    assert "" in results, "no fault has met its message"  # how many do is up to the threads
    faults = [fault for worker in workers for fault in worker.call(None, "seen_faults")]
    assert not faults, faults


def test_nothing_is_left_of_all_these_migrations(workers: Workers) -> None:
    """Threads end soon after their provider is closed."""
    for worker in workers:
        wait_until(lambda worker=worker: worker.call(None, "leftovers") == [])


# ---- The tests themselves


def test_changes_of_owner_are_counted_from_times() -> None:
    def writes(*times: tuple[str, float, float]) -> int:
        return chain_of(Write(side, 0, 0, began, ended) for side, began, ended in times)

    assert writes() == 0
    assert writes(("a", 1, 2), ("a", 3, 4)) == 0
    assert writes(("a", 1, 2), ("b", 3, 4)) == 1
    assert writes(("a", 1, 3), ("b", 2, 4)) == 0  # at the same time: either may have been first
    assert writes(("a", 1, 2), ("b", 3, 4), ("a", 5, 6)) == 2
    assert writes(("a", 1, 2), ("b", 3, 10), ("a", 5, 6), ("b", 7, 8)) == 1
    assert writes(("a", 1, 2), ("b", 3, 4), ("b", 3, 9), ("a", 5, 6), ("b", 7, 8)) == 3


BROKEN = {
    "leaves are not shut": (Fault.DROP, Point("Installed", Direction.REQUEST, 1)),
    "leaves are copied, not moved": (Fault.DROP, Point("Installed", Direction.REQUEST, 1)),
    "damage is passed on": (Fault.CORRUPT, Point("Stream", Direction.REPLY, 2)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_statekit_that_is_broken_on_purpose_is_found_out(what: str) -> None:
    with Nursery() as nursery:
        workers = nursery.worker(), nursery.worker()
        for worker in workers:
            worker.call(None, "break_on_purpose", what)
        # Not every run reaches the broken place: on a busy machine leaves may come another way.
        results = (run_one(workers, "stream", *BROKEN[what], seed) for seed in range(20))
        assert any(result not in ("", "not reached") for result in results)
