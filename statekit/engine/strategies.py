"""Strategies: how the state of key-groups goes from an old owner to a new one.

All of them share the engine's transport and its order of records: they differ in this table, and
nowhere else. A stage may also be scaled by restarting the job (coordinator.py), which is none of
these.
"""

from typing import NamedTuple

from statekit.errors import EngineError
from statekit.migration.strategies import Strategy as LibraryStrategy


class Strategy(NamedTuple):
    library: LibraryStrategy  # what KVProvider.migrate() is told
    is_complete_first: bool  # the new owner begins only when all of the state is there
    text: str


STRATEGIES = {
    "prioritised": Strategy(
        "prioritised", False, "what is touched comes first, the rest in the background"
    ),
    "on_demand": Strategy(
        "on_demand", False, "only what is touched comes, and the rest when its old owner leaves"
    ),
    "order_unaware": Strategy(
        "gradual", False, "in the order of its leaves; what is touched waits for its turn"
    ),
    "all_at_once": Strategy(
        "all_at_once", True, "records of the key-groups wait until all of their state is there"
    ),
}  # fmt: skip
RESTART = "restart"  # stop at a checkpoint, and begin again from it with other tasks


def check_strategy(name: str) -> str:
    if name not in STRATEGIES and name != RESTART:
        raise EngineError(
            f"there is no strategy {name!r}. There are {', '.join([*STRATEGIES, RESTART])}."
        )
    return name
