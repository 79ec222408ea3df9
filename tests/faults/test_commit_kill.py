"""Commits of a RocksDB home: SIGKILL at every system call, and loss of power at any moment.

Whatever the moment, the home opens at exactly one version, the last acknowledged one or the one
that was being committed, and goes on from there. What was evicted since then has left no trace.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import commit_steps
import pytest
from crash_states import Disk, crash_states
from harness import CLEAN, KILLED, ForkServer, Outcome, tree_of
from shim import CHANGES, Action, Rule
from stage import SEED, promised, some_of
from workloads import NIGHTLY

STATES = 2_000 if NIGHTLY else 60  # of each way to commit
EVERY = 1 if NIGHTLY else 4  # every fourth of the calls is tried


class Home:
    """A home at version 1, and a process that commits to it, again and again."""

    def __init__(self, library: Path, place: Path, in_phases: bool) -> None:
        self.path = place / "root" / "home"
        self._start = place / "start"
        self._in_phases = in_phases
        commit_steps.prepare(None, path=str(self.path))  # type: ignore[arg-type]
        shutil.copytree(self.path.parent, self._start)
        self.files = tree_of(self._start)
        self.server = ForkServer(library, watch=self.path.parent)

    def run(self, *rules: Rule, is_logged: bool = False) -> Outcome:
        shutil.rmtree(self.path.parent)
        shutil.copytree(self._start, self.path.parent)  # RocksDB changes files in place
        return self.server.run(
            "commit_steps:commits",
            rules=rules,
            is_logged=is_logged,
            path=str(self.path),
            in_phases=self._in_phases,
        )


@pytest.fixture(params=[False, True], ids=["at once", "in phases"])
def home(request: pytest.FixtureRequest, library: Path, place: Path) -> Iterator[Home]:
    (place / "root").mkdir()
    home = Home(library, place, request.param)
    yield home
    home.server.close()


def test_a_kill_at_any_call_leaves_the_home_at_one_commit(home: Home) -> None:
    clean = home.run()
    assert clean.status == CLEAN, clean.trace
    assert commit_steps.check(home.path, commit_steps.LAST, commit_steps.LAST)
    calls = clean.count(CHANGES)
    assert calls > 20
    seen = []
    for nth in range(1 + SEED % EVERY, calls + 1, EVERY):
        outcome = home.run(Rule(nth, Action.KILL, CHANGES))
        # RocksDB's own threads do not make the same number of calls each time.
        assert outcome.status in (KILLED, CLEAN), f"call {nth} of {calls}: {outcome.trace}"
        at_least = max([1, *outcome.acknowledged])
        at_most = max([1, *outcome.intended])
        seen.append(commit_steps.check(home.path, at_least, at_most))
    print(f"{len(seen)} kills of {calls} calls; versions {sorted(set(seen))}")
    assert len(set(seen)) == commit_steps.LAST


def test_every_state_after_power_loss_opens_at_a_commit(home: Home, place: Path) -> None:
    outcome = home.run(is_logged=True)
    assert outcome.status == CLEAN, outcome.trace
    states = list(
        crash_states(
            outcome.entries(),
            home.files,
            str(home.path.parent),
            random_count=400 if NIGHTLY else 20,
            seed=SEED,
        )
    )
    chosen = some_of(states, STATES)
    print(f"{len(chosen)} of {len(states)} states, seed {SEED}")
    disk = Disk(place / "pool")
    checked = 0
    for at, state in enumerate(chosen):
        folder = place / "state"
        disk.materialise(state, folder)
        if not is_ordered(folder / "home"):
            shutil.rmtree(folder)
            continue
        checked += 1
        copy = place / "copy"  # opening changes files, and these ones are hard links
        shutil.copytree(folder, copy)
        try:
            commit_steps.check(
                copy / "home", promised(state, "done", 1), promised(state, "intent", 1)
            )
        except Exception as error:
            raise AssertionError(f"state {at}: {state}") from error
        shutil.rmtree(folder)
        shutil.rmtree(copy)
    disk.check()
    print(f"{checked} states")
    assert checked > len(chosen) // 2


def is_ordered(home: Path) -> bool:
    """Whether the file that CURRENT names is there: it was created before CURRENT was renamed.

    RocksDB relies on an order: if a file system keeps a renaming, it also keeps the creations
    before it in that directory. File systems with a journal do; the crash-state builder knows no
    such order.
    """
    return (home / (home / "CURRENT").read_text().strip()).exists()
