"""Removing old checkpoints, and the files that failed attempts left behind.

    1. list; read the manifests that stay: the newest `keep`, and those that readers pin
    2. delete the other manifests, the oldest first
    3. if packs are to be deleted, list again, and read the manifests that are new
    4. sync: from here on the manifests of step 2 do not come back, even after a loss of power
    5. delete the files that only manifests of step 2 named, and files that are garbage otherwise

Files are packs and attachments. A part that was not published (parts.py) counts as a manifest that
stays as long as its number is above the newest checkpoint: it may still be published. So does an
attachment of such a number. Once there is a checkpoint of that number or a higher one, nobody can
publish them any more, and they are garbage.

A crash between any two steps leaves each remaining manifest with all of its packs, because packs
are deleted last. Files that are left over are garbage for the next run. If a manifest that stays
cannot be read, nobody knows which packs it needs, and nothing at all is deleted.

Step 3 is about a checkpoint that is based on an old one, as after restore(at=N):

    we list; checkpoint 3, which refers to packs of 1 and pins it, is not published yet
    it is published, and the pin of 1 is released
    we look for pins, find none, and remove 1: its packs are needed by 3, which we do not know

An attempt releases its pin only after it has published, or has written its part. So if we could
remove a checkpoint, the second listing shows all others that are based on it.

Packs that no manifest and no part names are from failed attempts, or from an attempt that is being
written right now. They are deleted only if nobody is writing:

    storage with locks       if collecting() gave the lock, which an attempt in progress prevents
    storage without locks    if this process does not write, the pack is older than a day, and its
                             number is not above the newest manifest's

The condition about the number closes a gap. The name of a pack depends on its contents and number
only, so an attempt that repeats a failed one writes the same names. Between our listing and our
deleting, it could replace an old pack and publish it. But every attempt has a number above the
newest manifest.

A file that has the name of a pack but is not a pack belongs to somebody else: it is left, and
reported.

A manifest that nobody has finished (Storage.is_unfinished) is garbage under the same conditions. It
is deleted before the mark that distinguishes it from a damaged one.
"""

import re
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from os import PathLike
from typing import Any, NamedTuple

from statekit.checkpoint.parts import publishable
from statekit.checkpoint.reader import UnfinishedError, read_checkpoint
from statekit.errors import (
    ArgumentError,
    DamagedError,
    MissingFileError,
    NoCheckpointError,
    StorageError,
    shorten,
)
from statekit.failpoints import register, visit
from statekit.format.manifest import (
    PACK_HEADER,
    manifest_name,
    number_of,
    number_of_unpublished,
)
from statekit.format.pack import pack_header
from statekit.storage import Entry, Storage, is_temporary, open_storage

__all__ = ["Collected", "collect"]

MIN_AGE_SECONDS = 24 * 3600.0  # of garbage, where there are no locks

_PACK_NAME = re.compile(r"[0-9a-f]{32}\.pack", re.ASCII)
_NUMBER_AT = 32  # in the header of a pack (pack.py)
_TRIES_MAX = 10

register("retention.read", "retention.manifest", "retention.sync", "retention.packs")


class Collected(NamedTuple):
    """What collect() did, or with dry_run would have done. Checkpoints are given by number."""

    kept: tuple[int, ...]  # the newest ones
    in_use: tuple[int, ...]  # older ones that stay because somebody pins them
    removed: tuple[int, ...]
    packs: tuple[str, ...]  # files deleted
    temporaries: tuple[str, ...]  # files deleted that a crash had left
    bytes_freed: int
    is_busy: bool  # somebody is writing: files of failed attempts were not touched
    foreign: tuple[str, ...] = ()  # files that have the name of a pack but are none; they were left
    unpublished: tuple[int, ...] = ()  # numbers whose parts stay: they may still be published
    parts: tuple[str, ...] = ()  # files deleted: parts and attachments that nobody can publish


def collect(
    place: "str | PathLike[str] | Storage",
    keep: int = 1,
    *,
    dry_run: bool = False,
    min_age_seconds: float | None = None,
    unpublished: bool = False,
) -> Collected:
    """Removes all but the newest `keep` checkpoints of a place, and files that none of them needs.

    Files that no checkpoint names are removed if they are min_age_seconds old. The default is 0,
    and a day on storages without locks. There, choose more than the longest checkpoint takes.
    unpublished: remove parts that may still be published, too. Use it only if nobody will publish
    them: publish() would fail and say that they are gone.
    """
    storage = place if isinstance(place, Storage) else open_storage(place)
    check_keep(keep)
    with storage.collecting() as is_alone:
        if min_age_seconds is None:  # has_locks is certain once a lock was tried
            min_age_seconds = 0.0 if storage.has_locks else MIN_AGE_SECONDS
        try:
            plan = _plan(storage, keep, unpublished and is_alone)
            return _carry_out(storage, plan, dry_run, is_alone, min_age_seconds)
        except OSError as error:  # of a fail point here
            raise storage.failed("cleaned up", None, error) from error


def check_keep(keep: Any) -> None:
    """ArgumentError if this is not a possible number of checkpoints to keep."""
    if not isinstance(keep, int) or isinstance(keep, bool):
        raise ArgumentError(f"keep={shorten(keep)} is no number. Keep 1 or more, as an int.")
    if keep < 1:
        raise ArgumentError(f"keep={keep} would remove the newest checkpoint. Keep 1 or more.")


class _Plan(NamedTuple):
    entries: Mapping[str, Entry]
    kept: tuple[int, ...]
    in_use: tuple[int, ...]
    others: tuple[int, ...]  # to be removed, the oldest first
    files: Mapping[int, frozenset[str]]  # named by each manifest
    damaged: Mapping[int, DamagedError]  # some of the others
    unfinished: tuple[str, ...]  # manifests, by name
    waiting: Mapping[str, frozenset[str]]  # parts and attachments that may still be published ...
    # ... and what each of them needs, itself included
    gives_up: bool  # none of them will be published: they are removed


def _plan(storage: Storage, keep: int, gives_up: bool) -> _Plan:
    for _ in range(_TRIES_MAX):
        try:
            return _plan_now(storage, keep, gives_up)
        except NoCheckpointError:
            continue  # another collector was quicker: the listing is not up to date any more
    raise StorageError(
        f"the checkpoints in {storage.shown!r} change faster than they can be read. "
        "Let one process collect garbage there."
    )


def _plan_now(storage: Storage, keep: int, gives_up: bool) -> _Plan:
    visit("retention.read")
    entries = {entry.name: entry for entry in storage.list()}
    numbers = sorted(number for name in entries if (number := number_of(name)))
    files: dict[int, frozenset[str]] = {}
    damaged: dict[int, DamagedError] = {}
    unfinished: list[str] = []
    for number in numbers:
        try:
            files[number] = _files_of(storage, number)
        except UnfinishedError:
            unfinished.append(manifest_name(number))
        except DamagedError as error:
            damaged[number] = error
    finished = sorted([*files, *damaged])
    kept, older = finished[-keep:], finished[:-keep]
    in_use = [number for number in older if storage.is_pinned(manifest_name(number))]
    for number in (*kept, *in_use):
        if (damage := damaged.get(number)) is not None:
            raise DamagedError(
                f"nothing was removed from {storage.shown!r}, because it is not known what "
                f"checkpoint {number} needs: {damage}",
                file=damage.file,
                offset=damage.offset,
            ) from damage
    others = tuple(number for number in older if number not in in_use)
    newest = finished[-1] if finished else 0
    waiting = {} if gives_up else publishable(storage, entries, newest)
    return _Plan(
        entries,
        tuple(kept),
        tuple(in_use),
        others,
        files,
        damaged,
        tuple(unfinished),
        waiting,
        gives_up,
    )


def _files_of(storage: Storage, number: int) -> frozenset[str]:
    return read_checkpoint(storage, number).manifest.files


def _carry_out(
    storage: Storage, plan: _Plan, dry_run: bool, is_alone: bool, min_age_seconds: float
) -> Collected:
    removed, in_use = [], list(plan.in_use)
    for number in plan.others:
        visit("retention.manifest")
        if dry_run or storage.retire(manifest_name(number)):
            removed.append(number)
        elif number in plan.damaged:  # pinned since we looked: somebody tries to read it
            raise plan.damaged[number]
        else:
            in_use.append(number)

    needed = {name for number in (*plan.kept, *in_use) for name in plan.files[number]}
    needed.update(*plan.waiting.values())
    released = {name for number in removed for name in plan.files.get(number, ())} - needed
    newest = plan.kept[-1] if plan.kept else 0
    before = time.time() - min_age_seconds
    packs: list[str] = []
    parts: list[str] = []
    temporaries: list[str] = []
    foreign: list[str] = []
    for name, entry in plan.entries.items():
        is_old = is_alone and entry.modified <= before
        if number_of_unpublished(name) is not None:
            if name not in needed and (name in released or is_old or plan.gives_up):
                parts.append(name)
        elif name in released:
            packs.append(name)
        elif _PACK_NAME.fullmatch(name) and name not in needed:
            wrote = _number_of_pack(storage, entry)
            if wrote is None:
                foreign.append(name)
            elif is_old and (storage.has_locks or wrote <= newest):
                packs.append(name)
        elif is_old and name in plan.unfinished:
            temporaries.insert(0, name)
        elif is_old and is_temporary(name):
            temporaries.append(name)
    if packs or parts:
        known = {*plan.kept, *in_use, *(removed if dry_run else ())}
        needed = _named_since(storage, known, plan)
        packs = [name for name in packs if name not in needed]
        parts = [name for name in parts if name not in needed]

    if not dry_run and (removed or packs or parts):
        visit("retention.sync")
        storage.sync()
    if not dry_run:
        visit("retention.packs")
        storage.delete([*parts, *packs, *temporaries])  # a part never outlives its packs
    gone = [*parts, *packs, *temporaries, *map(manifest_name, removed)]
    return Collected(
        kept=plan.kept,
        in_use=tuple(sorted(in_use)),
        removed=tuple(removed),
        packs=tuple(packs),
        temporaries=tuple(temporaries),
        bytes_freed=sum(plan.entries[name].size for name in gone),
        is_busy=not is_alone,
        foreign=tuple(foreign),
        unpublished=tuple(sorted({number_of_unpublished(name) or 0 for name in plan.waiting})),
        parts=tuple(parts),
    )


def _named_since(storage: Storage, known: Set[int], plan: _Plan) -> set[str]:
    """The files needed by manifests and parts that have come since the plan was made."""
    named: set[str] = set()
    names = [entry.name for entry in storage.list()]
    for number in map(number_of, names):
        if number is not None and number not in known:
            # If one is gone again, its writer has given it up, and it needs nothing.
            with suppress(NoCheckpointError):
                named |= _files_of(storage, number)
    # A part that was not whole when the plan was made may be whole by now.
    new = (n for n in names if n not in plan.entries or plan.waiting.get(n) == frozenset({n}))
    named.update(*publishable(storage, new, plan.kept[-1] if plan.kept else 0).values())
    return named


def _number_of_pack(storage: Storage, entry: Entry) -> int | None:
    """The number of the checkpoint that wrote a pack; None if the file is no pack of ours.

    0 if it has only the beginning of a pack's header: its writer died there.
    """
    try:
        found = storage.read(entry.name, 0, min(entry.size, PACK_HEADER))
    except MissingFileError:
        return 0
    except DamagedError:  # it became shorter, which no pack does
        return None
    number = int.from_bytes(found[_NUMBER_AT : _NUMBER_AT + 8], "little")
    expected = pack_header(bytes.fromhex(entry.name[:32]), number)
    return number if found == expected[: len(found)] else None
