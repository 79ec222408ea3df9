"""Rows 1 and 2 of the reliability matrix: SIGKILL at every system call and at every fail point.

Whatever the moment, a restore yields exactly one completed checkpoint, the newest acknowledged or
newer, with all keys as the oracle has them (I1, I3, I5); then work goes on and a collection removes
what the dead process left (I7).
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import CLEAN, KILLED, RAISED
from shim import ALL, CHANGES, WRITES, Action, Rule
from stage import CASES, LATER_CASES, SEED, Case, Stage
from workloads import LARGE, MIXED, NIGHTLY, SIZES, WORKLOADS, Workload

# A kill before a call that changes nothing leaves the same disk as a kill before the next call.
COUNTED = ALL if NIGHTLY else CHANGES
LARGE_POINTS = 20


@pytest.fixture
def stage(library: Path, place: Path, case: Case, workload: Workload) -> Iterator[Stage]:
    with Stage(library, place, case, workload) as stage:
        yield stage


@pytest.mark.parametrize("workload", dict.fromkeys([*SIZES, *WORKLOADS]), ids=str)
@pytest.mark.parametrize("case", [*CASES, *(LATER_CASES if NIGHTLY else ())], ids=str)
def test_row_1_a_kill_at_any_call_leaves_one_whole_checkpoint(stage: Stage) -> None:
    clean = stage.run()
    if clean.status == RAISED and "nothing to compact" in clean.message:
        pytest.skip("so small that there is nothing to compact")
    assert clean.status == CLEAN, clean.trace
    stage.check(clean)
    calls = clean.count(COUNTED)
    print(f"{stage.case}: {calls} calls: {clean.counts}")
    assert calls >= 5
    points = range(1, calls + 1)
    if stage.workload is LARGE:  # a run takes seconds
        points = random.Random(SEED).sample(points, LARGE_POINTS)
    for nth in points:
        outcome = stage.run(Rule(nth, Action.KILL, COUNTED))
        assert outcome.status == KILLED, f"call {nth} of {calls}: {outcome.trace}"
        stage.check(outcome)
    for nth in range(1, clean.count(WRITES) + 1):
        outcome = stage.run(Rule(nth, Action.KILL_HALF, WRITES))
        assert outcome.status == KILLED
        stage.check(outcome)


# ---- fail points -------------------------------------------------------------------------------

# Each case passes at least one fail point that no other case passes.
POINT_CASES = (
    *CASES,
    Case("fill_while_changing", taken=1),
    Case("read_all", taken=2, is_changed=False),
    Case("restore_otherwise", taken=2, is_changed=False),
    Case("checkpoint_to_shelf", taken=0),
)
NATIVE = "native."
REAL = ("storage.", NATIVE)  # points where the system itself may fail


def test_row_2_an_error_or_a_kill_at_any_fail_point_leaves_one_whole_checkpoint(
    library: Path, place: Path, testing_build: Path
) -> None:
    """And all points are visited. Their list is printed."""
    visited: dict[str, int] = {}
    names: set[str] = set()
    for workload in WORKLOADS:
        for at, case in enumerate(POINT_CASES):
            folder = place / f"{workload.name}-{at}"
            folder.mkdir()
            with Stage(
                library,
                folder,
                case,
                workload,
                python_path=[testing_build],
                env={"STATEKIT_FAILPOINTS": ""},
            ) as stage:
                found = _try_points(stage)
            names |= found.keys()
            for name, count in found.items():
                visited[name] = visited.get(name, 0) + count
    for name in sorted(names):
        print(f"{visited[name]:6} visits  {name}")
    missed = sorted(name for name in names if not visited[name])
    assert not missed, f"no test comes by {missed}"
    assert any(name.startswith(NATIVE) for name in names), "this is not a testing build"


def _try_points(stage: Stage) -> dict[str, int]:
    """Makes every point that the step passes fail, at its first and at its last visit."""
    clean = stage.run(failpoints="")
    assert clean.status == CLEAN, clean.trace
    stage.check(clean)
    for name, count in clean.visits.items():
        visits = range(1, count + 1)
        some = visits if NIGHTLY and count <= 50 else sorted({*visits[:1], *visits[-1:]})
        for nth in some:
            killed = stage.run(failpoints=f"{name}=kill@{nth}")
            # Threads that read ahead do not pass a point the same number of times in each run.
            is_passed = killed.status == CLEAN and killed.visits[name] >= nth
            assert killed.status == KILLED or (killed.status == CLEAN and not is_passed), (
                f"{stage.case} {name}@{nth}: {killed.status} {killed.trace}"
            )
            stage.check(killed)
            failed = stage.run(failpoints=f"{name}=error@{nth}")
            where = f"{stage.case} {name}=error@{nth}: {failed.trace}"
            assert failed.status in (CLEAN, RAISED), where
            if failed.status == RAISED:  # else it came while tidying up after success
                told = {"StateKitError", "MemoryError"} & {*failed.bases}
                # At points between steps no real error can occur: there the injected error is
                # raised as it is.
                assert told or not name.startswith(REAL), where
            assert not failed.leaks(), f"{failed.leaks()} leaked: {where}"
            stage.check(failed)
    return clean.visits


def test_the_workload_makes_incremental_checkpoints_and_long_chains(place: Path) -> None:
    """Otherwise the tests above would prove less than they say."""
    import scenarios
    from harness import Kit

    class Silent(Kit):
        def __init__(self) -> None:
            pass

    url = str(place / "checkpoints")
    prepared = scenarios.prepare(Silent(), url=url, workload=MIXED, taken=3)
    found = scenarios.checkpoints(url)
    assert [each.manifest.base for each in found] == [None, 1, 2]
    assert any(len(chain) > 1 for _, chain in found[-1].manifest.chains())
    prepared.kv.close()
