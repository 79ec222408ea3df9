"""Checkpoints in parts: many processes write, one publishes.

    writers      kv.write_part(url, number=n)    packs, and then one file that says what is in them
    scheduler    carries the Part of each writer to where they come together
    publisher    publish(url, parts, number=n)   one manifest of all parts: the checkpoint exists

A part is a manifest of a few key-groups (format/manifest.py) under another name, which contains the
SHA-256 of the file. So a Part names exactly that file or none: not the one that a repeated task
wrote, and not one from before the place was emptied. Nothing but the name has to travel.

Parts make a checkpoint iff
1. they are of the number that is published, which is one above the newest checkpoint there;
2. they have the same geometry, and a state that several of them have is the same in all;
3. each key-group is in exactly one of them;
4. all parts that were written as changes to a base have the same base, compared by its contents.
   Other parts may have been written in full;
5. every pack that they need is there;
6. each of their writers may publish there (ownership.py).

Publishing is exclusive, and can be repeated: the manifest names its parts. Publishing the same
parts once more gives the checkpoint that is there, also to another process, and also if the parts
have been collected since. Publishing other parts under that number is an error.

A part that is not published is kept as long as somebody may publish it: as long as its number is
above the newest checkpoint. Then retention.py collects it. No clock decides, so a slow writer loses
nothing. The parts of an attempt that was given up are collected after the next attempt, which has
the same number, is published.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any, NamedTuple, TypeAlias

from statekit import failpoints
from statekit.assignment import common, group_ranges, show_groups, subtract
from statekit.checkpoint.ownership import Together
from statekit.checkpoint.publishing import Publisher
from statekit.checkpoint.reader import Checkpoint, UnfinishedError, read_checkpoint
from statekit.errors import (
    ArgumentError,
    CheckpointError,
    DamagedError,
    FencedError,
    MissingFileError,
    NoCheckpointError,
    OccupiedError,
    SchemaError,
    shorten,
)
from statekit.format.description import ATTACHMENT_NAME, Attachment, plain_metadata
from statekit.format.manifest import (
    Manifest,
    digest_of_part,
    join,
    manifest_name,
    number_of,
    number_of_unpublished,
)
from statekit.schema import StateSchema
from statekit.storage import Storage, open_storage

failpoints.register("parts.publish", "parts.published")

Data: TypeAlias = bytes  # Part.bytes hides the name

_FIELDS = {"number": int, "file": str, "key_groups": list, "key_group_count": int, "bytes": int}


class Part(NamedTuple):
    """What one process has written of a checkpoint that is not published yet.

    A Part is small, however large the state is. It can be pickled, and to_json() makes text of it.
    """

    number: int  # of the checkpoint
    file: str  # in the place; its name has the SHA-256 of its contents
    key_groups: tuple[tuple[int, int], ...]  # first, and last + 1, of each range
    key_group_count: int  # how many there are in all, not only these
    bytes: int  # how many were written for it

    def to_json(self) -> str:
        """Text that publish() takes as well as the part itself."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str | Data) -> "Part":
        """What to_json() gave. ArgumentError if it is something else."""
        try:
            found = json.loads(text)
            if not isinstance(found, dict):
                raise ValueError("it is no object")
            for name, kind in _FIELDS.items():
                if type(found.get(name)) is not kind:
                    raise ValueError(f"{name!r} is missing or of another type")
            pairs = tuple(map(tuple, found["key_groups"]))
            for pair in pairs:
                if [*map(type, pair)] != [int, int] or not 0 <= pair[0] < pair[1]:
                    raise ValueError(f"{list(pair)!r} is no range of key-groups")
            part = cls(**{**{name: found[name] for name in _FIELDS}, "key_groups": pairs})
        except (ValueError, TypeError, RecursionError) as error:
            raise ArgumentError(
                f"{shorten(text)} is no part of a checkpoint ({error}). Pass what kv.write_part() "
                "gave, or its to_json()."
            ) from None
        return part

    def __repr__(self) -> str:
        groups = show_groups(range(start, stop) for start, stop in self.key_groups)
        return (
            f"<Part of checkpoint {self.number}: key-groups {groups} of {self.key_group_count}, "
            f"{self.bytes:,} bytes>"
        )


def part_of(name: str, manifest: Manifest) -> Part:
    """The Part that stands for a part that was written."""
    groups = tuple((part.start, part.stop) for part in manifest.owned)
    return Part(manifest.number, name, groups, manifest.key_groups, manifest.new_bytes)


def read_part(storage: Storage, name: str) -> Manifest:
    """A part in a storage. MissingFileError if there is none, DamagedError if it is not whole."""
    digest = digest_of_part(name)
    assert digest is not None
    data = storage.read(name)
    if hashlib.sha256(data).digest() != digest:
        raise DamagedError(
            f"{storage.file(name)} is damaged: it does not have the contents that its name says. "
            "Write that part again.",
            file=storage.file(name),
            offset=0,
        )
    return Manifest.decode(data, storage.file(name))


def publishable(storage: Storage, names: Iterable[str], newest: int) -> dict[str, frozenset[str]]:
    """Which of these files are parts and attachments that may still be published, and what each
    needs: itself, and its packs.

    newest: the highest number of a checkpoint there.
    """
    found: dict[str, frozenset[str]] = {}
    for name in names:
        number = number_of_unpublished(name)
        if number is None or number <= newest:
            continue
        needed: frozenset[str] = frozenset()
        if digest_of_part(name) is not None:
            # A part that is not whole is being written, or its writer died: nobody can publish it.
            # A part that is gone was removed by a collector.
            with suppress(DamagedError, MissingFileError):
                needed = read_part(storage, name).files
        found[name] = needed | {name}
    return found


class Unpublished(NamedTuple):
    """What was written for a checkpoint that is not published."""

    number: int
    parts: tuple[str, ...]
    attachments: tuple[str, ...]
    key_groups: tuple[range, ...]  # of all parts that can be read
    key_group_count: int  # 0: none can be read
    bytes: int  # of all files that were written for it


def find_unpublished(storage: Storage) -> list[Unpublished]:
    """Checkpoints that may still be published: numbers above that of the newest one, ascending."""
    entries = {entry.name: entry for entry in storage.list()}
    newest = max(filter(None, map(number_of, entries)), default=0)
    by_number: dict[int, list[str]] = {}
    for name in entries:
        number = number_of_unpublished(name)
        if number is not None and number > newest:
            by_number.setdefault(number, []).append(name)
    found = []
    for number, names in sorted(by_number.items()):
        groups: tuple[range, ...] = ()
        count = size = 0
        packs: set[str] = set()
        for name in names:
            size += entries[name].size
            if digest_of_part(name) is None:
                continue
            with suppress(DamagedError, MissingFileError):
                part = read_part(storage, name)
                groups = group_ranges([*subtract(groups, part.owned), *part.owned])
                count = part.key_groups
                packs |= {pack.name for pack in part.packs if pack.number == number}
        size += sum(entries[pack].size for pack in packs if pack in entries)
        parts = tuple(name for name in names if digest_of_part(name) is not None)
        others = tuple(name for name in names if digest_of_part(name) is None)
        found.append(Unpublished(number, parts, others, groups, count, size))
    return found


# ---- Attachments


def write_attachment(
    url: "str | PathLike[str] | Storage", name: str, data: bytes, *, number: int
) -> Attachment:
    """Writes a file that a checkpoint will keep. Pass what this returns to publish().

    number: that of the checkpoint. The same contents for the same number are one file.
    """
    storage = url if isinstance(url, Storage) else open_storage(url)
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"{shorten(name)} is no name of an attachment. Pass a str.")
    _check_number(number)
    try:
        raw = bytes(memoryview(data))
    except TypeError:
        raise ArgumentError(
            f"the attachment {name!r} is {shorten(data)}, and must be bytes. Encode it first."
        ) from None
    digest = hashlib.sha256(raw).hexdigest()
    file = f"{manifest_name(number)[:12]}-{digest}.attachment"
    with storage.writing():
        storage.write(file, [raw])
        storage.sync()
    return Attachment(name, file, len(raw))


# ---- Publishing


def publish(
    url: "str | PathLike[str] | Storage",
    parts: Iterable[Part | str],
    *,
    number: int,
    metadata: dict[str, Any] | None = None,
    watermark: int | None = None,
    attachments: Sequence[Attachment] = (),
) -> Checkpoint:
    """Makes one checkpoint of the parts that several processes have written.

    parts: what each kv.write_part() gave, or its to_json(). Together they have all key-groups.
    number: the one that they were written for, which is one above the newest checkpoint there.
    metadata, watermark: those of the checkpoint. Without a watermark, the least one of the parts.
    attachments: what write_attachment() gave, to be kept as long as the checkpoint.
    May be repeated, by any process: the same parts give the same checkpoint. FencedError if one of
    the writers was replaced by a process that has published since.
    """
    storage = url if isinstance(url, Storage) else open_storage(url)
    _check_number(number)
    names = _names_of(parts, number)
    kept = _check_attachments(attachments, number)
    described = plain_metadata(metadata)
    if watermark is not None and (type(watermark) is not int or not -(2**63) < watermark < 2**63):
        raise ArgumentError(
            f"{shorten(watermark)} is no watermark. Pass event time in ms as an int of 64 bits."
        )
    with storage.writing():
        wanted = _Wanted(number, names, described, kept, watermark)
        if (made := _published(storage, wanted)) is not None:
            return made
        manifests = [_read_given(storage, name) for name in names]
        # In the order in which messages name them.
        manifests.sort(key=lambda one: min((part.start for part in one.owned), default=0))
        claims = Together([(one.owner, one.generation) for one in manifests])
        publisher = Publisher(storage, claims)
        try:
            newest = publisher.look()
        except FencedError as error:
            error.add_note(
                "That is about a writer of one of the parts, of "
                + "; ".join(
                    f"key-groups {show_groups(one.owned)}: {one.owner}" for one in manifests
                )
            )
            raise
        if number <= newest:
            made = _published(storage, wanted)  # it may have been published since we looked
            if made is None:
                raise CheckpointError(
                    f"checkpoint {number} cannot be published: {storage.shown!r} has {newest}, and "
                    f"number {number} is of other parts, or was collected. If it may have been "
                    f"these, the metadata of {newest} tell how far the state has come. Else "
                    f"restore {newest} and write the parts anew, for number {newest + 1}."
                )
            return made
        if number != newest + 1:
            raise CheckpointError(
                f"checkpoint {number} of {storage.shown!r} cannot be published: the newest one "
                f"there is {newest or 'none'}. Publish {newest + 1} first, or write the parts for "
                "that number."
            )
        manifest = _joined(storage, manifests, names, claims, described, watermark, kept)
        failpoints.visit("parts.publish")
        _check_base(storage, manifest)
        _check_there(storage, manifest)
        made = publisher.publish(manifest)
        if made is None:
            made = _published(storage, wanted)
            if made is None:
                raise publisher.overtaken(number)
        failpoints.visit("parts.published")
        return made


def _check_number(number: Any) -> None:
    if type(number) is not int:
        raise ArgumentError(
            f"{shorten(number)} is no number of a checkpoint. Pass an int from 1 on."
        )
    manifest_name(number)


def _names_of(parts: Any, number: int) -> tuple[str, ...]:
    """The files of parts, sorted."""
    if isinstance(parts, Part | str | bytes) or not isinstance(parts, Iterable):
        raise ArgumentError(
            f"{shorten(parts)} is no list of parts. Pass what each kv.write_part() gave, in a list."
        )
    found: dict[str, Part] = {}
    for given in parts:
        if isinstance(given, str | bytes):
            part = Part.from_json(given)
        elif isinstance(given, Part):
            part = given
        else:
            raise ArgumentError(
                f"{shorten(given)} is no part of a checkpoint. Pass what kv.write_part() gave, or "
                "its to_json() as text."
            )
        if (
            not isinstance(part.file, str)
            or digest_of_part(part.file) is None
            or number_of_unpublished(part.file) != part.number
        ):
            raise ArgumentError(
                f"{shorten(part.file)} is no file of a part of checkpoint {part.number}. Pass what "
                "kv.write_part() gave, as it is."
            )
        if part.number != number:
            raise ArgumentError(
                f"{part!r} was written for another checkpoint than {number}. Pass the parts of one "
                "number."
            )
        found[part.file] = part
    if not found:
        raise ArgumentError("there are no parts to publish. Pass what each kv.write_part() gave.")
    return tuple(sorted(found))


def _check_attachments(attachments: Any, number: int) -> tuple[Attachment, ...]:
    if isinstance(attachments, Attachment) or not isinstance(attachments, Iterable):
        raise ArgumentError(
            f"{shorten(attachments)} is no list of attachments. Pass what each write_attachment() "
            "gave, in a list."
        )
    kept = tuple(sorted(attachments, key=repr))  # always in the same order
    for one in kept:
        if not (
            isinstance(one, Attachment)
            and isinstance(one.name, str)
            and type(one.size) is int
            and isinstance(one.file, str)
            and ATTACHMENT_NAME.fullmatch(one.file)
            and number_of_unpublished(one.file) == number
        ):
            raise ArgumentError(
                f"{shorten(one)} is no attachment of checkpoint {number}. Pass what "
                "write_attachment(url, name, data, number=...) gave."
            )
    if len({one.name for one in kept}) != len(kept):
        raise ArgumentError("two attachments have the same name. Give each its own.")
    return kept


class _Wanted(NamedTuple):
    """What the checkpoint is meant to be."""

    number: int
    names: tuple[str, ...]  # of its parts
    metadata: dict[str, Any]
    attachments: tuple[Attachment, ...]
    watermark: int | None  # None: what the parts say


def _published(storage: Storage, wanted: _Wanted) -> Checkpoint | None:
    """The checkpoint of that number; None if there is none. CheckpointError if it is another."""
    number, names, metadata, attachments, watermark = wanted
    try:
        found = read_checkpoint(storage, number)
    except UnfinishedError as error:
        error.add_note(
            "`statekit gc` removes it if nobody is at it; on a storage without locks, after a day. "
            f"Publish again then, or write the parts for number {number + 1}."
        )
        raise
    except NoCheckpointError:
        return None
    there = found.manifest
    if there.parts != names:
        return None
    is_same_time = watermark is None or watermark == there.watermark
    if there.metadata != metadata or there.attachments != attachments or not is_same_time:
        raise CheckpointError(
            f"checkpoint {number} of {storage.shown!r} was published from these parts, with other "
            "metadata, attachments or watermark. Use it as it is, or write a new one."
        )
    return found


def _read_given(storage: Storage, name: str) -> Manifest:
    try:
        return read_part(storage, name)
    except MissingFileError:
        raise CheckpointError(
            f"the part {storage.file(name)!r} is not there. Was it written to another place? Or "
            "was a checkpoint of its number published (perhaps of this part), and the part "
            "collected? Look at the newest checkpoint there; if it is not that, write it again."
        ) from None


def _joined(
    storage: Storage,
    parts: Sequence[Manifest],
    names: tuple[str, ...],
    claims: Together,
    metadata: dict[str, Any],
    watermark: int | None,
    attachments: tuple[Attachment, ...],
) -> Manifest:
    """One manifest of all parts. Raises what is wrong with them."""
    first = parts[0]
    for one in parts:
        if (one.key_groups, one.subgroups) != (first.key_groups, first.subgroups):
            raise ArgumentError(
                f"the part of key-groups {show_groups(first.owned)} counts {first.key_groups} "
                f"key-groups x {first.subgroups} sub-groups, the one of {show_groups(one.owned)} "
                f"{one.key_groups} x {one.subgroups}. Open all with the same geometry."
            )
    _check_coverage(storage, parts)
    base = _common_base(parts)
    times = [one.watermark for one in parts]
    known = [time for time in times if time is not None]
    if watermark is None and len(known) == len(times):
        watermark = min(known)
    compressions = {one.compression for one in parts}
    packs, segments = join((one.packs, one.segments) for one in parts)
    return Manifest(
        number=first.number,
        key_groups=first.key_groups,
        subgroups=first.subgroups,
        owned=group_ranges([part for one in parts for part in one.owned]),
        schemas=_schemas(parts),
        base=None if base is None else base.base,
        base_digest="" if base is None else base.base_digest,
        compression=compressions.pop() if len(compressions) == 1 else None,
        watermark=watermark,
        metadata=metadata,
        generation=claims.generation,
        owner=claims.owner,
        parts=names,
        writers=claims.writers,
        attachments=attachments,
        packs=packs,
        segments=segments,
    )


def _check_coverage(storage: Storage, parts: Sequence[Manifest]) -> None:
    covered: tuple[range, ...] = ()
    for one in parts:
        if twice := common(one.owned, covered):
            raise OccupiedError(
                f"key-groups {show_groups(twice)} are in two parts of checkpoint {one.number}. "
                "Pass one part of each: of a task that was repeated, the one that counts."
            )
        covered = group_ranges([*covered, *one.owned])
    if holes := subtract((range(parts[0].key_groups),), covered):
        raise ArgumentError(
            f"key-groups {show_groups(holes)} of {parts[0].key_groups} are in none of the "
            f"{len(parts)} parts of checkpoint {parts[0].number}. Nothing was published in "
            f"{storage.shown!r}: pass the parts that have them too."
        )


def _common_base(parts: Sequence[Manifest]) -> Manifest | None:
    """A part that has a base; None if none has. CheckpointError if parts have different bases."""
    based = [one for one in parts if one.base is not None]
    for one in based:
        if (one.base, one.base_digest) != (based[0].base, based[0].base_digest):
            which = "" if one.base != based[0].base else ", which is another one of that number"
            raise CheckpointError(
                f"the part of key-groups {show_groups(based[0].owned)} goes on from checkpoint "
                f"{based[0].base}, the one of {show_groups(one.owned)} from {one.base}{which}. One "
                "of them lacks what happened in between. Restore all from the same checkpoint; or, "
                "if both are complete, write them with base=None."
            )
    return based[0] if based else None


def _check_base(storage: Storage, manifest: Manifest) -> None:
    """CheckpointError if another checkpoint has the number of the base by now."""
    if manifest.base is None:
        return
    try:
        base = read_checkpoint(storage, manifest.base)
    except NoCheckpointError:
        return  # collected: the packs that are needed of it are checked by _check_there()
    if base.digest.hex() != manifest.base_digest:
        raise CheckpointError(
            f"these parts go on from a checkpoint {manifest.base} that {storage.shown!r} had, and "
            "another one has its number now. Restore that one, and write the parts again."
        )


def _schemas(parts: Sequence[Manifest]) -> tuple[StateSchema, ...]:
    found: dict[str, tuple[StateSchema, Manifest]] = {}
    for one in parts:
        for schema in one.schemas:
            known, other = found.setdefault(schema.name, (schema, one))
            if known != schema:
                raise SchemaError(
                    f"state {schema.name!r} is {known} in the part of key-groups "
                    f"{show_groups(other.owned)} and {schema} in the one of "
                    f"{show_groups(one.owned)}. Declare it alike everywhere."
                )
    return tuple(found[name][0] for name in sorted(found))


def _check_there(storage: Storage, manifest: Manifest) -> None:
    """CheckpointError if a file that the checkpoint needs is not there as it was written."""
    sizes = {entry.name: entry.size for entry in storage.list()}
    parts = "which its parts need", "the parts again, with base=None if the place was emptied"
    attached = "an attachment of it", "the attachment again, to this place"
    wanted = [(pack.name, pack.size, *parts) for pack in manifest.packs]
    wanted += [(one.file, one.size, *attached) for one in manifest.attachments]
    for name, size, what, again in wanted:
        if sizes.get(name) != size:
            found = "is not there" if name not in sizes else f"has {sizes[name]} bytes, not {size}"
            raise CheckpointError(
                f"checkpoint {manifest.number} cannot be published: {storage.file(name)!r}, "
                f"{what}, {found}. Write {again}."
            )
