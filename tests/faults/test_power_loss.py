"""Row 3 of the reliability matrix: power loss at any moment of any step.

The step runs once, its calls are logged, and every legal state of the disk (crash_states.py) must
open: the newest checkpoint is whole, equals the oracle, and is the newest acknowledged or newer.
Steps that leave out an fsync prove that the tests would find a state which lost acknowledged work.
"""

import os
import shutil
from pathlib import Path

import pytest
import scenarios
from crash_states import Disk, State
from harness import tree_of
from stage import FULL, SEED, Case, Stage, check_state, some_of, states_of
from workloads import MIXED, NIGHTLY, WORKLOADS, Workload

from statekit.errors import StateKitError

# At least this many states in all.
STATES_MIN = 50_000 if NIGHTLY else 2_000
GOES_ON_EVERY = 25  # the longer check is made for one state in 25

SMALL_PACKS = 1000  # bytes
LIVES = 8 if NIGHTLY else 3
CASES = (
    Case("checkpoint", taken=0, pack_bytes=SMALL_PACKS),
    Case("checkpoint_and_collect", taken=2, arguments=FULL, pack_bytes=SMALL_PACKS),
    Case("checkpoint_and_collect", taken=3),
    Case("compact_and_collect", taken=3, is_changed=False),
    *(
        Case("life", 1, {"count": 8, "seed": SEED + at}, pack_bytes=SMALL_PACKS if at % 2 else None)
        for at in range(LIVES)
    ),
)


@pytest.fixture(params=WORKLOADS, ids=str)
def workload(request: pytest.FixtureRequest) -> Workload:
    found: Workload = request.param
    return found


def test_row_3_every_state_after_power_loss_opens_with_what_was_acknowledged(
    library: Path, place: Path, workload: Workload
) -> None:
    share = -(-STATES_MIN // len(CASES) // len(WORKLOADS))
    checked = 0
    for at, case in enumerate(CASES):
        folder = place / str(at)
        folder.mkdir()
        with Stage(library, folder, case, workload) as stage:
            outcome = stage.run(is_logged=True)
            states = states_of(stage, outcome, random_count=400 if NIGHTLY else 20)
            # If one case has too few states, the next ones make up for it.
            chosen = some_of(states, share * (at + 1) - checked)
            print(f"{case} {workload}: {len(chosen)} of {len(states)} states, seed {SEED}")
            disk = Disk(folder / "pool")
            for turn, state in enumerate(chosen):
                _check(stage, state, disk, folder / "state", goes_on=turn % GOES_ON_EVERY == 0)
            disk.check()
        checked += len(chosen)
    print(f"{checked} states")
    assert checked >= share * len(CASES)


def _check(stage: Stage, state: State, disk: Disk, directory: Path, goes_on: bool) -> None:
    disk.materialise(state, directory)
    try:
        version = check_state(stage, state, directory)
        if goes_on:
            scenarios.check_goes_on(str(directory / "checkpoints"), stage.workload, version)
    except Exception as error:
        raise AssertionError(f"{stage.case}: {state}") from error
    shutil.rmtree(directory)


@pytest.mark.parametrize("step", ["files", "directories"])
def test_power_loss_shows_what_an_fsync_left_out_would_cost(
    library: Path, place: Path, step: str
) -> None:
    """Tests the test: without these fsyncs some state has lost what was acknowledged."""
    wrong = 0
    case = Case("checkpoint_without_fsync", 1, {"of": step})
    with Stage(library, place, case, MIXED) as stage:
        states = states_of(stage, stage.run(is_logged=True), random_count=20)
        disk = Disk(place / "pool")
        for at, state in enumerate(some_of(states, 100)):
            disk.materialise(state, place / str(at))
            try:
                check_state(stage, state, place / str(at))
            except (AssertionError, StateKitError):
                wrong += 1
    print(f"{wrong} bad states without fsync of {step}")
    assert wrong


def test_a_state_in_which_nothing_is_lost_is_what_the_step_left(library: Path, place: Path) -> None:
    """The log is complete: replaying it gives exactly these files."""
    case = CASES[-1]
    with Stage(library, place, case, MIXED) as stage:
        outcome = stage.run(is_logged=True)
        last = [state for state in states_of(stage, outcome, 1) if not state.lost][-1]
        assert last.files == tree_of(stage.root)
        assert os.listdir(stage.url)
