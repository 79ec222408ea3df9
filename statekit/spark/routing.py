"""Which task has which key: the key-group of each row, computed by the JVM without any Python.

Spark's built-in xxhash64() is the routing hash of statekit (keys.py): seed 42, ints as long, and
for several columns the hash of one is the seed of the next. So

    key-group   shiftrightunsigned(xxhash64(columns), 64 - log2(G))
    task        ((key-group + 1) * n - 1) div G     of n tasks: those of assign(G, n)

A task never has to trust that: its provider refuses keys of key-groups that it does not own.

Rows are sent to task p exactly by repartitionById(), which Spark has from 4.1 on. Before that
there is only repartition(n, column), which sends a row to pmod(murmur3(column), n). So there the
column is a number whose murmur3 leads to p; markers_of() finds one for each task.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from statekit.errors import ArgumentError, KeyTypeError

_LETTERS = {
    "tinyint": "i",
    "smallint": "i",
    "int": "i",
    "bigint": "i",
    "string": "s",
    "binary": "b",
}
_DECIMAL_DIGITS_MAX = 18  # any number of so many digits fits into 64 bits


class Routing(NamedTuple):
    """How the rows of a batch are sent to tasks."""

    key: tuple[str, ...]  # columns
    key_type: str  # as keys.py writes it: "s", "(si)"
    casts: tuple[tuple[str, str], ...]  # column -> type, where the column has another type


def plan_routing(schema: Any, key: Sequence[str]) -> Routing:
    """KeyTypeError if a column is missing, or its values cannot be keys."""
    fields = {field.name: field for field in schema.fields}
    letters, casts = "", []
    for name in key:
        if name not in fields:
            raise KeyTypeError(
                f"there is no column {name!r} to be the key. The batch has "
                f"{', '.join(fields) or 'no columns'}."
            )
        text = fields[name].dataType.simpleString()
        letter = _letter(text)
        if letter is None:
            raise KeyTypeError(
                f"the column {name!r} is of type {text}, and no key. Keys are integers, strings "
                f"and binary; of decimals, whole numbers of up to {_DECIMAL_DIGITS_MAX} digits. "
                "Make one of it first, for example with F.unix_micros() of a timestamp, "
                "F.unix_date() of a date or .cast('string')."
            )
        letters += letter
        wanted = {"i": "bigint", "s": "string", "b": "binary"}[letter]
        if text != wanted:
            casts.append((name, wanted))
    return Routing(tuple(key), letters if len(key) == 1 else f"({letters})", tuple(casts))


def _letter(text: str) -> str | None:
    """The key letter of a Spark type; None if its values are no keys."""
    if text.startswith(("char(", "varchar(")):
        return "s"
    if text.startswith("decimal("):
        digits, _, scale = text[len("decimal(") : -1].partition(",")
        return "i" if int(scale) == 0 and int(digits) <= _DECIMAL_DIGITS_MAX else None
    return _LETTERS.get(text)


def check_event_time(schema: Any, name: str) -> None:
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    if types.get(name) not in ("timestamp", "timestamp_ntz"):
        raise ArgumentError(
            f"event_time={name!r} is {types.get(name, 'no column of the batch')}. Name the column "
            "of timestamps that withWatermark() was given."
        )


def route(df: Any, routing: Routing, key_groups: int, tasks: int) -> Any:
    """The rows, each in the partition of the task that has its key."""
    from pyspark.sql import functions as F  # noqa: N812

    for name, wanted in routing.casts:
        df = df.withColumn(name, F.col(quoted(name)).cast(wanted))
    hashed = F.xxhash64(*(F.col(quoted(name)) for name in routing.key))
    # A shift by 64 would be one by 0: of one key-group everything is in the first.
    bits = key_groups.bit_length() - 1
    group = F.shiftrightunsigned(hashed, 64 - bits) if bits else F.lit(0).cast("bigint")
    task = (((group + 1) * tasks - 1) / key_groups).cast("int")  # exact: far below 2**53
    if hasattr(df, "repartitionById"):
        return df.repartitionById(tasks, task)
    markers = F.array(*(F.lit(marker) for marker in markers_of(tasks)))
    return df.repartition(tasks, F.element_at(markers, task + 1))


def quoted(name: str) -> str:
    """A column by exactly this name, dots and all."""
    return "`" + name.replace("`", "``") + "`"


def markers_of(tasks: int) -> list[int]:
    """For each task a number that Spark's hash partitioning sends there."""
    found: dict[int, int] = {}
    at = 0
    while len(found) < tasks:
        found.setdefault(murmur3_int(at) % tasks, at)
        at += 1
    return [found[task] for task in range(tasks)]


def murmur3_int(value: int, seed: int = 42) -> int:
    """Spark's hash() of a non-negative int, signed.

    >>> murmur3_int(0), murmur3_int(1), murmur3_int(42)
    (933211791, -559580957, 29417773)
    """
    mask = 0xFFFFFFFF
    k = value * 0xCC9E2D51 & mask
    k = (k << 15 | k >> 17) & mask
    k = k * 0x1B873593 & mask
    h = seed ^ k
    h = (h << 13 | h >> 19) & mask
    h = (h * 5 + 0xE6546B64) & mask
    h ^= 4
    h ^= h >> 16
    h = h * 0x85EBCA6B & mask
    h ^= h >> 13
    h = h * 0xC2B2AE35 & mask
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h
