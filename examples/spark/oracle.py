"""The same statistics from whole series: plain Python without state, and DuckDB where it has them.

Nothing of sensors.py is used here but its constants.
"""

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import sensors

READING = tuple[int, str, float]  # seq, time as text, value


def outputs(sensor: str, series: Sequence[READING]) -> list[tuple[Any, ...]]:
    """What the job must have put out for a series: (seq, value, filtered, predicted, ...)."""
    values = [value for _, _, value in series]
    x, variance = 0.0, sensors.FIRST_VARIANCE
    sample: list[list[Any]] = []
    largest: dict[int, int] = {}
    found = []
    for at, (seq, _, value) in enumerate(series):
        n = at + 1
        prior = variance + sensors.PROCESS_NOISE
        gain = prior / (prior + sensors.SENSOR_NOISE)
        x, variance = x + gain * (value - x), (1 - gain) * prior
        whole = n // sensors.BLOCK * sensors.BLOCK
        block = values[whole - sensors.BLOCK : whole] if whole else []
        _sample(sample, sensor, n, value)
        register, rank = _rank(value)
        largest[register] = max(rank, largest.get(register, 0))
        found.append(
            (
                seq,
                value,
                x,
                _next(values[n - sensors.WINDOW : n]) if n > sensors.WINDOW else None,
                sum(block, 0.0) / sensors.BLOCK if block else None,
                sum(n * (2 * count - 1) for _, count in sample) - n * (sensors.SLOTS - len(sample)),
                math.floor(
                    sensors.LOGLOG
                    * sensors.REGISTERS
                    * 2 ** (sum(largest.values()) / sensors.REGISTERS)
                ),
            )
        )
    return found


def states(sensor: str, series: Sequence[READING]) -> dict[str, Any]:
    """What the state of a sensor must be at the end, as a table shows it."""
    values = [value for _, _, value in series]
    x, variance = 0.0, sensors.FIRST_VARIANCE
    sample: list[list[Any]] = []
    largest: dict[int, int] = {}
    for n, value in enumerate(values, 1):
        prior = variance + sensors.PROCESS_NOISE
        gain = prior / (prior + sensors.SENSOR_NOISE)
        x, variance = x + gain * (value - x), (1 - gain) * prior
        _sample(sample, sensor, n, value)
        register, rank = _rank(value)
        if rank:
            largest[register] = max(rank, largest.get(register, 0))
    whole = len(values) // sensors.BLOCK * sensors.BLOCK
    block = values[whole - sensors.BLOCK : whole]
    return {
        "seen": len(values),
        "kalman": {"x": x, "variance": variance},
        "window": values[-sensors.WINDOW :],
        "block": {
            "total": sum(values[whole:], 0.0),
            "count": len(values) - whole,
            "average": sum(block, 0.0) / sensors.BLOCK if block else None,
        },
        "slots": [{"value": value, "count": count} for value, count in sample],
        "registers": largest,
        "ranks": sum(largest.values()),
    }


def _next(last: Sequence[float]) -> float:
    """The value at W of the line of least squares through (0, z0) ... (W - 1, zW-1)."""
    width = len(last)
    centre = (width - 1) / 2
    level = sum(last) / width
    rise = sum((k - centre) * z for k, z in enumerate(last)) / (width * (width**2 - 1) / 12)
    return level + rise * (width - centre)


def _sample(sample: list[list[Any]], sensor: str, n: int, value: float) -> None:
    known = [one for one in sample if one[0] == value]
    if known:
        known[0][1] += 1
    elif len(sample) < sensors.SLOTS:
        sample.append([value, 1])
    else:
        sample[zlib.crc32(f"{sensor}:{n}".encode()) % sensors.SLOTS] = [value, 1]


def _rank(value: float) -> tuple[int, int]:
    digest = hashlib.sha1(str(value).encode()).digest()
    number = int.from_bytes(digest[:4], "little")
    high = f"{number >> 10:022b}"
    rank = len(high) - len(high.rstrip("0")) if "1" in high else 31
    return number % sensors.REGISTERS, rank


def exact(series: Sequence[READING]) -> tuple[int, int]:
    """What the sketches estimate: how many values are distinct, and the second moment."""
    counts = Counter(value for _, _, value in series)
    return len(counts), sum(count**2 for count in counts.values())


# Averages, regressions and distinct counts as DuckDB computes them from the readings alone. It adds
# up in another order, so that the last bits may differ.
SQL = f"""
    with numbered as (
        select *, row_number() over (partition by sensor order by seq) as i from readings
    ), blocks as (
        select sensor, (i - 1) // {sensors.BLOCK} + 1 as block, avg(value) as average
        from numbered group by all having count(*) = {sensors.BLOCK}
    ), lines as (
        select sensor, seq, i, value,
            regr_slope(value, i) over w as slope, regr_intercept(value, i) over w as intercept
        from numbered
        window w as (partition by sensor order by i
                     rows between {sensors.WINDOW - 1} preceding and current row)
    )
    select lines.sensor, lines.seq,
        case when i > {sensors.WINDOW} then slope * (i + 1) + intercept end as predicted,
        blocks.average
    from lines left join blocks
        on blocks.sensor = lines.sensor and blocks.block = lines.i // {sensors.BLOCK}
    order by 1, 2
"""
