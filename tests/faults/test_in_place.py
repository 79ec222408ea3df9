"""Storage that has neither rename() nor link(): files are written under their names.

What holds for other storages holds there, too. After a kill at any call, a loss of power at any
moment, or the failure of any call, a restore gives one complete checkpoint, the newest acknowledged
or a newer one. A manifest that was not finished is passed over; a damaged one is not.
"""

import errno
import os
import shutil
from pathlib import Path

import pytest
import scenarios
from crash_states import Disk
from harness import CLEAN, KILLED
from shim import ALL, CHANGES, SYNCS, WITHOUT_NAMES, WRITES, Action, Rule
from stage import CASES, SEED, Case, Stage, check_state, some_of, states_of
from workloads import MIXED, NIGHTLY

import statekit as sk
from statekit.checkpoint.reader import UnfinishedError, open_checkpoint
from statekit.checkpoint.retention import collect
from statekit.errors import DamagedError, NoCheckpointError
from statekit.format.manifest import manifest_name

STATES_MIN = 20_000 if NIGHTLY else 600
GOES_ON_EVERY = 10
POWER_CASES = (
    Case("checkpoint", taken=0, pack_bytes=1000),
    Case("checkpoint", taken=2),
    Case("life", 1, {"count": 5, "seed": SEED}),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kill_at_any_call_leaves_one_whole_checkpoint(
    library: Path, place: Path, case: Case
) -> None:
    with Stage(library, place, case, MIXED) as stage:
        clean = stage.run(WITHOUT_NAMES)
        assert clean.status == CLEAN, clean.trace
        stage.check(clean)
        calls = clean.count(CHANGES)
        unfinished = 0
        for nth in range(1, calls + 1):
            for action in (Action.KILL, Action.KILL_HALF):
                if action is Action.KILL_HALF and nth > clean.count(WRITES):
                    continue
                counted = CHANGES if action is Action.KILL else WRITES
                outcome = stage.run(Rule(nth, action, counted), WITHOUT_NAMES)
                assert outcome.status == KILLED, f"call {nth}: {outcome.trace}"
                unfinished += any(stage.root.rglob("*.tmp-unfinished-*"))
                stage.check(outcome)
        print(f"{case}: {calls} calls, {unfinished} unfinished manifests")
        assert unfinished or case.step == "collect"


def test_power_loss_at_any_moment_opens_with_what_was_acknowledged(
    library: Path, place: Path
) -> None:
    checked = 0
    share = -(-STATES_MIN // len(POWER_CASES))
    for at, case in enumerate(POWER_CASES):
        folder = place / str(at)
        folder.mkdir()
        with Stage(library, folder, case, MIXED) as stage:
            outcome = stage.run(WITHOUT_NAMES, is_logged=True)
            states = states_of(stage, outcome, random_count=400 if NIGHTLY else 20)
            chosen = some_of(states, share * (at + 1) - checked)
            disk = Disk(folder / "pool")
            for turn, state in enumerate(chosen):
                directory = folder / "state"
                disk.materialise(state, directory)
                try:
                    version = check_state(stage, state, directory)
                    if turn % GOES_ON_EVERY == 0:
                        goes_on(str(directory / "checkpoints"), version)
                except Exception as error:
                    raise AssertionError(f"{case}: {state}") from error
                shutil.rmtree(directory)
            disk.check()
        checked += len(chosen)
    print(f"{checked} states")
    assert checked >= STATES_MIN


def goes_on(url: str, version: int) -> None:
    """Like scenarios.check_goes_on(), but a pack without its header looks like a foreign file."""
    foreign = collect(url, keep=1).foreign
    for name in foreign:
        os.unlink(os.path.join(url, name))
    scenarios.check_goes_on(url, MIXED, version)


@pytest.mark.parametrize("calls", [("open",), WRITES, SYNCS, ("unlink",)], ids="-".join)
def test_a_call_that_fails_fails_the_checkpoint_and_nothing_else(
    library: Path, place: Path, calls: tuple[str, ...]
) -> None:
    with Stage(library, place, Case("fail_then_succeed", taken=2), MIXED) as stage:
        stage.template.reset()
        clean = stage.server.run("scenarios:checkpoint", rules=[WITHOUT_NAMES])
        assert clean.status == CLEAN, clean.trace
        for nth in range(1, clean.count(calls) + 1):
            rule = Rule(nth, Action.FAIL, calls, errno.EIO)
            outcome = stage.run(rule, WITHOUT_NAMES)
            where = f"{calls} {nth}: {outcome.trace or outcome.result}"
            assert outcome.status == CLEAN, where
            assert not outcome.leaks(), where
            seen = outcome.result
            assert seen["is_state_unchanged"], where
            assert seen["usable"] in ([1, 2], [1, 2, 3]), where
            if calls is SYNCS:
                assert seen["error"] == "StorageError", where
            assert scenarios.usable(stage.url, MIXED)[-1] == 4, where
            scenarios.check_goes_on(stage.url, MIXED, 4)


# ---- What is unfinished, and what is damage


def place_with(tmp_path: Path, count: int) -> Path:
    kv = sk.open("memory:", key_groups=2, subgroups=1)
    counts = kv.value("counts", int)
    for number in range(1, count + 1):
        counts["a"] = number
        kv.checkpoint(tmp_path, metadata={"version": number})
    return tmp_path


def unfinish(place: Path, number: int, data: bytes) -> Path:
    """Makes what a writer leaves if it dies while it writes a manifest."""
    mark = place / f"{manifest_name(number)}.tmp-unfinished-0123456789abcdef"
    mark.touch()
    (place / manifest_name(number)).write_bytes(data)
    return mark


@pytest.mark.parametrize("kept", [0, 7, 64, 100])
def test_an_unfinished_manifest_is_passed_over_and_never_restored(
    tmp_path: Path, kept: int
) -> None:
    place = place_with(tmp_path, 3)
    whole = (place / manifest_name(3)).read_bytes()
    unfinish(place, 3, whole[:kept])
    with sk.restore(place) as kv:
        assert kv.value("counts", int)["a"] == 2
        assert [one.number for one in sk.checkpoints(place)] == [1, 2]
        with pytest.raises(UnfinishedError, match="before it was published"):
            open_checkpoint(place, 3)
        kv.value("counts", int)["a"] = 40
        assert kv.checkpoint(place).number == 4  # never the same number twice
    assert collect(place, keep=1).kept == (4,)
    names = {path.name for path in place.iterdir()}
    assert manifest_name(3) not in names
    assert not [name for name in names if "unfinished" in name]


def test_a_truncated_manifest_without_a_mark_is_damage(tmp_path: Path) -> None:
    place = place_with(tmp_path, 3)
    (place / manifest_name(3)).write_bytes(b"")
    with pytest.raises(DamagedError):
        sk.restore(place)


def test_a_mark_beside_a_complete_manifest_says_nothing(tmp_path: Path) -> None:
    """Its writer died after the last byte: the checkpoint is there."""
    place = place_with(tmp_path, 2)
    unfinish(place, 2, (place / manifest_name(2)).read_bytes())
    assert open_checkpoint(place).number == 2
    assert collect(place, keep=2).kept == (1, 2)


def test_nothing_but_unfinished_manifests_is_no_checkpoint(tmp_path: Path) -> None:
    unfinish(tmp_path, 1, b"")
    with pytest.raises(NoCheckpointError):
        sk.restore(tmp_path)
    place_with(tmp_path, 1)
    assert open_checkpoint(tmp_path).number == 2


def test_calls_are_what_the_shim_counts(library: Path, place: Path) -> None:
    """Otherwise the tests above would prove less: no name was made by rename() or link()."""
    with Stage(library, place, Case("checkpoint", taken=0), MIXED) as stage:
        outcome = stage.run(WITHOUT_NAMES, is_logged=True)
        names = [entry for entry in outcome.entries() if entry.call in ("link", "rename")]
        assert names
        assert all(entry.error == errno.ENOSYS for entry in names)
        assert outcome.count(ALL) > 10
