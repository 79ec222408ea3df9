"""The command `verify`: what is damaged, which checkpoints have the damage, and what to do now.

A pack is read once, though many checkpoints may share it. Their manifests tell which of them a bad
byte concerns: those that have a segment there, or need the pack's header.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import click

from statekit.checkpoint.packs import verify_pack
from statekit.checkpoint.parts import publishable
from statekit.checkpoint.reader import Checkpoint, find_checkpoints, open_checkpoint
from statekit.cli.options import json_option
from statekit.cli.output import numbers, plural, print_json, print_line, progress, show_bytes
from statekit.cli.places import Place, expand_all, parse_place
from statekit.errors import CheckpointError, DamagedError, NoCheckpointError, StorageError
from statekit.format.manifest import PACK_HEADER, PackRef, Segment, number_of, number_of_unpublished
from statekit.storage import Storage, is_temporary

_EXIT_DAMAGED = 3
_SHOWN_MAX = 10  # places of one file


class _Damage(NamedTuple):
    """A damaged place in a file, and the checkpoints that need what was there."""

    file: str
    offset: int | None
    what: str
    checkpoints: tuple[int, ...]

    def __str__(self) -> str:
        place = "" if self.offset is None else f" at byte {self.offset}"
        found = f"{self.file} is damaged{place}: {self.what}" if self.file else self.what
        if not self.checkpoints:
            return f"{found} (no checkpoint needs it)" if self.file else found
        one = "checkpoint" if len(self.checkpoints) == 1 else "checkpoints"
        return f"{found} ({one} {numbers(self.checkpoints)})"


class _Verified(NamedTuple):
    """One directory."""

    url: str
    numbers: tuple[int, ...]  # of all checkpoints
    packs: int
    bytes: int
    damage: list[_Damage]
    orphans: list[tuple[str, int]]  # files that nothing names, and their sizes

    @property
    def whole(self) -> tuple[int, ...]:
        """The checkpoints that have no damage."""
        bad = {number for one in self.damage for number in one.checkpoints}
        return tuple(number for number in self.numbers if number not in bad)

    def advice(self) -> str:
        """What to do about the damage."""
        if not self.whole:
            return f"{self.url}: no checkpoint is whole. Bring the files back from a copy of them."
        best = self.whole[-1]
        if self.whole == self.numbers:
            return f"{self.url}: all checkpoints are whole, none needs what is damaged."
        if best == self.numbers[-1]:
            return (
                f"{self.url}: the newest checkpoint, {best}, is whole. `statekit gc {self.url} "
                "--keep 1` removes the others; or bring the files back from a copy of them."
            )
        return (
            f"{self.url}: whole is {numbers(self.whole)}. Restore {self.url}@{best}, or bring the "
            "files back from a copy of them."
        )


@click.command()
@click.argument("url")
@json_option
def verify(url: str, as_json: bool) -> None:
    """Read every block of every checkpoint, report all damage.

    Exit code 3 if there is any; then it says which checkpoints have it, and which are whole.
    Orphans are files that no checkpoint needs, left by attempts that failed: `gc` removes them.
    URL@7 reads checkpoint 7 only, and looks for no orphans.

    \b
    Example:
      statekit verify /data/ckpt
      statekit verify /data/ckpt@7
    """
    found = [_verify(place) for _, place in expand_all(url)]
    if not any(one.numbers for one in found):
        shown = parse_place(url).storage.shown
        raise NoCheckpointError(f"there is no checkpoint in {shown!r}. Check the URL.")
    damaged = [one for one in found if one.damage]
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found)
    if damaged:
        raise SystemExit(_EXIT_DAMAGED)


def _as_json(found: list[_Verified]) -> dict[str, Any]:
    return {
        "checkpoints": sum(len(one.numbers) for one in found),
        "packs": sum(one.packs for one in found),
        "bytes": sum(one.bytes for one in found),
        "damage": [
            {**damage._asdict(), "message": str(damage)} for one in found for damage in one.damage
        ],
        "whole": [{"url": one.url, "numbers": one.whole} for one in found],
        "orphans": [{"file": name, "bytes": size} for one in found for name, size in one.orphans],
    }


def _print(found: list[_Verified]) -> None:
    count = sum(len(one.damage) for one in found)
    print_line(
        f"read {plural(sum(len(one.numbers) for one in found), 'checkpoint')}, "
        f"{plural(sum(one.packs for one in found), 'pack')}, "
        f"{show_bytes(sum(one.bytes for one in found))}: "
        + (f"damaged in {plural(count, 'place')}" if count else "all good")
    )
    for one in found:
        for file, found_there in groupby(one.damage, lambda damage: damage.file):
            damage = list(found_there)
            for part in damage[:_SHOWN_MAX]:
                print_line(f"  {part}")
            if len(damage) > _SHOWN_MAX:
                more = len(damage) - _SHOWN_MAX
                print_line(f"  and {more:,} more in {file}; --json shows all")
        if one.damage:
            print_line(f"  {one.advice()}")
        for name, size in one.orphans:
            print_line(f"  orphan: {name}, {show_bytes(size)}; `statekit gc` removes it")


def _verify(place: Place) -> _Verified:
    storage = place.storage
    good, errors = _find(place)
    damage = [_of_manifest(error) for error in errors]
    users: dict[PackRef, list[Checkpoint]] = defaultdict(list)
    for checkpoint in good:
        for ref in checkpoint.manifest.packs:
            users[ref].append(checkpoint)
    for checkpoint in good:
        damage += [
            _Damage(error.file, error.offset, error.what or str(error), (checkpoint.number,))
            for error in checkpoint.verify_attachments()
        ]
    with progress("verifying", sum(ref.size for ref in users)) as advance:
        for ref, checkpoints in users.items():
            # If one checkpoint was asked for, damage that concerns only others is left out.
            found = _of_pack(storage, ref, checkpoints)
            damage += [one for one in found if one.checkpoints or place.at is None]
            advance(ref.size)
    # An unreadable manifest may name any pack: then nothing is known to be an orphan.
    known = place.at is None and not errors
    orphans = list(_orphans(storage, good)) if known else []
    unreadable = [number for one in damage for number in one.checkpoints]
    every = {*unreadable, *(one.number for one in good)}
    total = sum(ref.size for ref in users)
    return _Verified(storage.shown, tuple(sorted(every)), len(users), total, damage, orphans)


def _find(place: Place) -> tuple[list[Checkpoint], list[CheckpointError]]:
    if place.at is None:
        return find_checkpoints(place.storage)
    try:
        return [open_checkpoint(place.storage, place.at)], []
    except DamagedError as error:
        return [], [error]


def _of_manifest(error: CheckpointError) -> _Damage:
    if not isinstance(error, DamagedError):
        return _Damage("", None, str(error), ())  # it cannot be read, so nothing else is known
    number = number_of(error.file.rpartition("/")[2])
    concerned = () if number is None else (number,)
    return _Damage(error.file, error.offset, error.what or str(error), concerned)


def _of_pack(storage: Storage, ref: PackRef, checkpoints: list[Checkpoint]) -> Iterator[_Damage]:
    """The damage of a pack that these checkpoints name."""
    parts = {one.number: _segments(one, ref) for one in checkpoints}
    # Bytes that several manifests name are checked once.
    every = {part._replace(pack=0, is_delta=False) for found in parts.values() for part in found}
    try:
        size = storage.size(ref.name)
    except StorageError:
        size = 0
    try:
        for error in verify_pack(storage, ref, every):
            offset = error.offset
            users = tuple(number for number, found in parts.items() if _has(found, offset, size))
            yield _Damage(error.file, offset, error.what or str(error), users)
    except StorageError as error:  # a pack that cannot be read is no better than a damaged one
        yield _Damage("", None, str(error), tuple(parts))


def _segments(checkpoint: Checkpoint, ref: PackRef) -> list[Segment]:
    number = checkpoint.manifest.packs.index(ref)
    return [part for part in checkpoint.manifest.segments if part.pack == number]


def _has(segments: Iterable[Segment], offset: int | None, size: int) -> bool:
    """Whether a checkpoint with these segments of a pack needs the byte at an offset of it."""
    if offset is None or offset < PACK_HEADER:  # the whole pack, or its header: all need that
        return True
    is_cut = offset >= size  # damage behind the end is reported at the end
    return any(
        part.offset + part.length > offset and (is_cut or part.offset <= offset)
        for part in segments
    )


def _orphans(storage: Storage, good: list[Checkpoint]) -> Iterator[tuple[str, int]]:
    entries = storage.list()
    newest = max((one.number for one in good), default=0)
    named = {name for one in good for name in one.manifest.files}
    named.update(*publishable(storage, (entry.name for entry in entries), newest).values())
    for entry in entries:
        is_ours = entry.name.endswith(".pack") or number_of_unpublished(entry.name) is not None
        if (is_ours and entry.name not in named) or is_temporary(entry.name):
            yield storage.file(entry.name), entry.size
