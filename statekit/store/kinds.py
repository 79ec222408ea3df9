"""The kinds of state and the residencies of leaves: names in Python, numbers in C."""

from typing import Literal, TypeAlias

from statekit._native import lib
from statekit.errors import native_error

Kind: TypeAlias = Literal["i64", "f64", "bytes", "list", "map", "nested"]

KIND_NUMBERS: dict[str, int] = {
    name: getattr(lib, f"SK_{name.upper()}")
    for name in ("i64", "f64", "bytes", "list", "map", "nested")
}
KIND_NAMES: dict[int, str] = {number: name for name, number in KIND_NUMBERS.items()}

Residency: TypeAlias = Literal["whole", "partial", "absent", "away"]

RESIDENCIES: tuple[Residency, ...] = ("whole", "partial", "absent", "away")  # by number


def residency_name(answer: int) -> Residency:
    """What a native function answered: a residency, or a negated status."""
    if answer < 0:
        raise native_error(-answer)
    return RESIDENCIES[answer]
