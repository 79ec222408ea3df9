"""A stage for a step of statekit: a fork server ready for it, and a directory to start from."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import scenarios
from crash_states import State, crash_states
from harness import CLEAN, ForkServer, Outcome, Template
from shim import Rule
from workloads import Workload

SEED = 20240517


class Case(NamedTuple):
    """A step, and what is there before it."""

    step: str
    taken: int
    arguments: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    is_changed: bool = True
    pack_bytes: int | None = None  # small ones: several packs in a checkpoint

    def __str__(self) -> str:
        kind = "full-" if self.arguments.get("is_full") else ""
        return f"{kind}{self.step}-after-{self.taken}"


FULL = {"is_full": True}
CASES = (
    Case("checkpoint", taken=0),
    Case("checkpoint", taken=2, arguments=FULL),
    Case("checkpoint", taken=2),
    Case("publish_parts", taken=2),
    Case("collect", taken=3, is_changed=False),
    Case("compact_and_collect", taken=3, is_changed=False),
)
LATER_CASES = (Case("checkpoint_and_collect", taken=2), Case("checkpoint", taken=8))


class Stage:
    """A fork server prepared for a case, and its directory, which every run begins from anew."""

    def __init__(
        self, library: Path, place: Path, case: Case, workload: Workload, **options: Any
    ) -> None:
        self.case = case
        self.workload = workload
        self.root = place / "data"
        self.root.mkdir()
        self.url = str(self.root / "checkpoints")
        self.server = ForkServer(
            library,
            watch=self.root,
            prepare="scenarios:prepare",
            url=self.url,
            workload=workload,
            taken=case.taken,
            is_changed=case.is_changed,
            pack_bytes=case.pack_bytes,
            **options,
        )
        self.template = Template(self.root, place / "template")

    def run(self, *rules: Rule, **options: Any) -> Outcome:
        self.template.reset()
        step = f"scenarios:{self.case.step}"
        return self.server.run(step, rules=rules, **self.case.arguments, **options)

    def check(self, outcome: Outcome, goes_on: bool = True) -> None:
        """Checks I1, I3 and I5 of what a run left, and that work goes on from there (I7)."""
        at_least = max([self.case.taken, *outcome.acknowledged])
        at_most = max([self.case.taken, *outcome.intended])
        version = scenarios.check_newest(self.url, self.workload, at_least, at_most)
        if goes_on:
            scenarios.check_goes_on(self.url, self.workload, version)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        self.template.check()


# ---- power loss: the states of a logged run ----


def states_of(stage: Stage, outcome: Outcome, random_count: int) -> list[State]:
    """All states, for a log that began with the stage's template."""
    assert outcome.status == CLEAN, outcome.trace
    return list(
        crash_states(
            outcome.entries(),
            stage.template.files,
            str(stage.root),
            random_count=random_count,
            seed=SEED,
        )
    )


def some_of(states: list[State], count: int) -> list[State]:
    """`count` of them, seeded, the simplest losses (of 0, 1 and 2 operations) first."""
    simple = [state for state in states if len(state.lost) <= 1]
    others = [state for state in states if len(state.lost) > 1]
    rng = random.Random(SEED)
    rng.shuffle(simple)
    rng.shuffle(others)
    return [*simple[: count // 2], *others, *simple[count // 2 :]][:count]


def promised(state: State, word: str, otherwise: int) -> int:
    """The newest version that a mark with this word speaks of."""
    marks = [mark.split() for mark in state.marks]
    return max([otherwise, *(int(mark[1]) for mark in marks if mark[0] == word)])


def check_state(stage: Stage, state: State, directory: Path) -> int:
    taken = stage.case.taken
    at_least, at_most = promised(state, "done", taken), promised(state, "intent", taken)
    return scenarios.check_newest(str(directory / "checkpoints"), stage.workload, at_least, at_most)
