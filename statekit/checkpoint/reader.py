"""Checkpoint: a manifest and the storage that its packs are in. Finding, opening and reading them.

A leaf is read from its chain. Each segment holds blocks of states; a block is full (all entries
its state has in the leaf) or a delta (changes and deletions). Newer blocks win, so reading goes
from the newest segment to the oldest and fills in only what is not known yet. So no entry is built
that a newer one replaces, and blocks that are older than a full block of the same state are not
even looked at.

    chain, oldest first       visits: full   names: full
                              visits: delta
                              visits: delta  names: full
    read_leaf()               [visits: delta, names: full], [visits: delta], [visits: full]
"""

import contextlib
import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Unpack

from statekit.assignment import show_groups
from statekit.checkpoint.packs import check_header, read_segment, verify_pack
from statekit.checkpoint.table import StateTable, TableOptions
from statekit.errors import (
    ArgumentError,
    CheckpointError,
    CorruptBlockError,
    DamagedError,
    MissingFileError,
    NoCheckpointError,
    shorten,
)
from statekit.format.description import Attachment
from statekit.format.manifest import (
    PACK_HEADER,
    Manifest,
    Segment,
    damaged,
    manifest_name,
    number_of,
)
from statekit.format.pack import Stored, unpack_chain
from statekit.format.pack import check_header as check_header_bytes
from statekit.keys import decode_key, key_codec, leaf_of_encoded
from statekit.native.block import Block
from statekit.native.chains import ChainSegment
from statekit.schema import StateSchema, show
from statekit.storage import Pin, Storage, open_storage

if TYPE_CHECKING:
    import pyarrow

_GAP_LOCAL, _GAP_FAR = (
    16 << 10,
    256 << 10,
)  # bytes between two segments that are read needlessly, to save a second read
_LISTS_MAX = 5  # listings that show no checkpoint, before it is believed
HEAD_BYTES = 64  # of a manifest: they have its size and checksum, so they identify it

Data: TypeAlias = bytes  # Checkpoint.bytes hides the name
Stamped: TypeAlias = tuple[Any, int | None]  # value as Block gives it, and stamp in ms or None


class UnfinishedError(NoCheckpointError):
    """A manifest that its writer has not finished, and perhaps never will. It is no checkpoint."""


class Found(NamedTuple):
    """The checkpoints of a place, and why others could not be read."""

    good: list["Checkpoint"]  # oldest first
    errors: list[CheckpointError]


class Checkpoint:
    """A checkpoint as it lies in its storage. Opening one is cheap: only the manifest is read.

    All methods may be called from several threads at once. It can be pickled. The manifest is
    pickled with it, so it need not be read again; so is a password in its URL.
    """

    def __init__(self, storage: Storage, manifest: Manifest, data: Data | None = None) -> None:
        self.storage = storage
        self.manifest = manifest
        self._head = None if data is None else data[:HEAD_BYTES]  # data: the manifest's file
        self._packs_checked: set[int] = set()
        self._number, self._leaves = manifest.number, manifest.leaves  # used for each leaf read
        self.seen = manifest.number  # the highest number in the place when this one was looked for
        #: Identifies the checkpoint, wherever it lies. Place and number do not: both may be used
        #: again by others, and one path is another place on another machine. But a manifest names
        #: its packs, and these are unique.
        self.digest = hashlib.sha256(manifest.encode() if data is None else data).digest()

    def __reduce__(self) -> tuple[Any, ...]:
        data = self.manifest.encode()
        if hashlib.sha256(data).digest() != self.digest:
            data = self.storage.read(self.manifest.name)  # another version wrote other bytes
        return _unpickled, (self.storage.url, self.manifest.name, data, self.seen)

    def through(self, storage: Storage) -> "Checkpoint":
        """The same checkpoint, read through another storage of the same place: one with copies."""
        assert storage.url == self.storage.url
        found = Checkpoint.__new__(Checkpoint)
        found.__dict__.update(self.__dict__, storage=storage, _packs_checked=set())
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self.digest == other.digest and self.storage.url == other.storage.url

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def url(self) -> str:
        """The URL of the directory, without secrets."""
        return self.storage.shown

    @property
    def number(self) -> int:
        return self.manifest.number

    @property
    def key_group_count(self) -> int:
        """How many key-groups there are, not only the owned ones."""
        return self.manifest.key_groups

    @property
    def subgroups(self) -> int:
        return self.manifest.subgroups

    @property
    def leaf_count(self) -> int:
        """How many leaves there are, not only those of the owned key-groups."""
        return self.manifest.leaves

    @property
    def key_groups(self) -> tuple[range, ...]:
        """The owned ones: those whose state the checkpoint has."""
        return self.manifest.owned

    @cached_property
    def states(self) -> Mapping[str, StateSchema]:
        """By name, in the order in which the manifest has them."""
        return {schema.name: schema for schema in self.manifest.schemas}

    @property
    def watermark(self) -> int | None:
        """Event time when it was taken, in ms."""
        return self.manifest.watermark

    @property
    def metadata(self) -> dict[str, Any]:
        return self.manifest.metadata

    @property
    def attachments(self) -> tuple[str, ...]:
        """The names of the files that publish() was told to keep with it."""
        return tuple(one.name for one in self.manifest.attachments)

    def read_attachment(self, name: str) -> Data:
        """The contents of an attachment. DamagedError if they are not what was written."""
        for one in self.manifest.attachments:
            if one.name == name:
                return self._read_attached(one)
        raise ArgumentError(
            f"checkpoint {self.number} of {self.url!r} has no attachment {shorten(name)}. It has "
            f"{', '.join(map(repr, self.attachments)) or 'none'}."
        )

    def _read_attached(self, one: Attachment) -> Data:
        data = self.storage.read(one.file)
        if hashlib.sha256(data).hexdigest() != one.digest:
            what = f"the attachment {one.name!r} does not have the contents that its name says"
            raise damaged(self.storage.file(one.file), 0, what)
        return data

    @property
    def bytes(self) -> int:
        """Of all segments that it consists of, also of those that other checkpoints share."""
        return self.manifest.bytes

    @property
    def new_bytes(self) -> int:
        """Of the packs that were written for it."""
        return self.manifest.new_bytes

    @cached_property
    def modified(self) -> datetime:
        """When it was published, by the clock of the storage, in UTC."""
        name = self.manifest.name
        for entry in self.storage.list():
            if entry.name == name:
                return _time(entry.modified)
        raise _gone(self.storage, self.number)

    def exists(self) -> bool:
        """Whether it is still there: not removed, nor replaced by another one of its number."""
        if self._head is None:
            self._head = self.manifest.encode()[:HEAD_BYTES]
        try:
            return self.storage.read(self.manifest.name, 0, HEAD_BYTES) == self._head
        except (MissingFileError, DamagedError):
            return False

    def pin(self) -> Pin:
        """Keeps it from being removed until released: `with checkpoint.pin(): ...`.

        NoCheckpointError if it is gone, or another one is under its number. On object stores, which
        have no locks, a pin holds for collect() in this process only.
        """
        try:
            pin = self.storage.pin(self.manifest.name)
        except MissingFileError:
            raise self._is_gone() from None
        if not self.exists():
            pin.release()
            raise self._is_gone()
        return pin

    def _is_gone(self) -> NoCheckpointError:
        return NoCheckpointError(
            f"checkpoint {self.number} of {self.url!r} is gone, or another checkpoint of "
            "that number is there now. Restore the place itself to get what it has."
        )

    def __repr__(self) -> str:
        base = "" if self.manifest.base is None else f", on top of {self.manifest.base}"
        return (
            f"<Checkpoint {self.number} of {self.url!r}: {len(self.states)} states, key-groups "
            f"{show_groups(self.key_groups)} of {self.key_group_count}, {self.bytes:,} bytes{base}>"
        )

    def _repr_html_(self) -> str:
        import html

        cells = [
            (schema.name, schema.form, show(schema.type), key_codec(schema.key).python)
            for schema in self.manifest.schemas
        ]
        head = "".join(f"<th>{title}</th>" for title in ("state", "form", "type", "keys"))
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells
        )
        return f"<p>{html.escape(repr(self)[1:-1])}</p><table><tr>{head}</tr>{rows}</table>"

    # ---- Leaves

    def leaves(self) -> Iterator[int]:
        """The leaves that are not empty, ascending."""
        return (leaf for leaf, _ in self.manifest.chains())

    def leaf_bytes(self, leaf: int) -> int:
        """Bytes of all segments of a leaf."""
        return sum(segment.length for segment in self.manifest.chain(leaf))

    def place(self, leaf: int) -> tuple[Any, ...]:
        """Where a leaf lies. Leaves of the same place are equal, even in different checkpoints."""
        packs = self.manifest.packs
        chain = self.manifest.chain(leaf)
        return self.storage.url, *((packs[one.pack].id, one.offset, one.length) for one in chain)

    def segments(self, leaf: int) -> list[tuple[Segment, Data]]:
        """The chain of a leaf, oldest first, with its verified blocks."""
        return [(segment, self._read(segment)) for segment in self.manifest.chain(leaf)]

    def read_leaf(self, leaf: int) -> list[Data]:
        """The steps of a leaf, newest first, as Store.decode_chain() takes them.

        The blocks of one step are of different states. There is no step if the leaf is empty.
        """
        try:
            return self._read_steps(leaf)
        except DamagedError:
            if not self.storage.drop_copies([name for name, _, _ in self.manifest.places(leaf)]):
                raise
            return self._read_steps(leaf)

    def _read_steps(self, leaf: int) -> list[Data]:
        checked = self._packs_checked
        stored = []
        fresh = []
        for name, pack, segment in self.manifest.places(leaf):
            parts = [(segment.offset, segment.length)]
            header = None
            if segment.pack in checked:
                (frames,) = self.storage.read_parts(name, parts)
            else:
                # The header of a pack has no data, but is part of the checkpoint: checked once.
                header, frames = self.storage.read_parts(name, [(0, PACK_HEADER), *parts])
                fresh.append(segment.pack)
            stored.append(Stored(pack, segment, frames, header))
        steps = unpack_chain(stored, self._leaves, self.storage.file, self._number)
        checked.update(fresh)
        return steps

    def locate(self, leaves: Sequence[int]) -> "list[Chain]":
        """Where leaves lie, to pick single entries: see read_chains(). Leaves ascend.

        [] if the checkpoint is compressed: then all of a leaf must be decompressed anyway.
        """
        if self.manifest.compression is not None:
            return []
        return [
            Chain(self, leaf, segments, sum(segment[3] for segment in segments))
            for leaf, segments in zip(leaves, self.manifest.locate(leaves), strict=True)
        ]

    def read_joined(self, pack: int, segments: list[Segment]) -> dict[int, tuple[int, Data]]:
        """Reads segments of a pack: for the offset of each, some bytes that it is in.

        The bytes come with the offset at which they begin. Segments that lie close together are
        read at once. They are not verified.
        """
        gap_max = _GAP_LOCAL if self.storage.is_local else _GAP_FAR
        runs: list[list[int]] = []  # start and end of what is read at once
        for _, _, offset, length, _ in sorted(segments, key=itemgetter(2)):
            if not runs or offset > runs[-1][1] + gap_max:
                runs.append([offset, offset])
            runs[-1][1] = max(runs[-1][1], offset + length)
        parts = [(start, end - start) for start, end in runs]
        ref = self.manifest.packs[pack]
        if pack in self._packs_checked:
            pieces = self.storage.read_parts(ref.name, parts)
        else:
            header, *pieces = self.storage.read_parts(ref.name, [(0, PACK_HEADER), *parts])
            check_header_bytes(header, self.storage.file, ref)
            self._packs_checked.add(pack)
        starts = [start for start, _ in runs]
        return {
            offset: (starts[at := bisect_right(starts, offset) - 1], pieces[at])
            for _, _, offset, _, _ in segments
        }

    def _steps(self, leaf: int, state: str | None = None) -> Iterator[Block]:
        """Blocks of a leaf, newest first, down to the newest full block of each state."""
        done: set[str] = set()
        for segment in reversed(self.manifest.chain(leaf)):
            for block in self._blocks(segment, self._read(segment)):
                if block.name in done or state not in (None, block.name):
                    continue
                if not block.is_delta:
                    done.add(block.name)
                yield block
            if state in done:
                return

    def _read(self, segment: Segment) -> Data:
        pack = self.manifest.packs[segment.pack]
        if segment.pack not in self._packs_checked:
            check_header(self.storage, pack)  # it has no data, but is part of the checkpoint
            self._packs_checked.add(segment.pack)
        return read_segment(self.storage, pack, segment, number=self.number)

    def _blocks(self, segment: Segment, data: Data | memoryview) -> Iterator[Block]:
        try:
            for block in Block.each(data):
                if block.leaves != self.manifest.leaves:
                    raise self._damaged(segment, f"a block is of {block.leaves} leaves")
                yield block
        except CorruptBlockError as error:
            raise self._damaged(segment, f"there is a block that is not valid ({error})") from None

    def _damaged(self, segment: Segment, what: str) -> DamagedError:
        file = self.storage.file(self.manifest.packs[segment.pack].name)
        wanted = f", which leaf {segment.leaf} of checkpoint {self.number} needs"
        return damaged(file, segment.offset, f"{what}{wanted}")

    # ---- Entries

    def find(self, state: str | StateSchema, key: Data) -> Any:
        """The value under an encoded key as Block gives it; None if there is none.

        It takes one binary search per block, and nothing else is decoded.
        """
        schema = self._schema(state)
        codec = key_codec(schema.key)
        plain = decode_key(schema.key, key)
        missing = object()
        for block in self._steps(leaf_of_encoded(codec, key, self.manifest.leaves), schema.name):
            found = block.find(plain, missing=missing, deleted=None)
            if found is not missing:
                return found
        return None

    def leaf_rows(self, leaf: int) -> dict[str, dict[Data, Stamped]]:
        """All entries of a leaf: by state and encoded key, the value as Block gives it, and stamp.

        Expired entries are among them: whether an entry is expired depends on the time to live that
        is asked for. States without entries in the leaf are left out.
        """
        merged: dict[str, dict[Data, Stamped]] = {}
        for block in self._steps(leaf):
            stamps = block.stamps
            times = [None] * len(block) if stamps is None else stamps.tolist()
            rows = merged.setdefault(block.name, {})
            for (key, value), stamp in zip(block, times, strict=True):
                rows.setdefault(key, (value, stamp))
        kept = (
            (name, {key: row for key, row in rows.items() if row[0] is not None})
            for name, rows in merged.items()
        )
        return {name: rows for name, rows in kept if rows}

    def _schema(self, state: str | StateSchema) -> StateSchema:
        name = state.name if isinstance(state, StateSchema) else state
        try:
            return self.states[name]
        except KeyError:
            raise ArgumentError(
                f"checkpoint {self.number} of {self.url!r} has no state {shorten(name)}. "
                f"It has {', '.join(map(repr, self.states)) or 'none'}."
            ) from None

    # ---- Tables

    def table(self, state: str | StateSchema, **options: Unpack[TableOptions]) -> StateTable:
        """A state as a table: DuckDB, Polars, pyarrow and others read it directly.

        duckdb.sql("from pages") after pages = checkpoint.table("pages"). Nothing is read before
        that. The options are those of StateTable.
        """
        return StateTable(self, self._schema(state), **options)

    def to_arrow(
        self, state: str | StateSchema, **options: Unpack[TableOptions]
    ) -> "Iterator[pyarrow.RecordBatch]":
        """The entries of a state as record batches, which are made one at a time; see table().

        Readers of different key_groups can share the work: together they get every entry once.
        """
        return iter(self.table(state, **options))

    def arrow_schema(
        self, state: str | StateSchema, *, text: Collection[str] = (), stamps: bool = False
    ) -> "pyarrow.Schema":
        """The columns of a state. They follow from its declared type, whatever it contains."""
        return self.table(state, text=text, stamps=stamps).schema

    # ---- Verifying

    def verify(self) -> Iterator[DamagedError]:
        """Reads everything and gives all damage, not only the first."""
        by_pack: dict[int, list[Segment]] = {at: [] for at in range(len(self.manifest.packs))}
        for segment in self.manifest.segments:
            by_pack[segment.pack].append(segment)
        for pack, segments in by_pack.items():
            ref = self.manifest.packs[pack]
            yield from verify_pack(self.storage, ref, segments, number=self.number)
        yield from self.verify_attachments()

    def verify_attachments(self) -> Iterator[DamagedError]:
        """Reads all attachments and gives their damage."""
        for one in self.manifest.attachments:
            try:
                self._read_attached(one)
            except MissingFileError:
                yield damaged(self.storage.file(one.file), None, "it is not there")
            except DamagedError as error:
                yield error


class Chain(NamedTuple):
    """A leaf in a checkpoint."""

    checkpoint: Checkpoint
    leaf: int
    segments: list[Segment]  # newest first
    size: int  # bytes of all segments


def read_chains(chains: Iterable[Chain]) -> list[ChainSegment]:
    """Chains by ascending leaf, as pick_entries() takes them. pick_entries() verifies them."""
    found = []
    for checkpoint, some in groupby(chains, itemgetter(0)):
        segments = [segment for chain in some for segment in chain.segments]
        by_pack: dict[int, list[Segment]] = {}
        for segment in segments:
            by_pack.setdefault(segment[1], []).append(segment)
        data = {pack: checkpoint.read_joined(pack, of_it) for pack, of_it in by_pack.items()}
        ids = {pack: checkpoint.manifest.packs[pack].id for pack in by_pack}
        for leaf, pack, offset, length, _ in segments:
            start, piece = data[pack][offset]
            found.append(ChainSegment(leaf, piece, offset - start, length, ids[pack], offset))
    return found


class Run(NamedTuple):
    """Leaves that lie close together in a pack, as Store.decode_run() takes them."""

    data: bytes
    pack_id: bytes
    offset: int  # of data in the pack
    places: "array[int]"  # for each leaf: its number, where it begins in data, its size

    def only(self, is_wanted: Callable[[int], bool]) -> "array[int]":
        """The places of some of the leaves."""
        places = self.places
        kept = array("Q")
        for at in range(0, len(places), 3):
            if is_wanted(places[at]):
                kept += places[at : at + 3]
        return kept


def read_runs(chains: Iterable[Chain]) -> list[Run]:
    """Chains of at most one segment, by ascending leaf. decode_run() verifies them."""
    runs: dict[tuple[bytes, int], Run] = {}
    for checkpoint, some in groupby(chains, itemgetter(0)):
        by_pack: dict[int, list[Segment]] = {}
        for chain in some:
            if not chain.segments:
                empty = runs.setdefault((bytes(16), -1), Run(b"", bytes(16), 0, array("Q")))
                empty.places.extend((chain.leaf, 0, 0))
            for segment in chain.segments:
                by_pack.setdefault(segment[1], []).append(segment)
        for pack, segments in by_pack.items():
            pack_id = checkpoint.manifest.packs[pack].id
            data = checkpoint.read_joined(pack, segments)
            for leaf, _, offset, length, _ in segments:
                start, piece = data[offset]
                run = runs.setdefault(
                    (pack_id, start), Run(bytes(piece), pack_id, start, array("Q"))
                )
                run.places.extend((leaf, offset - start, length))
    return [*runs.values()]


# ---- Finding checkpoints


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _gone(storage: Storage, number: int) -> NoCheckpointError:
    return NoCheckpointError(
        f"{storage.shown!r} has no checkpoint {number}. `statekit ls` tells which it has."
    )


def _storage(url: "str | PathLike[str] | Storage") -> Storage:
    return url if isinstance(url, Storage) else open_storage(url)


def list_numbers(storage: Storage) -> dict[int, float]:
    """The checkpoints of a storage, ascending, and when they were published.

    A listing is no snapshot: begun before checkpoint 2 is published, and going past 1 when that is
    removed, it shows neither. So one that shows files and no checkpoint is made again.
    """
    numbers: dict[int, float] = {}
    for _ in range(_LISTS_MAX):
        entries = storage.list()
        found = ((number_of(entry.name), entry.modified) for entry in entries)
        numbers = {number: modified for number, modified in found if number is not None}
        if numbers or not entries:
            break
    return numbers


def _unpickled(url: str, name: str, data: bytes, seen: int) -> Checkpoint:
    storage = open_storage(url)
    found = Checkpoint(storage, Manifest.decode(data, storage.file(name)), data)
    found.seen = seen
    return found


def read_checkpoint(storage: Storage, number: int) -> Checkpoint:
    """One checkpoint. NoCheckpointError if there is none.

    UnfinishedError, a NoCheckpointError, if there is a manifest that was never finished.
    DamagedError if the manifest is not valid for another reason.
    """
    name = manifest_name(number)
    try:
        data = storage.read(name)
        try:
            return Checkpoint(storage, Manifest.decode(data, storage.file(name)), data)
        except DamagedError:
            if storage.is_unfinished(name):
                raise UnfinishedError(
                    f"checkpoint {number} of {storage.shown!r} is being written, or its writer "
                    "died before it was published. Use another one."
                ) from None
            again = storage.read(name)
            if again == data:
                raise
        # It was finished between our two reads.
        return Checkpoint(storage, Manifest.decode(again, storage.file(name)), again)
    except MissingFileError:
        raise _gone(storage, number) from None


def find_checkpoints(url: "str | PathLike[str] | Storage") -> Found:
    """All checkpoints of a place that can be read, and why the others cannot."""
    storage = _storage(url)
    found = Found([], [])
    numbers = list_numbers(storage)
    for number in numbers:
        try:
            # If one is gone, it was retired after the listing. That is no error.
            with contextlib.suppress(NoCheckpointError):
                found.good.append(read_checkpoint(storage, number))
                found.good[-1].seen = max(numbers)  # an older one knows that there is a newer one
        except CheckpointError as error:
            found.errors.append(error)
    return found


def checkpoints(url: "str | PathLike[str] | Storage") -> list[Checkpoint]:
    """The checkpoints of a place, oldest first. DamagedError if one cannot be read."""
    good, errors = find_checkpoints(url)
    if errors:
        raise errors[0]
    return good


def open_checkpoint(
    url: "str | PathLike[str] | Storage", at: int | datetime | None = None
) -> Checkpoint:
    """The newest checkpoint of a place, or the one of a number, or the newest up to a time.

    It never gives another one instead: if that one is damaged, DamagedError names the older ones.
    """
    storage = _storage(url)
    numbers = list_numbers(storage)
    if not numbers:
        raise NoCheckpointError(
            f"there is no checkpoint in {storage.shown!r}. Is it the right place? "
            "kv.checkpoint(url) makes one."
        )
    seen = max(numbers)
    while True:
        number = _chosen(storage, numbers, at)
        try:
            found = read_checkpoint(storage, number)
        except UnfinishedError:
            if type(at) is int or len(numbers) == 1:
                raise
            del numbers[number]
        except DamagedError as error:
            older = [str(other) for other in numbers if other < number]
            error.add_note(f"Older checkpoints there: {', '.join(older[-5:]) or 'none'}.")
            raise
        else:
            found.seen = seen
            return found


def _chosen(storage: Storage, numbers: dict[int, float], at: Any) -> int:
    if at is None:
        return max(numbers)
    if isinstance(at, datetime):
        seconds = at.timestamp()  # a datetime without a zone is in local time
        early = [number for number, modified in numbers.items() if modified <= seconds]
        if early:
            return max(early)
        raise NoCheckpointError(
            f"{storage.shown!r} has no checkpoint from {at} or before; the oldest, "
            f"{min(numbers)}, is of {_time(numbers[min(numbers)])}."
        )
    if type(at) is not int:
        raise ArgumentError(
            f"{shorten(at)} says no checkpoint. Give a number, a datetime, or None for the newest."
        )
    if at in numbers:
        return at
    raise _gone(storage, at)
