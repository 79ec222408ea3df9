"""The fault tools tested: shim, fork server, and both together on right and wrong writers."""

import errno
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import shim
import writers
from crash_states import Disk, State, crash_states
from harness import CLEAN, KILLED, RAISED, ForkServer, Outcome, Template, tree_of
from shim import ALL, Action, Flag, Rule


@pytest.fixture
def data(place: Path) -> Path:
    directory = place / "data"
    directory.mkdir()
    return directory


@pytest.fixture
def server(library: Path, data: Path) -> Iterator[ForkServer]:
    with ForkServer(library, watch=data) as server:
        yield server


def run(server: ForkServer, step: str, data: Path, **arguments: object) -> Outcome:
    return server.run(f"writers:{step}", directory=str(data), **arguments)  # type: ignore[arg-type]


def test_every_wrapped_call_is_counted_and_logged(server: ForkServer, data: Path) -> None:
    outcome = run(server, "every_call", data, is_logged=True)
    assert outcome.status == CLEAN, outcome.trace
    missing = set(shim.CALLS) - set(outcome.counts)
    assert missing == {"sync_file_range", "msync", "mark"}  # Python has no such call
    assert len(outcome.entries()) == sum(outcome.counts.values())
    paths = {entry.path2 or entry.path for entry in outcome.entries()}
    assert all(path.startswith(str(data)) for path in paths if path), "elsewhere does not count"


def test_the_log_says_what_became_of_the_files(server: ForkServer, data: Path) -> None:
    """If nothing is lost, the last state that the builder makes is what is on the disk."""
    outcome = run(server, "every_call", data, is_logged=True)
    assert outcome.status == CLEAN, outcome.trace
    states = list(crash_states(outcome.entries(), {}, str(data), random_count=5))
    assert tree_of(data) in [state.files for state in states]
    last = [state for state in states if not state.lost][-1]
    assert last.files == tree_of(data)


def test_calls_of_many_threads_are_all_counted_and_logged(server: ForkServer, data: Path) -> None:
    threads, writes = 8, 500
    outcome = run(server, "count_in_threads", data, is_logged=True, threads=threads, writes=writes)
    assert outcome.result == threads * writes
    logged = [entry for entry in outcome.entries() if entry.call == "pwrite"]
    assert sorted(int(entry.data) * 8 for entry in logged) == sorted(e.offset for e in logged)
    assert len({entry.offset for entry in logged}) == threads * writes


def test_a_fork_starts_with_counters_of_its_own(server: ForkServer, data: Path) -> None:
    outcome = run(server, "counts_after_fork", data)
    assert outcome.result == (0, 1)


def test_a_rule_fails_just_the_nth_call(server: ForkServer, data: Path) -> None:
    rule = Rule(2, Action.FAIL, ("write",), errno.EIO)
    assert run(server, "survive", data, rules=[rule]).result == ["1000", "EIO", "1000", "1000"]
    rule = Rule(3, Action.FAIL_FOREVER, ("write",), errno.EDQUOT)
    assert run(server, "survive", data, rules=[rule]).result == ["1000"] * 2 + ["EDQUOT"] * 2


def test_a_short_write_is_half_and_the_next_has_no_space(server: ForkServer, data: Path) -> None:
    rule = Rule(2, Action.SHORT, ("write",))
    assert run(server, "survive", data, rules=[rule]).result == ["1000", "500", "ENOSPC", "1000"]
    assert (data / "file").stat().st_size == 2500


def test_kill_leaves_what_was_done_before_the_call(server: ForkServer, data: Path) -> None:
    before, after, half = Action.KILL, Action.KILL_AFTER, Action.KILL_HALF
    for action, size in ((before, 1000), (after, 2000), (half, 1500)):
        outcome = run(server, "survive", data, rules=[Rule(2, action, ("write",))])
        assert outcome.status == KILLED
        assert (data / "file").stat().st_size == size
        (data / "file").unlink()


def test_a_delay_changes_nothing_but_the_time(server: ForkServer, data: Path) -> None:
    rule = Rule(1, Action.DELAY, ("write",), delay_us=100_000)
    outcome = run(server, "survive", data, rules=[rule])
    assert outcome.result == ["1000"] * 4
    assert outcome.seconds >= 0.1


def test_intents_and_acknowledgements_survive_the_kill(server: ForkServer, data: Path) -> None:
    clean = run(server, "publish", data, versions=3)
    assert clean.intended == clean.acknowledged == [1, 2, 3]
    reached = set()
    for nth in range(1, clean.count(ALL) + 1):
        outcome = run(server, "publish", data, versions=3, rules=[Rule(nth, calls=ALL)])
        assert outcome.status == KILLED
        assert len(outcome.intended) - len(outcome.acknowledged) == 1
        reached.add(len(outcome.acknowledged))
    assert reached == {0, 1, 2}
    beyond = [Rule(clean.count(ALL) + 1, calls=ALL)]
    assert run(server, "publish", data, versions=3, rules=beyond).status == CLEAN


def test_an_exception_is_reported_with_its_bases(server: ForkServer, data: Path) -> None:
    rule = Rule(1, Action.FAIL, ("open",), errno.EMFILE)
    outcome = run(server, "publish", data, rules=[rule])
    assert (outcome.status, outcome.error) == (RAISED, "OSError")
    assert "Exception" in outcome.bases


def test_leaks_of_files_and_threads_are_seen(server: ForkServer, data: Path) -> None:
    assert run(server, "publish", data).leaks() == ""
    leaks = run(server, "hold", data).leaks()
    assert str(data / "file") in leaks
    assert "1 threads" in leaks


def test_a_template_gives_the_directory_back(server: ForkServer, data: Path, place: Path) -> None:
    (data / "sub").mkdir()
    (data / "sub" / "kept").write_bytes(b"1")
    template = Template(data, place / "template")
    before = tree_of(data)
    run(server, "publish", data)
    assert tree_of(data) != before
    template.reset()
    assert tree_of(data) == before
    template.check()
    (data / "sub" / "kept").write_bytes(b"2")
    with pytest.raises(AssertionError, match="in place"):
        template.check()


# ---- wrong writers must be caught --------------------------------------------------------------


def faults_of(outcome: Outcome, data: Path, place: Path) -> list[State]:
    """States in which the file is no whole version, or older than one that was said to be safe."""
    assert outcome.status == CLEAN, outcome.trace
    disk = Disk(place / "pool")
    wrong = []
    for at, state in enumerate(crash_states(outcome.entries(), {}, str(data))):
        directory = place / f"state-{at}"
        disk.materialise(state, directory)
        done = max((int(mark.split()[1]) for mark in state.marks if "done" in mark), default=0)
        file = directory / "file"
        content = file.read_bytes() if file.exists() else b""
        whole = {writers.content_of(version): version for version in (1, 2)} | {b"": 0}
        is_empty = file.exists() and not content
        if is_empty or whole.get(content, -1) < done:
            wrong.append(state)
    disk.check()
    return wrong


def test_the_right_writer_has_no_bad_state(server: ForkServer, data: Path, place: Path) -> None:
    outcome = run(server, "publish", data, versions=2, is_logged=True)
    wrong = faults_of(outcome, data, place)
    assert not wrong, wrong[0]


@pytest.mark.parametrize("step", ["is_file_synced", "is_directory_synced", "is_name_kept"])
def test_a_writer_that_leaves_out_a_step_is_caught(
    server: ForkServer, data: Path, place: Path, step: str
) -> None:
    wrong_way = {step: step == "is_name_kept"}
    outcome = run(server, "publish", data, versions=2, is_logged=True, **wrong_way)
    wrong = faults_of(outcome, data, place)
    assert wrong, f"no state shows what is wrong without {step}"
    print(len(wrong), "bad states, one:", wrong[0])


def test_an_fsync_tried_again_after_it_failed_is_caught(
    server: ForkServer, data: Path, place: Path
) -> None:
    rule = Rule(1, Action.FAIL, ("fsync",), errno.EIO)
    outcome = run(server, "retry_fsync", data, rules=[rule], is_logged=True)
    wrong = [state for state in faults_of(outcome, data, place) if "done 1" in state.marks]
    assert wrong, "the data that the first fsync lost was taken to be safe"


def test_injected_failures_are_marked_in_the_log(server: ForkServer, data: Path) -> None:
    rule = Rule(1, Action.FAIL, ("fsync",), errno.EIO)
    entries = run(server, "retry_fsync", data, rules=[rule], is_logged=True).entries()
    syncs = [entry for entry in entries if entry.call == "fsync"]
    assert [entry.error for entry in syncs] == [errno.EIO, 0, 0]
    assert [bool(entry.flags & Flag.INJECTED) for entry in syncs] == [True, False, False]
    assert all(a.inode == b.inode for a, b in itertools.pairwise(syncs[:2]))
