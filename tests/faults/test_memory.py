"""Row 9 of the reliability matrix: the n-th allocation of the native library fails.

Once or for ever, for every public call that has to do with checkpoints, and all n up to the number
that it makes. It fails with an error, or works. State, earlier checkpoints and files are as before,
nothing leaks, and with memory there again it works (I7).
"""

from pathlib import Path

import pytest
from harness import CLEAN
from stage import FULL, Case, Stage
from workloads import NIGHTLY, WORKLOADS, Workload

ALLOCATIONS_MAX = 1 << 62 if NIGHTLY else 2000  # of one call

CASES = (
    Case("with_little_memory", 0, {"step": "checkpoint"}),
    Case("with_little_memory", 2, {"step": "checkpoint", **FULL}),
    Case("with_little_memory", 2, {"step": "checkpoint"}),
    Case("with_little_memory", 3, {"step": "compact"}, is_changed=False),
    Case("with_little_memory", 2, {"step": "read_all"}),
    Case("with_little_memory", 2, {"step": "read_all", "is_lazy": True}),
)


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
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
    with Stage(library, place, case, workload, python_path=[testing_build]) as stage:
        outcome = stage.run(is_for_ever=is_for_ever, allocations_max=ALLOCATIONS_MAX)
        assert outcome.status == CLEAN, outcome.trace
        assert not outcome.leaks(), outcome.leaks()
        print(f"{case}: {outcome.result}")
        assert outcome.result["failed"] > 0, "no allocation was made to fail"
        stage.check(outcome)
