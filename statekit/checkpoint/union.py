"""Several checkpoints as one: the state of all workers, from what each of them wrote.

They go together iff
1. no leaf is in two of them;
2. a state that several of them have is the same in all: form, type, key and clock;
3. their key-groups can be counted alike: they have the same number of key-groups, or a number is
   asked for. Any number is possible, since a leaf is a range of hashes: what is one leaf with few
   key-groups is several leaves with many.

The watermark and the metadata come with the state. The watermark of several checkpoints is the
lowest, since an event that one of them has not seen may be that old. The metadata of several are
{"merged": [...]}, in their order.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from statekit.assignment import (
    KeyGroups,
    common,
    group_ranges,
    leaf_ranges,
    show_groups,
    subtract,
)
from statekit.checkpoint.reader import Checkpoint
from statekit.errors import ArgumentError, OccupiedError, SchemaError, shorten
from statekit.schema import StateSchema

_LEAVES_MAX = 1 << 20


class Union(NamedTuple):
    """Checkpoints of different key-groups, counted alike."""

    checkpoints: tuple[Checkpoint, ...]
    key_groups: int
    subgroups: int
    covered: tuple[range, ...]  # key-groups
    torn: tuple[range, ...]  # key-groups of which only a part is covered
    schemas: tuple[StateSchema, ...]
    watermark: int | None

    @property
    def leaves(self) -> int:
        return self.key_groups * self.subgroups

    @property
    def names(self) -> str:
        return ", ".join(repr(one.url) for one in self.checkpoints)

    @property
    def metadata(self) -> dict[str, Any]:
        if len(self.checkpoints) == 1:
            return self.checkpoints[0].metadata
        return {"merged": [one.metadata for one in self.checkpoints]}

    @property
    def compression(self) -> str | None:
        """The compression of the frames; None if the checkpoints differ in it."""
        found = {one.manifest.compression for one in self.checkpoints}
        return found.pop() if len(found) == 1 else None

    def check_whole(self, advice: str) -> None:
        """ArgumentError if there are key-groups that none of the checkpoints has."""
        holes = subtract((range(self.key_groups),), group_ranges([*self.covered, *self.torn]))
        if holes:
            raise ArgumentError(
                f"key-groups {show_groups(holes)} of {self.key_groups} are in none of "
                f"{self.names}. {advice}"
            )

    def choose(self, key_groups: KeyGroups | None) -> tuple[range, ...]:
        """The key-groups that are wanted. ArgumentError if some are not covered."""
        if key_groups is None and not self.torn:
            return self.covered
        asked = self.torn if key_groups is None else group_ranges(key_groups, self.key_groups)
        if missing := subtract(asked, self.covered):
            part = common(missing, self.torn)
            partly = f", of {show_groups(part)} only a part" if part else ""
            raise ArgumentError(
                f"key-groups {show_groups(missing)} of {self.key_groups} are not in {self.names}: "
                f"there are {show_groups(self.covered)}{partly}. "
                "Ask for these, or name the checkpoints that have the others too."
            )
        return asked


def name_of(checkpoint: Checkpoint) -> str:
    """The name of a checkpoint in messages."""
    return f"checkpoint {checkpoint.number} of {checkpoint.url!r}"


def check_alike(checkpoints: Sequence[Checkpoint]) -> None:
    """ArgumentError if they differ in geometry: then their leaves cannot be compared."""
    for first, other in pairwise(checkpoints):
        here = (first.key_group_count, first.subgroups)
        there = (other.key_group_count, other.subgroups)
        if here != there:
            raise ArgumentError(
                f"{name_of(first)} has {here[0]} key-groups x {here[1]} sub-groups, "
                f"{name_of(other)} has {there[0]} x {there[1]}. Regroup one of them first."
            )


def unite(
    checkpoints: Sequence[Checkpoint], regroup: int | None = None, subgroups: int | None = None
) -> Union:
    """The union of checkpoints. ArgumentError, OccupiedError or SchemaError if there is none.

    regroup: the number of key-groups that is wanted, whatever the checkpoints have.
    subgroups: how many sub-groups each is to have at least. Leaves are cut, and never joined.
    """
    if not checkpoints:
        raise ArgumentError("there is no checkpoint to take. Name one place or more.")
    groups = _group_count(checkpoints, regroup)
    leaves = max(_leaf_count(groups, subgroups), *(one.manifest.leaves for one in checkpoints))
    covered, torn = _coverage(checkpoints, leaves, leaves // groups)
    times = [one.watermark for one in checkpoints]
    known = [time for time in times if time is not None]
    watermark = min(known) if len(known) == len(times) else None
    schemas = _schemas(checkpoints)
    subgroups = leaves // groups
    return Union(tuple(checkpoints), groups, subgroups, covered, torn, schemas, watermark)


def _group_count(checkpoints: Sequence[Checkpoint], regroup: int | None) -> int:
    counts = sorted({one.key_group_count for one in checkpoints})
    if regroup is None:
        if len(counts) > 1:
            raise ArgumentError(
                f"these checkpoints have different numbers of key-groups, {counts}. "
                f"Pass regroup={counts[-1]}, or another number that all are to have."
            )
        return counts[0]
    if type(regroup) is not int or not 0 < regroup <= _LEAVES_MAX or regroup & (regroup - 1):
        raise ArgumentError(
            f"there cannot be {shorten(regroup)} key-groups. "
            f"Pass a power of two, {_LEAVES_MAX} at most, as regroup."
        )
    return regroup


def _leaf_count(groups: int, subgroups: int | None) -> int:
    """How many leaves there are at least."""
    if subgroups is None:
        return groups
    is_good = type(subgroups) is int and subgroups > 0 and not subgroups & (subgroups - 1)
    if not is_good or groups * subgroups > _LEAVES_MAX:
        raise ArgumentError(
            f"there cannot be {shorten(subgroups)} sub-groups in each of {groups} key-groups. Pass "
            f"a power of two, {_LEAVES_MAX // groups} at most, as subgroups."
        )
    return groups * subgroups


def _coverage(
    checkpoints: Sequence[Checkpoint], leaves: int, subgroups: int
) -> tuple[tuple[range, ...], tuple[range, ...]]:
    """The key-groups of which the checkpoints have all leaves, and those of which only some."""
    spans = []
    for one in checkpoints:
        for part in leaf_ranges(one.key_groups, leaves // one.key_group_count):
            spans.append((part.start, part.stop, one))
    spans.sort(key=lambda span: span[:2])
    joined: list[list[int]] = []
    last: Checkpoint | None = None
    for start, stop, one in spans:
        if joined and start < joined[-1][1]:
            assert last is not None
            raise OccupiedError(
                f"{name_of(last)} and {name_of(one)} have the same key-groups: "
                f"{show_groups(last.key_groups)} and {show_groups(one.key_groups)}. "
                "Take checkpoints of different workers, each once."
            )
        if joined and start == joined[-1][1]:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
        last = one
    covered: list[range] = []
    touched: set[int] = set()
    for start, stop in joined:
        covered.append(range(-(-start // subgroups), stop // subgroups))
        touched.update((start // subgroups, (stop - 1) // subgroups))
    whole = group_ranges([part for part in covered if len(part)])
    return whole, subtract(group_ranges(sorted(touched)), whole)


def _schemas(checkpoints: Sequence[Checkpoint]) -> tuple[StateSchema, ...]:
    found: dict[str, tuple[StateSchema, Checkpoint]] = {}
    for one in checkpoints:
        for schema in one.manifest.schemas:
            known, other = found.setdefault(schema.name, (schema, one))
            if known != schema:
                raise SchemaError(
                    f"state {schema.name!r} is {known} in {name_of(other)} and {schema} in "
                    f"{name_of(one)}. Restore each, declare it alike, and take new checkpoints "
                    "first."
                )
    return tuple(schema for schema, _ in found.values())
