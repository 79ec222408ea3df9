"""The migration protocol under every fault that the simulator has; docs/protocol.md says how.

STATEKIT_NIGHTLY=1 runs a million seeds, and every pair of crashes.
"""

import ast
import os
import random
import re
from pathlib import Path

import pytest
from simulator import explain, run_of
from simulator.run import CLOCKS, Run
from simulator.script import Crash, ScriptedRun, events, single_crashes
from simulator.transitions import HANDLED, VISITED, CountingCoordinator, CountingParticipant

from statekit.protocol import (
    coordinator,
    handover,
    known,
    machine,
    messages,
    new_owner,
    old_owner,
    participant,
    shadow,
)

MACHINES = [
    participant,
    old_owner,
    new_owner,
    machine,
    handover,
    coordinator,
    known,
    messages,
    shadow,
]

IS_NIGHTLY = os.environ.get("STATEKIT_NIGHTLY") == "1"
SEEDS = 1_000_000 if IS_NIGHTLY else 20_000
CHUNK = 1000
BARRIERS = (0, 2, 6, 9, 12)  # events at which the checkpoint of the script is asked for
PAGE = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_fault_breaks_an_invariant(first: int) -> None:
    for seed in range(first, first + CHUNK):
        try:
            run_of(seed).play()
        except Exception:
            pytest.fail(explain(seed) or f"seed {seed} fails once, and not when it is repeated")


@pytest.mark.parametrize("clock", [*CLOCKS, None])
def test_nothing_depends_on_clocks(clock: float | None) -> None:
    """All clocks stand still, are slow, right, or jump; None: each worker has another one."""
    for seed in range(100):
        run = Run(seed)
        for index, worker in enumerate(run.workers.values()):
            worker.clock = CLOCKS[index % len(CLOCKS)] if clock is None else clock
        run.play()


@pytest.mark.parametrize("module", MACHINES)
def test_machines_have_no_clock_socket_thread_or_chance(module: object) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())  # type: ignore[attr-defined]
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    own = {"statekit.errors", "statekit.assignment", *(str(one.__name__) for one in MACHINES)}
    assert imported <= {"bisect", "collections.abc", "itertools", "typing", *own}


def test_a_run_is_the_same_every_time() -> None:
    for seed in range(40):
        first: list[str] = []
        again: list[str] = []
        run_of(seed, trace=first).play()
        run_of(seed, trace=again).play()
        assert first == again


@pytest.mark.parametrize("barrier_at", BARRIERS)
def test_any_one_crash_in_a_migration_with_a_checkpoint(barrier_at: int) -> None:
    """Source, target or coordinator; before or after each message and durable write."""
    crashes = single_crashes(events(barrier_at))
    assert len(crashes) > 900
    for crash in crashes:
        play_script((crash,), barrier_at)


def test_any_two_crashes_in_a_migration_with_a_checkpoint() -> None:
    crashes = single_crashes(events(6))
    pairs = [(one, two) for one in crashes for two in crashes if one.event <= two.event]
    assert len(pairs) > 8100
    if not IS_NIGHTLY:
        pairs = random.Random(7).sample(pairs, 600)
    for pair in pairs:
        play_script(pair, 6)


def play_script(crashes: tuple[Crash, ...], barrier_at: int) -> None:
    try:
        ScriptedRun(crashes, barrier_at).play()
    except Exception as error:
        trace: list[str] = []
        with pytest.raises(type(error)):
            ScriptedRun(crashes, barrier_at, trace=trace).play()
        pytest.fail("\n".join([*trace, f"{crashes}: {error}"]))


# ---- What was visited


def table_of(title: str) -> set[tuple[str, ...]]:
    """The rows of the table under this title of docs/protocol.md: the `code` in them."""
    section = PAGE.read_text().split(f"### {title}\n")[1].split("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows
    return {tuple(re.findall(r"`(\w+)`", row.rsplit("|", 2)[0])) for row in rows}


@pytest.fixture(scope="module")
def visited() -> None:
    for seed in range(4000):
        run_of(
            seed, participant_class=CountingParticipant, coordinator_class=CountingCoordinator
        ).play()
    visit_what_chance_seldom_does()
    for counter in (VISITED, HANDLED):
        for what, count in sorted(counter.items()):
            print(*what, count)


def visit_what_chance_seldom_does() -> None:
    """Visits transitions that need a rare order of events: once in some 10,000 runs."""
    source = CountingParticipant("a")
    source.own([0, 1])
    target = CountingParticipant("b")
    target.own([])
    for leaf in (0, 1):
        target.on("a", source.begin(f"m{leaf}", "b", [leaf])[1].message)
    assert target.declare_dead("a")[1] == (0, 1)


@pytest.mark.usefixtures("visited")
def test_transitions_of_a_leaf_are_those_of_the_documentation_and_all_were_visited() -> None:
    changes = {what for what in VISITED if what[1] != what[2]}
    assert changes == table_of("Transitions of a leaf")


@pytest.mark.usefixtures("visited")
def test_every_handler_was_visited() -> None:
    handled = {(machine, what) for machine, what, _ in HANDLED}
    told = {("participant", kind.__name__) for kind in participant._HANDLERS}
    told |= {("coordinator", kind.__name__) for kind in coordinator._HANDLERS}
    told |= {("participant", "Fenced"), ("coordinator", "Fenced")}
    assert handled == told


@pytest.mark.usefixtures("visited")
def test_every_answer_of_the_documentation_was_given() -> None:
    assert table_of("Answers") <= set(HANDLED)
