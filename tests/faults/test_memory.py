"""Row 9 of the reliability matrix: the n-th allocation of the native library fails.

It fails once or for ever, in every public call about checkpoints, for all n up to the number of its
allocations. The call fails with an error, or works. State, earlier checkpoints and files are as
before, nothing leaks, and when there is memory again, the call works (I7).
"""

from pathlib import Path

import pytest
from harness import CLEAN
from stage import FULL, Case, Stage
from workloads import NIGHTLY, TINY, WORKLOADS, Workload

ALLOCATIONS_MAX = 1 << 62 if NIGHTLY else 2000  # of one call

CASES = (
    Case("with_little_memory", 0, {"step": "checkpoint"}),
    Case("with_little_memory", 2, {"step": "checkpoint", **FULL}),
    Case("with_little_memory", 2, {"step": "checkpoint"}),
    Case("with_little_memory", 3, {"step": "compact"}, is_changed=False),
    Case("with_little_memory", 2, {"step": "read_all"}),
    Case("with_little_memory", 2, {"step": "read_all", "is_lazy": True}),
)


@pytest.mark.parametrize("workload", WORKLOADS if NIGHTLY else [TINY], ids=str)
@pytest.mark.parametrize("is_for_ever", [False, True], ids=["once", "for-ever"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.taken}-{'-'.join(map(str, case.arguments.values()))}"
)
def test_row_9_every_allocation_may_fail(
    library: Path,
    place: Path,
    testing_build: Path,
    case: Case,
    workload: Workload,
    is_for_ever: bool,
) -> None:
    first, succeeded = 1, 0
    with Stage(library, place, case, workload, python_path=[testing_build]) as stage:
        while first <= ALLOCATIONS_MAX:
            outcome = stage.run(first=first, is_for_ever=is_for_ever)
            assert outcome.status == CLEAN, outcome.trace
            assert not outcome.leaks(), outcome.leaks()
            stage.check(outcome)
            if outcome.result["made"] < outcome.result["nth"]:
                break
            first = outcome.result["nth"] + 1  # it did without that allocation: go on after it
            succeeded += 1
    tried = outcome.result["nth"] - 1
    print(f"{case}: {tried} allocations failed, {succeeded} of them without harm")
    assert tried > succeeded, "no allocation was made to fail"
