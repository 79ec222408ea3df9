"""Rescales: what is known of one, while it runs and afterwards. The history of a job has all.

phase       what happens                                                     may be aborted
waiting     another one has its turn                                         yes
starting    new processes come, and their channels are opened                yes
copying     the state is copied, or a checkpoint is taken                    yes
moving      key-groups go from old owners to new ones, move after move       yes
arriving    until the last leaf is where it belongs                          no
leaving     tasks that have nothing any more end                             no
returning   it was aborted: what has moved goes back
"""

from dataclasses import asdict, dataclass, field
from time import monotonic, time
from typing import Any

from statekit.engine.strategies import How

BEFORE_MOVES = ("waiting", "starting", "copying")


@dataclass
class Rescale:
    number: int
    stage: str
    goal: str  # "4 workers", "without count-1", "key-groups 3-9 to count-1"
    cause: str  # who wanted it
    how: How
    before: int  # tasks of the stage
    after: int = 0  # so far
    end: str = ""  # "done", "aborted", "superseded" or "failed"; "" while it runs
    reason: str = ""  # of an end that is not "done"
    began: float = field(default_factory=time)  # seconds since 1970
    phase: str = "waiting"
    seconds: dict[str, float] = field(default_factory=dict)  # by phase that is over
    moves: int = 0
    groups: int = 0  # that are to move
    moved: int = 0  # key-groups that have moved
    bytes: int = 0  # of state, sent
    bytes_copied: int = 0  # of these, while the old owner went on
    backlog: int = 0  # bytes of records that waited for a hand-over at one task, at most
    wanted_end: str = ""  # somebody wants it to end early: "aborted" or "superseded"
    _since: float = field(default_factory=monotonic)

    @property
    def progress(self) -> float:
        """Which share of the key-groups has moved; 1 if none is to."""
        return self.moved / self.groups if self.groups else float(bool(self.end))

    @property
    def may_be_cut_short(self) -> bool:
        return not self.end and self.phase in (*BEFORE_MOVES, "moving")

    def enter(self, phase: str) -> None:
        self._pass(monotonic())
        self.phase = phase

    def finish(self, end: str, reason: str = "") -> None:
        self._pass(monotonic())
        self.end, self.reason, self.phase = end, reason, ""

    def _pass(self, now: float) -> None:
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self._since = now

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = asdict(self)
        del plain["_since"], plain["how"], plain["wanted_end"]
        how = {name: value for name, value in self.how._asdict().items() if value is not None}
        seconds = {name: round(value, 4) for name, value in self.seconds.items()}
        return plain | how | {"seconds": seconds, "progress": round(self.progress, 3)}

    def __str__(self) -> str:
        shown = (
            f"{self.stage}: {self.before} -> {self.after} workers, {self.moved} key-groups moved"
        )
        return f"{shown} in {sum(self.seconds.values()):.1f} s ({self.how.strategy})"
