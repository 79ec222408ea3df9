"""What is known of a sensor: five statistics under each key, in one function of a StatefulOp.

README.md defines them. Each needs a little state, of another shape each: two numbers, a list, a
record with an optional field, a list of records, a map. oracle.py computes the same from whole
series, without any state.
"""

import hashlib
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import statekit.spark as sks

PROCESS_NOISE, SENSOR_NOISE, FIRST_VARIANCE = 0.125, 0.32, 30.0
WINDOW = 10  # readings of the regression
BLOCK = 10  # readings of an average
SLOTS = 10  # values whose frequency is followed
REGISTERS = 1 << 10  # of the distinct count
LOGLOG = 0.79402

INPUT = "sensor string, seq long, at timestamp, value double"
OUTPUT = (
    "sensor string, seq long, at timestamp, value double, filtered double, predicted double, "
    "average double, moment long, distinct long"
)


class Kalman(NamedTuple):
    x: float = 0.0
    variance: float = FIRST_VARIANCE


class Block(NamedTuple):
    total: float = 0.0
    count: int = 0
    average: float | None = None  # of the block before


class Slot(NamedTuple):
    value: float
    count: int


STATE = {
    "seen": int,
    "kalman": Kalman,
    "window": list[float],
    "block": Block,
    "slots": list[Slot],
    "registers": dict[int, int],
    "ranks": int,  # the sum of all registers
}


def on_key(sensor: str, rows: Any, st: Any) -> Iterator[tuple[Any, ...]]:
    # Rows of several files may come in any order, and all of this depends on it.
    kalman, block = st.kalman.get(Kalman()), st.block.get(Block())
    window, slots = list(st.window), list(st.slots)
    for row in sorted(rows, key=lambda row: row.seq):
        n = st.seen.add(1)
        kalman = filtered(kalman, row.value)
        window = [*window, row.value][-WINDOW:]
        block = averaged(block, row.value)
        count_value(slots, sensor, n, row.value)
        register, rank = hashed(row.value)
        if rank > (known := st.registers.get(register, 0)):
            st.registers[register] = rank
            st.ranks.add(rank - known)
        yield (
            sensor,
            row.seq,
            row.at,
            row.value,
            kalman.x,
            predicted(window) if n > WINDOW else None,
            block.average,
            sum(n * (2 * slot.count - 1) for slot in slots) - n * (SLOTS - len(slots)),
            int(LOGLOG * REGISTERS * 2 ** (st.ranks.get(0) / REGISTERS)),
        )
    st.kalman.set(kalman)
    st.block.set(block)
    st.window[:] = window
    st.slots[:] = slots


def filtered(before: Kalman, value: float) -> Kalman:
    variance = before.variance + PROCESS_NOISE
    gain = variance / (variance + SENSOR_NOISE)
    return Kalman(before.x + gain * (value - before.x), (1 - gain) * variance)


def predicted(window: list[float]) -> float:
    """The next value, on the line of least squares through the window."""
    middle = (WINDOW - 1) / 2
    mean = sum(window) / WINDOW
    slope = sum((at - middle) * value for at, value in enumerate(window)) / (
        WINDOW * (WINDOW**2 - 1) / 12
    )
    return mean + slope * (WINDOW - middle)


def averaged(block: Block, value: float) -> Block:
    total, count = block.total + value, block.count + 1
    if count == BLOCK:
        return Block(average=total / BLOCK)
    return Block(total, count, block.average)


def count_value(slots: list[Slot], sensor: str, n: int, value: float) -> None:
    for at, slot in enumerate(slots):
        if slot.value == value:
            slots[at] = Slot(value, slot.count + 1)
            return
    if len(slots) < SLOTS:
        slots.append(Slot(value, 1))
    else:
        slots[zlib.crc32(f"{sensor}:{n}".encode()) % SLOTS] = Slot(value, 1)


def hashed(value: float) -> tuple[int, int]:
    """The register of a value, and the rank that it counts with there."""
    bits = int.from_bytes(hashlib.sha1(repr(value).encode()).digest()[:4], "little")
    rest = bits >> 10
    return bits % REGISTERS, (rest & -rest).bit_length() - 1 if rest else 31


def make_op(place: str) -> sks.StatefulOp:
    return sks.StatefulOp(
        on_key,
        key="sensor",
        output=OUTPUT,
        state=STATE,
        path=f"{place}/state",
        output_path=f"{place}/readings",
    )
