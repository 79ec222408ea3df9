"""What spark.read.format("statekit") reads: its options, and who reads which key-groups.

    pages = spark.read.format("statekit").option("state", "pages").load("s3://bucket/orders-state")

    option       default
    state        the only one, if there is only one
    version      the newest    the number of a checkpoint
    partitions   by size       how many tasks read: each a range of key-groups
    ttl          -             leave out entries that were not touched for so many seconds
    text         -             types that are to be text, such as "datetime,decimal"
    stamps       false         with a column that says when an entry was last touched
    batch_rows   65536         rows of a batch

The columns are those of render/columns.py: they follow from the declared type. The checkpoint is
chosen when load() is called, and stays the same however often the DataFrame is used.

Filters on the key (=, IN) choose the key-groups that are read, from PySpark 4.1 on.
"""

from collections.abc import Mapping
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from statekit.assignment import common
from statekit.checkpoint.reader import Checkpoint, open_checkpoint
from statekit.checkpoint.table import StateTable
from statekit.errors import ArgumentError, shorten

if TYPE_CHECKING:
    import pyarrow

NAME = "statekit"
_PARTITION_BYTES = 64 << 20  # of a checkpoint, for one task, unless the user says how many
_PARTITIONS_LEAST = 2
_OPTIONS = ("path", "state", "version", "partitions", "ttl", "text", "stamps", "batch_rows")


class Reading(NamedTuple):
    """What a DataFrame reads. It is pickled, from the driver to the workers."""

    checkpoint: Checkpoint
    state: str
    partitions: int | None
    table: dict[str, Any]  # options of StateTable

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Reading":
        """What the options of a DataFrameReader say. ArgumentError if they are wrong."""
        given = {name.lower(): value for name, value in options.items()}
        if unknown := sorted(given.keys() - {*_OPTIONS}):
            raise ArgumentError(
                f"{unknown[0]!r} is no option of the format {NAME!r}. It has {', '.join(_OPTIONS)}."
            )
        path = given.get("path")
        if not path:
            raise ArgumentError("no place of checkpoints is given. Name it in load(path).")
        checkpoint = open_checkpoint(path, _number(given, "version"))
        partitions = _number(given, "partitions")
        if partitions is not None and partitions < 1:
            raise ArgumentError(f"there cannot be {partitions} partitions. Pass 1 or more.")
        table: dict[str, Any] = {
            "text": [one.strip() for one in given.get("text", "").split(",") if one.strip()],
            "stamps": _flag(given, "stamps"),
        }
        if "ttl" in given:
            table["ttl"] = _seconds(given["ttl"])
        if (rows := _number(given, "batch_rows")) is not None:
            table["batch_rows"] = rows
        reading = cls(checkpoint, _state(given, checkpoint), partitions, table)
        reading.of_groups(None)  # so that mistakes are told at once
        return reading

    def of_groups(self, groups: Any) -> StateTable:
        """The table of some key-groups, or of all."""
        return self.checkpoint.table(self.state, key_groups=groups, **self.table)

    @property
    def columns(self) -> "pyarrow.Schema":
        return self.of_groups(None).schema

    def shares(self, wanted: tuple[range, ...] | None) -> list[tuple[range, ...]]:
        """The key-groups of each partition. wanted: only these; they may have no entries at all."""
        owned = self.checkpoint.key_groups
        groups = owned if wanted is None else common(owned, wanted)
        count = sum(map(len, groups))
        tasks = self.partitions
        if tasks is None:
            share = count / max(1, sum(map(len, owned)))
            tasks = max(_PARTITIONS_LEAST, ceil(self.checkpoint.bytes * share / _PARTITION_BYTES))
        tasks = min(tasks, count)
        bounds = [task * count // tasks for task in range(tasks + 1)] if tasks else []
        numbers = [group for part in groups for group in part]
        return [
            tuple(range(one, one + 1) for one in numbers[start:stop])
            for start, stop in pairwise(bounds)
        ]


def _state(given: Mapping[str, str], checkpoint: Checkpoint) -> str:
    name = given.get("state")
    if name is None:
        if len(checkpoint.states) != 1:
            raise ArgumentError(
                f"checkpoint {checkpoint.number} of {checkpoint.url!r} has the states "
                f"{', '.join(map(repr, checkpoint.states)) or '(none)'}. "
                'Say which one: .option("state", name).'
            )
        (name,) = checkpoint.states
    return name


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"the option {name} is {shorten(text)}, which is no int.") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(
            f"the option ttl is {shorten(text)}, which is no number of seconds."
        ) from None


def _flag(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in ("true", "false"):
        raise ArgumentError(f"the option {name} is {shorten(text)}. Pass true or false.")
    return text == "true"
