"""Residencies and gates of leaves, clocks: names in Python, numbers in C."""

from typing import Literal, TypeAlias

from statekit._native import lib
from statekit.errors import ArgumentError, native_error, shorten

Clock: TypeAlias = Literal["processing", "event"]

CLOCKS: dict[str, int] = {"processing": lib.SK_PROCESSING_TIME, "event": lib.SK_EVENT_TIME}
NO_TIME = -(2**63)  # SK_NO_TIME: the time is not known yet

Residency: TypeAlias = Literal["whole", "partial", "absent", "away"]

RESIDENCIES: tuple[Residency, ...] = ("whole", "partial", "absent", "away")  # by number


def residency_filter(*wanted: Residency) -> bytes:
    """A table for bytes.translate() of residencies by number: 1 for these, 0 for all others."""
    table = bytearray(256)
    for residency in wanted:
        table[RESIDENCIES.index(residency)] = 1
    return bytes(table)


Gate: TypeAlias = Literal["open", "shut", "expected"]

GATES: tuple[Gate, ...] = ("open", "shut", "expected")  # by number


def clock_number(clock: str) -> int:
    try:
        return CLOCKS[clock]
    except (KeyError, TypeError):
        raise ArgumentError(
            f"{shorten(clock)} is no clock. Use one of {', '.join(CLOCKS)}."
        ) from None


def residency_name(answer: int) -> Residency:
    """The residency that a native function answered. Raises if the answer is a negated status."""
    if answer < 0:
        raise native_error(-answer)
    return RESIDENCIES[answer]
