"""A home that is being filled from a checkpoint: SIGKILL at every system call.

Whatever the moment, the home opens at the last commit, with leaves that have moved in and leaves
that are still in the checkpoint; and goes on from there. Before restore() has returned, it may also
say that it has the key-groups only in part; then the restore can be done again.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import commit_steps
import pytest
from harness import CLEAN, KILLED, ForkServer, Outcome
from shim import CHANGES, Action, Rule
from stage import SEED
from workloads import NIGHTLY

pytest.importorskip("rocksdict")

EVERY = 1 if NIGHTLY else 9  # of the calls


@pytest.fixture
def root(place: Path) -> Path:
    root = place / "root"
    root.mkdir()
    commit_steps.prepare_place(None, place=str(place / "checkpoints"))  # type: ignore[arg-type]
    return root


@pytest.fixture
def server(library: Path, root: Path) -> Iterator[ForkServer]:
    with ForkServer(library, watch=root) as server:
        yield server


@pytest.mark.parametrize("background", [False, True])
def test_a_kill_at_any_call_leaves_the_home_at_one_commit(
    server: ForkServer, root: Path, place: Path, background: bool
) -> None:
    path, checkpoints = root / "home", place / "checkpoints"

    def run(*rules: Rule) -> Outcome:
        shutil.rmtree(root)
        root.mkdir()
        return server.run(
            "commit_steps:filled",
            rules=rules,
            path=str(path),
            place=str(checkpoints),
            background=background,
        )

    clean = run()
    assert clean.status == CLEAN, clean.trace
    last = commit_steps.LAST
    assert commit_steps.check_filled(path, checkpoints, last, last) == last
    calls = clean.count(CHANGES)
    assert calls > 20
    seen = []
    for nth in range(1 + SEED % EVERY, calls + 1, EVERY):
        outcome = run(Rule(nth, Action.KILL, CHANGES))
        # The threads of RocksDB do not make equally many calls each time.
        assert outcome.status in (KILLED, CLEAN), f"call {nth} of {calls}: {outcome.trace}"
        least = max([0, *outcome.acknowledged])
        most = max([1, *outcome.intended])
        try:
            seen.append(commit_steps.check_filled(path, checkpoints, least, most))
        except Exception as error:
            error.add_note(f"killed at call {nth} of {calls}")
            raise
    print(f"{len(seen)} kills of {calls} calls; versions {sorted(set(seen))}")
    assert {1, last} <= {*seen}
