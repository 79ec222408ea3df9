"""Strategies: how the state of key-groups goes from old owners to new ones.

All of them share the engine's transport and its order of records, and differ in this table only.
Each stands for a paper or a system; `simpler` says what it leaves out. (`restart`, which stops and
starts the whole job, has no row: coordinator.py.)
"""

from typing import NamedTuple

from statekit.errors import EngineError, shorten
from statekit.migration.strategies import Whole


class Strategy(NamedTuple):
    library: Whole  # what KVProvider.fetch_from() is told
    step: int  # key-groups of one move; the next begins when all of the last is there. 0: all
    copied: str  # what the new owner has before the first move: "", "shadow" or "checkpoint"
    is_complete_first: bool  # it begins with key-groups when all of their state is there
    text: str
    simpler: str  # than what it stands for


STRATEGIES = {
    "seamless": Strategy(
        "prioritised", 2, "shadow", False,
        "everything is copied while the old owner goes on; then a few key-groups at a time, with "
        "what has changed since",
        "",
    ),
    "prioritised": Strategy(
        "prioritised", 0, "", False,
        "what is touched comes first, the rest in the background",
        "",
    ),
    "on_demand": Strategy(
        "on_demand", 0, "", False,
        "only what is touched comes, and the rest when its old owner leaves",
        "",
    ),
    "meces": Strategy(
        "prioritised", 16, "", False,
        "key-groups go in batches; what is touched is fetched at once, a leaf at a time",
        "Meces: batches follow the numbers of key-groups, not how hot they are",
    ),
    "fluid": Strategy(
        "prioritised", 1, "", True,
        "one key-group after the other; its records wait until its state is there",
        "Megaphone: the coordinator tells the routing, and not a stream of its own",
    ),
    "batched": Strategy(
        "prioritised", 8, "", True,
        "the same, several key-groups at a time",
        "Megaphone, batched: as above",
    ),
    "proactive": Strategy(
        "prioritised", 0, "checkpoint", True,
        "a checkpoint is taken; then all at once, and only what has changed since is sent",
        "Rhino: the checkpoint is read from the disk of this machine, and not replicated before",
    ),
    "pause": Strategy(
        "prioritised", 0, "", True,
        "all at once: records of these key-groups wait until all of their state is there",
        "SEEP: state comes from the old owner itself, and not from a backup upstream",
    ),
    "order_unaware": Strategy(
        "order_unaware", 0, "", False,
        "in the order of its leaves; what is touched waits for its turn",
        "",
    ),
}  # fmt: skip
DEFAULT = "seamless"
RESTART = "restart"  # stop at a checkpoint, and begin again from it with other tasks
STEP_MAX = 1 << 16
GAP_S_MAX = 3600.0


class How(NamedTuple):
    """A strategy and its parameters, as a user gives them."""

    strategy: str = DEFAULT
    step: int | None = None  # key-groups of one move, instead of the strategy's; 0: all
    gap_s: float = 0.0  # between two moves
    pace: int | None = None  # bytes a second of a shadow

    @property
    def row(self) -> Strategy:
        row = STRATEGIES[self.strategy]
        return row if self.step is None else row._replace(step=self.step)

    def check(self) -> None:
        """EngineError if it cannot be."""
        if self.strategy not in STRATEGIES and self.strategy != RESTART:
            raise EngineError(
                f"there is no strategy {shorten(self.strategy)}. There are "
                f"{', '.join([*STRATEGIES, RESTART])}."
            )
        if self.strategy == RESTART and self[1:] != How()[1:]:
            raise EngineError("strategy 'restart' has no step, gap or pace: leave them out.")
        if self.step is not None and (type(self.step) is not int or not 0 <= self.step <= STEP_MAX):
            raise EngineError(f"step={shorten(self.step)}: pass a number of key-groups; 0: all.")
        if type(self.gap_s) not in (int, float) or not 0 <= self.gap_s <= GAP_S_MAX:
            raise EngineError(f"gap={shorten(self.gap_s)}: pass seconds, up to {GAP_S_MAX:.0f}.")
        if self.pace is not None and (type(self.pace) is not int or self.pace < 1):
            raise EngineError(f"pace={shorten(self.pace)}: pass bytes a second, 1 or more.")
        if self.pace is not None and self.row.copied != "shadow":
            raise EngineError(f"pace is for strategies that copy first; {self.strategy!r} is none.")
