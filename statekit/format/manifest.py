"""A manifest: the one file that says what a checkpoint consists of. Its name is its number.

A checkpoint exists from the moment its manifest is there. The manifest names packs (files of
frames) and says which leaf has which pieces of them. Little endian:

     at  bytes  field
      0      8  magic "SKMANIF1"
      8      4  CRC32C of bytes 12 .. size
     12      4  format version
     16      8  size of the file
     24      8  number of the checkpoint
     32      4  key-groups
     36      4  sub-groups of a key-group
     40      4  P, the number of packs
     44      4  T, the number of segments
     48      8  J, the bytes of the description
     56      8  zero
     64      J  description: a JSON object in UTF-8, then zeros up to a multiple of 8
      -   32 P  packs: id (16), size of the file (8), number of the checkpoint that wrote it (8)
      -   32 T  segments: leaf (4), pack (4), offset (8), length (8), flags (4; 1 = delta), zero (4)

The description (description.py) holds the states, the owned key-groups and everything else.
The segments of one leaf are its chain, oldest first. The first is full, the others are applied over
the ones before them. A leaf without segments is empty.

If several processes write one checkpoint (checkpoint/parts.py), the part of each process is such a
file too. It has the key-groups of that process and is named <number>-<SHA-256 of the file>.part. A
part is no checkpoint.

A manifest is valid iff
 1. magic, version and checksum are right, and bytes that are to be zero are zero;
 2. the size is that of the file, and what J, P and T add up to;
 3. its number is 1 or more, and is the number in its name;
 4. key-groups and sub-groups are powers of two, and their product is at most 2^20;
 5. the description is a JSON object with all its keys, each of the right type; base is smaller than
    the number; generation and owner are both there or both absent, and the generation is from 1 to
    the number; a digest of the base is there only if there is a base; parts, writers and
    attachments are lists of different names, and the first of the writers is the owner; the names
    of states differ; forms, clocks and key types are known, and types are well-formed
    (statekit/schema.py);
 6. the owned ranges ascend, none is empty, and all lie within the key-groups;
 7. the ids of packs differ; a pack's size is a multiple of 8 and more than its header; its
    number is not 0 and not above the manifest's; from pack to pack these numbers never fall;
 8. a segment's leaf is in an owned key-group, and from segment to segment leaves never fall;
 9. a segment's pack is one of the P packs; its offset is a multiple of 8 and not in the pack's
    header; its length is a multiple of 8 and not 0, and it ends inside the pack;
10. the first segment of a leaf is no delta, and all its other segments are; of two segments that
    follow each other in a leaf, the pack of the later one has no smaller number, and the two do not
    overlap.
Decoding checks all of these. Counts are compared with the bytes that are there before any object is
made. So a manifest costs memory in proportion to its file, whatever it claims.

There may be 2^20 leaves and even more segments, so segments are never a list of objects: `Segments`
is a sequence over the bytes as they lie in the file, checked column by column.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import compress, count, pairwise
from operator import add, eq, itemgetter, le, or_
from struct import Struct
from typing import Any, NamedTuple, NoReturn, TypeAlias, overload

from statekit._native import lib
from statekit.assignment import show_groups
from statekit.errors import ArgumentError, CheckpointError, DamagedError, shorten
from statekit.format.description import ATTACHMENT_NAME, Attachment, Description, DescriptionError
from statekit.native.digest import crc32c
from statekit.schema import StateSchema

FORMAT_READABLE = 1  # lowest version that can be read
FORMAT_WRITABLE = 1  # lowest version that can be written
FORMAT_LATEST = 1  # what is written

PACK_HEADER = 64  # bytes before the first frame of a pack
NUMBER_MAX = 10**12 - 1  # names have 12 digits

_MAGIC = b"SKMANIF1"
_HEADER = Struct("<8sIIQQIIIIQQ")
_CRC_END = 12  # the checksum covers all bytes after itself
_PACK = Struct("<16sQQ")
_SEGMENT = Struct("<IIQQII")
_ROW = 32  # bytes of a pack, and of a segment
_DELTA = 1

_ALIGNED = bytes(b % 8 == 0 for b in range(256))  # by low byte: is it a multiple of 8
_Bytes: TypeAlias = bytes  # Manifest.bytes hides the name
_NAME = re.compile(r"([0-9]{12})\.manifest", re.ASCII)
_PART_NAME = re.compile(r"([0-9]{12})-([0-9a-f]{64})\.part", re.ASCII)

assert (_HEADER.size, _PACK.size, _SEGMENT.size) == (64, _ROW, _ROW)


def manifest_name(number: int) -> str:
    """The file of a checkpoint.

    >>> manifest_name(7)
    '000000000007.manifest'
    """
    if not 1 <= number <= NUMBER_MAX:
        raise ArgumentError(
            f"there is no checkpoint {shorten(number)}. They are counted from 1 to {NUMBER_MAX}."
        )
    return f"{number:012}.manifest"


def number_of(name: str) -> int | None:
    """The number of the checkpoint whose manifest has this name; None if no manifest has it.

    >>> number_of("000000000007.manifest"), number_of("7.manifest")
    (7, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) or None if found else None


def part_name(number: int, digest: bytes) -> str:
    """The file of a part of a checkpoint that is not published. digest: SHA-256 of its contents."""
    return f"{manifest_name(number)[:12]}-{digest.hex()}.part"


def number_of_unpublished(name: str) -> int | None:
    """The number of the checkpoint that a part or an attachment is for; None if it is neither.

    >>> number_of_unpublished(part_name(7, bytes(32)))
    7
    """
    found = _PART_NAME.fullmatch(name) or ATTACHMENT_NAME.fullmatch(name)
    return int(found[1]) or None if found else None


def digest_of_part(name: str) -> bytes | None:
    """The SHA-256 in the name of a part; None if it is not the name of a part."""
    found = _PART_NAME.fullmatch(name)
    return bytes.fromhex(found[2]) if found else None


def damaged(file: str, offset: int | None, what: str) -> DamagedError:
    """The exception for bytes that are not what was written."""
    place = "" if offset is None else f" at byte {offset}"
    return DamagedError(
        f"{file} is damaged{place}: {what}. Restore an older checkpoint with at=N, "
        "or run `statekit verify` to see what else is affected.",
        file=file,
        offset=offset,
        what=what,
    )


class PackRef(NamedTuple):
    """A pack, as a manifest names it."""

    id: bytes  # 16 bytes
    size: int  # of the file, header included
    number: int  # of the checkpoint that wrote it

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.id.hex()}.pack"


class Segment(NamedTuple):
    """The consecutive frames of one leaf in a pack."""

    leaf: int
    pack: int  # index into the manifest's packs
    offset: int  # in the pack's file
    length: int  # bytes
    is_delta: bool  # applied over the segments before it


class LocatedSegment(NamedTuple):
    """A segment, and where it is."""

    file: str  # of the pack
    pack: PackRef
    segment: Segment


class Segments(Sequence[Segment]):
    """Segments over their bytes in a manifest. Items and slices are made when asked for.

    >>> segments = Segments.of([Segment(3, 0, 64, 128, False)])
    >>> segments[0].length, len(segments), len(segments.raw)
    (128, 1, 32)
    """

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        assert len(raw) % _ROW == 0
        self.raw = raw

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> "Segments":
        rows = segments if isinstance(segments, list | tuple) else list(segments)
        leaves, packs, offsets, lengths, deltas = (map(itemgetter(at), rows) for at in range(5))
        words = array("Q", bytes(_ROW * len(rows)))
        words[0::4] = array("Q", map(or_, leaves, map((32).__rlshift__, packs)))
        words[1::4] = array("Q", offsets)
        words[2::4] = array("Q", lengths)
        words[3::4] = array("Q", map(bool, deltas))
        return cls(words.tobytes())

    def __len__(self) -> int:
        return len(self.raw) // _ROW

    @overload
    def __getitem__(self, at: int) -> Segment: ...
    @overload
    def __getitem__(self, at: slice) -> "Segments": ...
    def __getitem__(self, at: int | slice) -> "Segment | Segments":
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step == 1:
                return Segments(self.raw[start * _ROW : max(start, stop) * _ROW])
            return Segments.of(self[i] for i in range(start, stop, step))
        at = range(len(self))[at]  # IndexError if it is out of range; negative ones count backwards
        leaf, pack, offset, length, flags, _ = _SEGMENT.unpack_from(self.raw, at * _ROW)
        return Segment(leaf, pack, offset, length, bool(flags & _DELTA))

    def __iter__(self) -> Iterator[Segment]:
        for leaf, pack, offset, length, flags, _ in _SEGMENT.iter_unpack(self.raw):
            yield Segment(leaf, pack, offset, length, bool(flags & _DELTA))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"<{len(self)} segments>"

    # Columns; the host is little endian, as the file is.

    @property
    def leaves(self) -> memoryview:
        return memoryview(self.raw).cast("I")[0 :: _ROW // 4]

    @property
    def packs(self) -> memoryview:
        return memoryview(self.raw).cast("I")[1 :: _ROW // 4]

    @property
    def offsets(self) -> memoryview:
        return memoryview(self.raw).cast("Q")[1 :: _ROW // 8]

    @property
    def lengths(self) -> memoryview:
        return memoryview(self.raw).cast("Q")[2 :: _ROW // 8]

    @property
    def flags(self) -> memoryview:
        """Each together with the four zero bytes behind it."""
        return memoryview(self.raw).cast("Q")[3 :: _ROW // 8]

    def rows(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """leaf, pack, offset, length, flags and 0 of each segment: the fastest loop over all."""
        return _SEGMENT.iter_unpack(self.raw)

    def chain(self, leaf: int) -> "Segments":
        leaves = self.leaves
        start = bisect_left(leaves, leaf)
        return self[start : bisect_right(leaves, leaf, start)]


def arrange(
    packs: Sequence[PackRef], segments: Iterable[Segment]
) -> tuple[tuple[PackRef, ...], Segments]:
    """Packs and segments in the order in which a manifest has them. Unused packs are dropped.

    Segments may be given in any order of their leaves, but those of one leaf oldest first. Packs
    are ordered by number and then by first use, so that the same segments give the same bytes.
    """
    rows = segments if isinstance(segments, Segments) else Segments.of(segments)
    leaves, before = rows.leaves.tolist(), rows.packs.tolist()
    order = sorted(range(len(rows)), key=leaves.__getitem__)  # stable: chains stay as they are
    used = list(dict.fromkeys(map(before.__getitem__, order)))
    used.sort(key=lambda pack: packs[pack].number)
    place = {pack: at << 32 for at, pack in enumerate(used)}
    words = array("Q", rows.raw)
    words[0::4] = array("Q", map(or_, leaves, map(place.__getitem__, before)))
    if order != list(range(len(rows))):
        for column in range(4):
            words[column::4] = array("Q", map(words[column::4].__getitem__, order))
    return tuple(packs[pack] for pack in used), Segments(words.tobytes())


def join(
    parts: Iterable[tuple[Sequence[PackRef], Segments]],
) -> tuple[tuple[PackRef, ...], Segments]:
    """The packs and segments of several manifests, joined for one. No two may share a leaf."""
    places: dict[PackRef, int] = {}
    rows: list[Segment] = []
    for packs, segments in parts:
        at = [places.setdefault(pack, len(places)) for pack in packs]
        rows += [
            Segment(leaf, at[pack], offset, length, bool(flags & _DELTA))
            for leaf, pack, offset, length, flags, _ in segments.rows()
        ]
    return arrange(list(places), rows)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of."""

    number: int
    key_groups: int  # how many there are in all, not only the owned ones
    subgroups: int
    owned: tuple[range, ...]
    schemas: tuple[StateSchema, ...] = ()
    base: int | None = None  # the checkpoint it was made on top of
    compression: str | None = None
    watermark: int | None = None  # event time, ms
    metadata: dict[str, Any] = field(default_factory=dict)
    generation: int = 0  # of the owner that published it; see ownership.py. 0: there is no owner
    owner: str = ""
    base_digest: str = ""  # SHA-256 of the manifest of the base; "": not recorded
    parts: tuple[str, ...] = ()  # files of the parts that it was published from, sorted
    writers: tuple[str, ...] = ()  # the owners of those parts
    attachments: tuple[Attachment, ...] = ()
    packs: tuple[PackRef, ...] = ()
    segments: Segments = field(default_factory=lambda: Segments(b""))  # any iterable of Segment

    def __post_init__(self) -> None:
        if not isinstance(self.segments, Segments):
            object.__setattr__(self, "segments", Segments.of(self.segments))

    @property
    def name(self) -> str:
        """Of its file."""
        return manifest_name(self.number)

    @property
    def leaves(self) -> int:
        return self.key_groups * self.subgroups

    @property
    def files(self) -> frozenset[str]:
        """The names of all files that the checkpoint needs, besides the manifest."""
        packs = (pack.name for pack in self.packs)
        return frozenset(packs).union(one.file for one in self.attachments)

    @cached_property
    def bytes(self) -> int:
        """Bytes of all segments: what is read to restore the whole checkpoint."""
        return sum(self.segments.lengths.tolist())

    @property
    def new_bytes(self) -> int:
        """Bytes of the packs that this checkpoint wrote."""
        return sum(pack.size for pack in self.packs if pack.number == self.number)

    def chain(self, leaf: int) -> Segments:
        """The segments of a leaf, oldest first; none if it is empty."""
        return self.segments.chain(leaf)

    def places(self, leaf: int) -> list[LocatedSegment]:
        """The chain of a leaf, newest first: all that is needed to read it."""
        return [
            LocatedSegment((pack := self.packs[segment.pack]).name, pack, segment)
            for segment in [*self.segments.chain(leaf)][::-1]
        ]

    def locate(self, leaves: Iterable[int]) -> list[list[Segment]]:
        """The chains of ascending leaves: each newest first, and [] for an empty leaf."""
        column, raw, count = self.segments.leaves, self.segments.raw, len(self.segments)
        found = []
        at = 0
        for leaf in leaves:
            at = bisect_left(column, leaf, at)
            chain: list[Segment] = []
            while at < count and column[at] == leaf:
                _, pack, offset, length, flags, _ = _SEGMENT.unpack_from(raw, at * _ROW)
                chain.append(Segment(leaf, pack, offset, length, bool(flags & _DELTA)))
                at += 1
            chain.reverse()
            found.append(chain)
        return found

    def chains(self) -> Iterator[tuple[int, Segments]]:
        """Every leaf that has segments, with them, by ascending leaf."""
        starts = [*compress(count(), map(_DELTA.__ne__, self.segments.flags)), len(self.segments)]
        leaves, raw = self.segments.leaves, self.segments.raw
        for start, stop in pairwise(starts):
            yield leaves[start], Segments(raw[start * _ROW : stop * _ROW])

    def changed(self) -> list[tuple[int, list[int]]]:
        """Leaves that have deltas over their full segment, with the bytes of all their segments.

        Leaves ascend; segments come oldest first. Most leaves have no deltas, and are passed over
        quickly.
        """
        leaves, lengths = self.segments.leaves, self.segments.lengths
        found: dict[int, list[int]] = {}
        for at in compress(count(), map(_DELTA.__eq__, self.segments.flags)):
            leaf = leaves[at]
            if leaf not in found:
                found[leaf] = [lengths[at - 1]]  # the full one is the first of its leaf
            found[leaf].append(lengths[at])
        return [*found.items()]

    # ---- Bytes

    def encode(self) -> _Bytes:
        """The file's contents: the same for equal manifests. AssertionError if it is not valid."""
        description = Description(
            self.base,
            self.compression,
            self.owned,
            self.metadata,
            self.schemas,
            self.watermark,
            self.generation,
            self.owner,
            self.base_digest,
            self.parts,
            self.writers,
            self.attachments,
        ).encode()
        packs = b"".join(_PACK.pack(*pack) for pack in self.packs)
        padding = bytes(-len(description) % 8)
        size = _HEADER.size + len(description) + len(padding) + len(packs) + len(self.segments.raw)
        header = _HEADER.pack(
            _MAGIC, 0, FORMAT_LATEST, size, self.number, self.key_groups, self.subgroups,
            len(self.packs), len(self.segments), len(description), 0,
        )  # fmt: skip
        data = bytearray(b"".join((header, description, padding, packs, self.segments.raw)))
        data[8:_CRC_END] = crc32c(memoryview(data)[_CRC_END:]).to_bytes(4, "little")
        try:
            self._check(_HEADER.size + len(description) + len(padding))
            _read_description(description, self.number, self.key_groups)
        except _Invalid as fault:
            raise AssertionError(f"this manifest is not valid: {fault.what}") from None
        return bytes(data)

    @classmethod
    def decode(cls, data: _Bytes, file: str) -> "Manifest":
        """What these bytes of a file say. DamagedError if they are not a valid manifest."""
        try:
            return cls._decode(bytes(data), file)
        except _Invalid as fault:
            raise damaged(file, fault.offset, fault.what) from None

    @classmethod
    def _decode(cls, data: _Bytes, file: str) -> "Manifest":
        if len(data) < _HEADER.size:
            _fail(len(data), f"it ends within its header of {_HEADER.size} bytes")
        (
            magic, checksum, version, size, number, key_groups, subgroups,
            pack_count, segment_count, description_bytes, zero,
        ) = _HEADER.unpack_from(data)  # fmt: skip
        if magic != _MAGIC:
            _fail(0, "it does not begin as a manifest does")
        if checksum != crc32c(memoryview(data)[_CRC_END:]):
            _fail(8, "its checksum does not match its contents")
        if not FORMAT_READABLE <= version <= FORMAT_LATEST:
            raise CheckpointError(
                f"{file} has format version {version}, and this statekit reads versions "
                f"{FORMAT_READABLE} to {FORMAT_LATEST}. Update statekit."
            )
        if zero:
            _fail(56, "bytes that should be zero are not")
        packs_at = _HEADER.size + description_bytes + -description_bytes % 8
        segments_at = packs_at + _ROW * pack_count
        if size != len(data) or segments_at + _ROW * segment_count != size:
            _fail(16, f"it has {len(data)} bytes, which is not what its header says")
        name = re.split(r"[/\\]", file)[-1]
        if number != (number_of(name) or number_of_unpublished(name)):
            _fail(24, f"it is the manifest of checkpoint {number}, under another name")
        if not _is_geometry(key_groups, subgroups):
            _fail(32, f"no store has {key_groups} key-groups of {subgroups} sub-groups")
        text = data[_HEADER.size : _HEADER.size + description_bytes]
        if any(data[_HEADER.size + description_bytes : packs_at]):
            _fail(_HEADER.size + description_bytes, "the padding is not zero")
        description = _read_description(text, number, key_groups)
        manifest = cls(
            number=number,
            key_groups=key_groups,
            subgroups=subgroups,
            owned=description.owned,
            schemas=description.schemas,
            base=description.base,
            compression=description.compression,
            watermark=description.watermark,
            metadata=description.metadata,
            generation=description.generation,
            owner=description.owner,
            base_digest=description.base_digest,
            parts=description.parts,
            writers=description.writers,
            attachments=description.attachments,
            packs=tuple(map(PackRef._make, _PACK.iter_unpack(data[packs_at:segments_at]))),
            segments=Segments(data[segments_at:]),
        )
        manifest._check(packs_at)
        return manifest

    # ---- Validity: conditions 4 and 7 to 10

    def _check(self, packs_at: int) -> None:
        if not _is_geometry(self.key_groups, self.subgroups):
            _fail(32, f"no store has {self.key_groups} key-groups of {self.subgroups} sub-groups")
        self._check_packs(packs_at)
        self._check_segments(packs_at + _ROW * len(self.packs))

    def _check_packs(self, at: int) -> None:
        seen: set[_Bytes] = set()
        newest = 1
        for place, (id_, size, number) in enumerate(self.packs):
            if len(id_) != 16 or id_ in seen:
                _fail(at + _ROW * place, "a pack is named twice")
            if size <= PACK_HEADER or size % 8:
                _fail(at + _ROW * place + 16, f"no pack has {size} bytes")
            if not newest <= number <= self.number:
                _fail(at + _ROW * place + 24, f"a pack of checkpoint {number} is out of order")
            seen.add(id_)
            newest = number

    def _check_segments(self, at: int) -> None:
        # Columns as lists: C loops over them are some ten times as fast as a loop over segments.
        rows = self.segments
        leaves, packs = rows.leaves.tolist(), rows.packs.tolist()
        offsets, lengths, flags = rows.offsets.tolist(), rows.lengths.tolist(), rows.flags.tolist()
        if not leaves:
            return
        sizes = [pack.size for pack in self.packs]
        ascend = partial(map, le, leaves, leaves[1:])
        _expect(ascend, at + _ROW, "leaves are not in ascending order")
        self._check_owned(leaves, at)
        known = partial(map, len(sizes).__gt__, packs)
        _expect(known, at + 4, f"a segment is in a pack that is not one of {len(sizes)}")
        behind = partial(map, PACK_HEADER.__le__, offsets)
        _expect(behind, at + 8, "a segment begins in the header of its pack")
        _expect(lambda: lengths, at + 16, "a segment is empty")
        for low, what in ((8, "begins"), (16, "ends")):
            aligned = partial(rows.raw[low::_ROW].translate, _ALIGNED)
            _expect(aligned, at + low, f"a segment {what} at no multiple of 8")
        _expect(
            lambda: map(le, map(add, offsets, lengths), map(sizes.__getitem__, packs)),
            at + 8,
            "a segment ends behind the end of its pack",
        )
        # In a chain the first segment is full and all others are deltas. So a segment has the flag
        # if and only if the segment before it is of the same leaf.
        if flags[0]:
            _fail(at + 24, "the first segment of a leaf is a delta")
        _expect(
            lambda: map(eq, flags[1:], map(eq, leaves, leaves[1:])),
            at + _ROW + 24,
            "a segment has a wrong flag",
        )
        self._check_chains(packs, offsets, lengths, flags, at)

    def _check_owned(self, leaves: list[int], at: int) -> None:
        """No leaf lies in a gap between the owned ranges. It takes one search per gap."""
        bounds = [
            bound * self.subgroups for part in self.owned for bound in (part.start, part.stop)
        ]
        gaps = zip([0, *bounds[1::2]], [*bounds[0::2], 1 << 32], strict=True)
        for start, stop in gaps:
            first = bisect_left(leaves, start)
            if first < len(leaves) and leaves[first] < stop:
                _fail(
                    at + _ROW * first,
                    f"leaf {leaves[first]} is not in the key-groups {show_groups(self.owned)}",
                )

    def _check_chains(
        self,
        packs: list[int],
        offsets: list[int],
        lengths: list[int],
        flags: list[int],
        at: int,
    ) -> None:
        numbers = [pack.number for pack in self.packs]
        for later in compress(count(), flags):
            pack, before = packs[later], packs[later - 1]
            if pack == before:
                first, second = sorted((later - 1, later), key=offsets.__getitem__)
                is_good = offsets[first] + lengths[first] <= offsets[second]
            else:
                is_good = numbers[pack] >= numbers[before]
            if not is_good:
                _fail(at + _ROW * later, "the segments of a leaf are not in the order of their age")


class _Invalid(Exception):  # noqa: N818 - it never leaves this file
    """A condition that does not hold, and where in the file."""

    def __init__(self, offset: int, what: str) -> None:
        self.offset = offset
        self.what = what


def _fail(offset: int, what: str) -> NoReturn:
    raise _Invalid(offset, what)


def _expect(goods: Callable[[], Iterable[Any]], at: int, what: str) -> None:
    """Fails at the row of the first item that is not true. at: the offset of the first row."""
    if not all(goods()):
        _fail(at + _ROW * [bool(good) for good in goods()].index(False), what)


def _is_geometry(key_groups: int, subgroups: int) -> bool:
    powers = all(n > 0 and n & (n - 1) == 0 for n in (key_groups, subgroups))
    return powers and key_groups * subgroups <= int(lib.SK_LEAVES_MAX)


def _read_description(text: bytes, number: int, key_groups: int) -> Description:
    try:
        return Description.read(text, number, key_groups)
    except DescriptionError as error:
        _fail(_HEADER.size, str(error))
