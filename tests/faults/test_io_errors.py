"""Rows 4, 7 and 8 of the reliability matrix: fsync fails, the disk is full, no file can be opened.

A checkpoint that meets one of these fails with a StorageError. The state, the earlier checkpoints
and the directory are as before (I7), nothing leaks, and when the cause is gone the next one works.
"""

import errno
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import scenarios
from crash_states import Disk
from harness import CLEAN, RAISED, Outcome
from shim import ALL, NAMES, OPENS, SYNCS, WRITES, Action, Flag, Rule
from stage import CASES as KILL_CASES
from stage import FULL, SEED, Case, Stage, check_state, some_of, states_of
from workloads import MIXED, NIGHTLY, WORKLOADS, Workload

import statekit as sk
from statekit.checkpoint.retention import collect
from statekit.errors import HomeError, StorageError
from statekit.storage import open_storage

CASES = (
    Case("fail_then_succeed", taken=0),
    Case("fail_then_succeed", taken=2, arguments=FULL),
    Case("fail_then_succeed", taken=2),
)
GOES_ON_EVERY = 4  # the longer check is made for every fourth call
TMPFS_BYTES = 16 << 20
WRITES_MAX = 5000  # of 8 KB on average: more than twice such a disk and the memory


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(params=WORKLOADS, ids=str)
def workload(request: pytest.FixtureRequest) -> Workload:
    found: Workload = request.param
    return found


@pytest.fixture
def stage(library: Path, place: Path, case: Case, workload: Workload) -> Iterator[Stage]:
    with Stage(library, place, case, workload) as stage:
        yield stage


def first_calls(stage: Stage, calls: tuple[str, ...]) -> int:
    """How many of these the first checkpoint of the step makes."""
    step = Case("checkpoint", stage.case.taken, stage.case.arguments)
    stage.template.reset()
    outcome = stage.server.run(f"scenarios:{step.step}", **step.arguments)
    assert outcome.status == CLEAN, outcome.trace
    return outcome.count(calls)


def check_failure(stage: Stage, outcome: Outcome, where: str) -> None:
    """Checks I7 for a run of fail_then_succeed."""
    assert outcome.status == CLEAN, f"{where}: {outcome.trace}"
    assert not outcome.leaks(), f"{where}: {outcome.leaks()} leaked"
    seen = outcome.result
    version = stage.case.taken + 1
    assert seen["is_state_unchanged"], where
    earlier = list(range(1, version))
    if seen["error"]:
        assert "StorageError" in seen["bases"], f"{where}: {seen}"
        assert "checkpoints" in seen["message"], f"{where}: the message names no file"
        assert seen["usable"] == earlier, where
        assert not [name for name in seen["files"] if ".tmp-" in name], f"{where}: {seen['files']}"
    else:
        assert seen["usable"] == [*earlier, version], where
    assert scenarios.usable(stage.url, stage.workload)[-1] == version + 1
    scenarios.check_goes_on(stage.url, stage.workload, version + 1)


def test_row_4_a_failed_fsync_fails_the_checkpoint_and_is_never_repeated(stage: Stage) -> None:
    count = first_calls(stage, SYNCS)
    assert count >= 3, "pack, manifest, directory"
    for nth in range(1, count + 1):
        rule = Rule(nth, Action.FAIL, SYNCS, errno.EIO)
        outcome = stage.run(rule, is_logged=True)
        where = f"EIO at fsync {nth} of {count}"
        check_failure(stage, outcome, where)
        assert outcome.result["error"], f"{where}: nobody was told"
        entries = outcome.entries()
        at = next(at for at, entry in enumerate(entries) if entry.flags & Flag.INJECTED)
        failed = entries[at]
        if failed.flags & Flag.DIRECTORY:
            continue  # there is no other directory to write the name into
        later = [entry for entry in entries[at + 1 :] if entry.path == failed.path]
        assert not [entry for entry in later if entry.call in SYNCS], f"{where}: tried again"
        assert "unlink" in {entry.call for entry in later}, f"{where}: the file was kept"


def test_row_4_power_loss_after_a_failed_fsync_keeps_what_was_acknowledged(stage: Stage) -> None:
    """The kernel may have dropped the data that the fsync was for, and report success later."""
    per_fsync = 1000 if NIGHTLY else 40
    for nth in range(1, first_calls(stage, SYNCS) + 1):
        outcome = stage.run(Rule(nth, Action.FAIL, SYNCS, errno.EIO), is_logged=True)
        disk = Disk(stage.root.parent / "pool")
        directory = stage.root.parent / "state"
        for state in some_of(states_of(stage, outcome, 5), per_fsync):
            disk.materialise(state, directory)
            try:
                check_state(stage, state, directory)
            except Exception as error:
                raise AssertionError(f"EIO at fsync {nth}, then {state}, seed {SEED}") from error
            shutil.rmtree(directory)


def test_row_4_a_collection_whose_fsync_fails_removes_no_pack(
    library: Path, place: Path, workload: Workload
) -> None:
    case = Case("collect", taken=3, is_changed=False)
    with Stage(library, place, case, workload) as stage:
        count = stage.run().count(SYNCS)
        assert count
        for nth in range(1, count + 1):
            outcome = stage.run(Rule(nth, Action.FAIL, SYNCS, errno.EIO), is_logged=True)
            assert outcome.status == RAISED
            assert "StorageError" in outcome.bases
            gone = [entry.path for entry in outcome.entries() if entry.call == "unlink"]
            assert not [path for path in gone if path.endswith(".pack")]
            stage.check(outcome)


@pytest.mark.parametrize("action", [Action.FAIL, Action.SHORT, Action.FAIL_FOREVER], ids=str)
def test_row_7_a_full_disk_fails_the_checkpoint_and_nothing_else(
    stage: Stage, action: Action
) -> None:
    calls = (*WRITES, *NAMES, "open") if action == Action.FAIL else WRITES
    count = first_calls(stage, calls)
    assert count >= 2, "pack and manifest"
    for nth in range(1, count + 1):
        outcome = stage.run(Rule(nth, action, calls, errno.ENOSPC))
        check_failure(stage, outcome, f"{action.name} at write {nth} of {count}")


ANY_CASES = (
    *KILL_CASES,
    Case("read_all", taken=2, is_changed=False),
    Case("read_all", taken=2, arguments={"is_lazy": True}, is_changed=False),
)


@pytest.mark.parametrize("case", ANY_CASES, ids=str)
@pytest.mark.parametrize("action", [Action.FAIL, *([Action.FAIL_FOREVER] if NIGHTLY else [])])
def test_any_call_that_fails_is_told_and_harms_nothing(stage: Stage, action: Action) -> None:
    """Rows 4, 7 and 8 in general: EIO at each call in turn, also at those that read or tidy up."""
    calls = stage.run().count(ALL)
    for nth in range(1, calls + 1):
        outcome = stage.run(Rule(nth, action, ALL, errno.EIO), is_logged=True)
        failed = [str(entry) for entry in outcome.entries() if entry.flags & Flag.INJECTED]
        where = f"{stage.case}: EIO at call {nth} of {calls}, {failed}: {outcome.trace}"
        assert outcome.status in (CLEAN, RAISED), where
        assert outcome.status == CLEAN or "StorageError" in outcome.bases, where
        assert not outcome.leaks(), f"{outcome.leaks()} leaked: {where}"
        try:
            stage.check(outcome, goes_on=NIGHTLY or nth % GOES_ON_EVERY == 0)
        except Exception as error:
            raise AssertionError(where) from error


@pytest.fixture
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    target = place / "disk"
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "statekit-faults", str(target)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"there is no mount: {error}")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def test_row_7_a_real_disk_fills_up_and_work_resumes_when_space_is_freed(small_disk: Path) -> None:
    """Checkpoints of about 3 MB each, until there is no room; then room is made."""
    rng = random.Random(SEED)
    url = str(small_disk / "checkpoints")
    kv = sk.open("memory:", key_groups=4, subgroups=4)
    texts = kv.value("texts", bytes)
    oracle: dict[str, bytes] = {}
    refused = taken = 0
    for _ in range(12 if not NIGHTLY else 100):
        for at in range(3000):
            texts[f"key-{at}"] = oracle[f"key-{at}"] = rng.randbytes(1000)
        try:
            kv.checkpoint(url, base=None)
            taken += 1
        except StorageError as error:
            if "space" not in str(error):
                raise
            refused += 1
            before = sorted(os.listdir(url))
            assert not [name for name in before if ".tmp-" in name]
            assert len(scenarios.checkpoints(url)) >= 3
            collect(open_storage(url), keep=1)
            kv.checkpoint(url, base=None)
            taken += 1
        with sk.restore(url, lazy=False) as again:
            assert dict(again.value("texts", bytes).items()) == oracle
    print(f"{taken} taken, {refused} refused for want of space")
    assert refused >= 2
    kv.close()


@pytest.mark.parametrize("spare_kib", [0, 1500, 2500])
def test_a_home_on_a_full_disk_can_be_read_and_goes_on_when_space_is_freed(
    small_disk: Path, spare_kib: int
) -> None:
    """Other programs fill the disk, and leave too little space to go on."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    url = f"rocksdb:{small_disk / 'home'}?memory=4MiB"
    kv = sk.open(url, key_groups=4, subgroups=4)
    texts = kv.value("texts", bytes)
    oracle: dict[str, bytes] = {}

    def write() -> None:
        key, value = f"key-{rng.randrange(2000)}", rng.randbytes(rng.choice((100, 3000, 20_000)))
        texts[key] = value
        oracle[key] = value

    def refused(call: Callable[[], None]) -> bool:
        try:
            call()
        except HomeError as error:
            if "The disk is full. Free some space and do it again" not in str(error):
                raise
            return True
        return False

    def check_reads() -> None:
        for key, value in oracle.items():
            assert texts[key] == value

    for _ in range(100):
        write()
    kv.commit({"offset": 1})
    while not refused(write):
        pass
    ballast = small_disk / "ballast"
    fill_disk(ballast, spare_kib << 10)
    check_reads()
    # How soon depends on what RocksDB has compacted meanwhile, and on how much of what is in memory
    # was read. But all of it together is more than fits into both.
    failures = 0
    for _ in range(WRITES_MAX):
        failures += refused(write)
        if failures == 100:
            break
    assert failures, "memory is full, and so is the disk"
    check_reads()
    for call in (lambda: kv.commit({"offset": 2}), kv.flush, kv.flush, write):
        refused(call)
        check_reads()
    ballast.unlink()
    subprocess.run(["mount", "-o", f"remount,size={16 * TMPFS_BYTES}", str(small_disk)], check=True)
    kv.flush()
    for _ in range(300):
        write()
    check_reads()
    kv.commit({"offset": 3})
    kv.close()
    with sk.open(url) as again:
        assert again.committed == {"offset": 3}
        assert dict(again.value("texts", bytes).items()) == oracle


def fill_disk(path: Path, spare_bytes: int) -> None:
    """Writes a file that leaves spare_bytes of the disk, perhaps 0."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate(max(0, file.tell() - spare_bytes))


def test_row_8_without_descriptors_the_checkpoint_fails_and_nothing_else(stage: Stage) -> None:
    count = first_calls(stage, OPENS)
    assert count >= 3
    for action in (Action.FAIL, Action.FAIL_FOREVER):
        for nth in range(1, count + 1):
            outcome = stage.run(Rule(nth, action, OPENS, errno.EMFILE))
            check_failure(stage, outcome, f"{action.name} EMFILE at open {nth} of {count}")


@pytest.mark.parametrize("step", ["checkpoint", "collect", "read_all"])
def test_row_8_every_limit_of_descriptors_is_enough_or_refused_cleanly(
    library: Path, place: Path, step: str
) -> None:
    case = Case("with_few_files", taken=2, arguments={"step": step})
    refused = 0
    with Stage(library, place, case, MIXED) as stage:
        for spare in range(100 if NIGHTLY else 12):
            outcome = stage.run(spare=spare)
            assert outcome.status in (CLEAN, RAISED), outcome.trace
            if outcome.status == RAISED:
                refused += 1
                assert "StorageError" in outcome.bases, f"{spare} descriptors: {outcome.trace}"
            assert not outcome.leaks(), f"{spare} descriptors: {outcome.leaks()}"
            stage.check(outcome)
    assert outcome.status == CLEAN, f"{spare} descriptors are not enough: {outcome.trace}"
    print(f"{step} needs {refused} descriptors")
    assert refused


def test_the_limit_of_descriptors_is_what_it_was() -> None:
    """The tests above lower it in children only."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= 256
