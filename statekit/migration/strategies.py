"""The strategies of a hand-over: when ownership moves, and how state follows.

whole   all key-groups are owned by the new owner when fetch_from() returns

    prioritised            leaves on demand; the rest by a stream, hot leaves first. The stream
                           gives way to those who wait
    on_demand              on demand only. Nothing comes that nobody asks for
    order_unaware          the stream only, leaf after leaf in their order
    order_unaware_batched  the same; leaves become usable in batches of a key-group's size
    all_at_once            the stream only, and fetch_from() returns when everything is here

stepped   ownership moves in steps; what has not had its turn is still the old owner's

    fluid                  one key-group a step; the next step begins when it is all here
    batched                the same, a number of key-groups a step
    seamless               everything is copied first, while the old owner goes on; then steps of
                           a few key-groups, with what has changed since (shadow.py)
"""

from typing import Literal, TypeAlias, get_args

from statekit.errors import ArgumentError, shorten

Whole: TypeAlias = Literal[
    "prioritised",
    "on_demand",
    "order_unaware",
    "order_unaware_batched",
    "all_at_once",
    "gradual",  # the former names of the two above
    "gradual_batched",
]
Stepped: TypeAlias = Literal["fluid", "batched", "seamless"]
Strategy: TypeAlias = Whole | Stepped

ALIASES = {"gradual": "order_unaware", "gradual_batched": "order_unaware_batched"}
WHOLE: tuple[str, ...] = tuple(name for name in get_args(Whole) if name not in ALIASES)
STEPPED: tuple[str, ...] = get_args(Stepped)
STRATEGIES = WHOLE + STEPPED

FETCHING = ("prioritised", "on_demand")  # touching a leaf asks for it

TIMEOUT_S = 10.0  # before a peer that does not answer counts as lost, unless told

#: Key-groups of one step, unless told.
STEP_GROUPS = {"fluid": 1, "batched": 8, "seamless": 2}


def canonical(strategy: str) -> str:
    """The strategy's present name. ArgumentError if there is no such strategy."""
    found = ALIASES.get(strategy, strategy) if isinstance(strategy, str) else strategy
    if found not in STRATEGIES:
        raise ArgumentError(
            f"{shorten(strategy)} is no strategy. Use one of {', '.join(STRATEGIES)}."
        )
    return found


def step_size(strategy: str, step: int | None) -> int:
    """How many key-groups one step has. ArgumentError if that cannot be."""
    if step is None:
        return STEP_GROUPS[strategy]
    if strategy == "fluid" and step != 1:
        raise ArgumentError(
            f"a step of {shorten(step)} key-groups is none of strategy 'fluid', which moves one at "
            "a time. Use strategy='batched'."
        )
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise ArgumentError(
            f"{shorten(step)} is no number of key-groups that a step can have. Use 1 or more."
        )
    return step
