"""Packs: files of frames, which hold the contents of checkpoints. Manifests say what is where.

A pack is written once, as a whole, and never changed. Little endian:

     at  bytes  field
      0      8  magic "SKPACK1" and a zero
      8     16  id of the pack; its file is named after it
     24      4  format version
     28      4  CRC32C of bytes 0 .. 28
     32      8  number of the checkpoint that wrote it
     40     24  zero
     64      -  frames, each at a multiple of 8, until the end of the file

A frame is one state's entries in one leaf: a block ("SKB1", csrc/block.h) or a compressed block:

     at  bytes  field
      0      4  magic "SKZ1"
      4      4  checksum
      8      8  size of the frame, a multiple of 8
     16      8  size of the block inside
     24      8  length of the payload
     32      1  codec: 1 = zstd, 2 = lz4; 3 and 4: the same of the squeezed block (compression.py)
     33      7  zero
     40      -  payload, then zeros up to the size. The block inside has checksum 0

Both kinds of frames begin alike, so binding and verifying need not tell them apart (csrc/frames.c):

    checksum = CRC32C of bytes 8 .. size of the frame, XOR mix
    mix      = low 32 bits of XXH64 of the pack's id and the frame's offset (8 bytes), seed 0

The checksum is bound to its place: a good frame in a wrong file, or at a wrong offset, is a bad
frame. It is bound by XOR, so that a frame can move to another pack without reading its bytes again.

    id = XXH64(d, seed 2 n) and XXH64(d, seed 2 n + 1), 8 bytes each; n = number of the checkpoint
    d  = size (8) and CRC32C without mix (4) of each frame, in order

So the same state and number give the same name and bytes. The number goes into the id: packs of two
checkpoints never have the same name, so a checkpoint never replaces a pack of another one.

A frame is valid iff
1. its magic is known, its size a multiple of 8, and it ends inside its segment;
2. its checksum is right;
3. if it is compressed, its codec is known and there are zeros where they must be; its payload fits,
   and decompresses to exactly the size that is stated: a block of that size with checksum 0;
4. its block is of the leaf that the segment is about, and no other block in the segment is of the
   same state.
unpack_segment() checks all of these. unpack_chain() checks the headers of blocks in addition. The
rest of a block is checked when it is decoded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple, Protocol, TypeAlias

from statekit._native import lib
from statekit.errors import CorruptBlockError, DamagedError
from statekit.format.compression import CODECS, compress, decompress
from statekit.format.manifest import FORMAT_LATEST, PACK_HEADER, PackRef, Segment, damaged
from statekit.native.block import Block
from statekit.native.digest import xxh64
from statekit.native.frames import Frames, bind, digest, read_head, seal, verify

PACK_BYTES = 16 << 20  # a pack is finished when it has this size

_MAGIC = b"SKPACK1\0"
_HEADER = Struct("<8s16sI")
_NUMBER = Struct("<Q24x")
_HEAD = Struct("<4sIQ")  # of every frame: magic, checksum, size
_BLOCK = b"SKB1"
_BLOCK_HEADER = 56
_BLOCK_LEAF = Struct("<I")
_BLOCK_LEAF_AT = 40
_BLOCK_NAME_LENGTH_AT = 49
_ENVELOPE = Struct("<4sIQQQQ")  # magic, checksum, size, size inside, payload length, codec
_COMPRESSED = b"SKZ1"

assert _ENVELOPE.size == 40
assert _HEADER.size + 4 + _NUMBER.size == PACK_HEADER


FullName: TypeAlias = Callable[[str], str]  # of a file, for messages: Storage.file()


class FilledLeaf(Protocol):
    """Where Snapshot.fill() put the blocks of a leaf."""

    @property
    def leaf(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def is_delta(self) -> Any: ...


def pack_header(id_: bytes, number: int) -> bytes:
    """The first 64 bytes of a pack: all of them follow from its id and number."""
    head = _HEADER.pack(_MAGIC, id_, FORMAT_LATEST)
    checksum: int = lib.sk_crc32c(head, len(head), 0)
    return head + checksum.to_bytes(4, "little") + _NUMBER.pack(number)


class PackBuilder:
    """One pack in memory. Frames in `buffer` have plain checksums until finish() binds them."""

    def __init__(
        self, number: int, compression: str | None = None, buffer: Frames | None = None
    ) -> None:
        """buffer: the buffer of a pack that is not needed any more, to be used again."""
        self.number = number
        self.compression = compression
        self.buffer = Frames() if buffer is None else buffer  # Snapshot.fill() appends to it
        self.buffer.clear()
        self.buffer.append(bytes(PACK_HEADER))
        self._segments: list[Segment] = []

    @property
    def size(self) -> int:
        """Bytes so far, before compression."""
        return len(self.buffer)

    def add_filled(self, records: Iterable[FilledLeaf]) -> None:
        """Takes note of the segments that Snapshot.fill() appended to `buffer`."""
        for record in records:
            self._note(record.leaf, record.offset, record.length, bool(record.is_delta))

    def add(self, leaf: int, blocks: Any, is_delta: bool = False) -> None:
        """Adds a segment of blocks. Their checksums are made anew."""
        start = len(self.buffer)
        self.buffer.append(blocks)
        added = self.buffer.view()[start:]
        for at, size in _walk(added):
            assert size, f"what was to be added has no frame at {at}"
            added[at + 4 : at + 8] = bytes(4)
        seal(added)
        self._note(leaf, start, len(added), is_delta)

    def add_frames(self, leaf: int, frames: Any, is_delta: bool = False) -> None:
        """Adds a segment of frames as unpack_frames() gives them: nothing is computed again."""
        start = len(self.buffer)
        self.buffer.append(frames)
        self._note(leaf, start, len(frames), is_delta)

    def _note(self, leaf: int, offset: int, length: int, is_delta: bool) -> None:
        assert length > 0, "a segment has a frame"
        self._segments.append(Segment(leaf, 0, offset, length, is_delta))

    def finish(self) -> tuple[PackRef, Sequence[Any], list[Segment]]:
        """The pack's name and size, its contents in parts, and the segments in order of adding.

        Nothing may be added afterwards. The parts share the builder's memory.
        """
        assert self._segments, "an empty pack is not written"
        data = self.buffer.view()
        segments = self._segments
        if self.compression is not None:
            data, segments = _compressed(data, segments, self.compression)
        frames = data[PACK_HEADER:]
        digests = digest(frames)
        seeds = (2 * self.number, 2 * self.number + 1)
        id_ = b"".join(xxh64(digests, seed).to_bytes(8, "little") for seed in seeds)
        bind(frames, id_, PACK_HEADER)
        data[:PACK_HEADER] = pack_header(id_, self.number)
        return PackRef(id_, len(data), self.number), (data,), segments


def _walk(frames: Any) -> Iterator[tuple[int, int]]:
    """Offset and size of each frame. Where there is no valid head, size 0, and nothing after it."""
    at = 0
    while at < len(frames):
        size = 0
        if len(frames) - at >= _HEAD.size:
            magic, _, size = _HEAD.unpack_from(frames, at)
            least = _BLOCK_HEADER if magic == _BLOCK else _ENVELOPE.size
            is_known = magic in (_BLOCK, _COMPRESSED)
            if not (is_known and least <= size <= len(frames) - at and size % 8 == 0):
                size = 0
        yield at, size
        if not size:
            return
        at += size


def _compressed(
    data: memoryview, segments: Iterable[Segment], compression: str
) -> tuple[memoryview, list[Segment]]:
    """A pack in which each block is compressed if that makes it smaller."""
    codec = CODECS[compression]
    out = bytearray(PACK_HEADER)
    moved = []
    for segment in segments:
        frames = data[segment.offset : segment.offset + segment.length]
        start = len(out)
        for at, size in _walk(frames):
            frame = frames[at : at + size]
            envelope = None
            if frame[:4] == _BLOCK:
                checksum, frame[4:8] = bytes(frame[4:8]), bytes(4)
                envelope = _envelope(*compress(frame, codec), size)
                frame[4:8] = checksum
            out += frame if envelope is None else envelope
        moved.append(segment._replace(offset=start, length=len(out) - start))
    view = memoryview(out)
    seal(view[PACK_HEADER:])
    return view, moved


def _envelope(codec: int, payload: bytes | None, inside: int) -> bytes | None:
    """A compressed frame, not sealed; None if it would not be smaller."""
    if payload is None:
        return None
    padding = -len(payload) % 8
    size = _ENVELOPE.size + len(payload) + padding
    if size >= inside:
        return None
    head = _ENVELOPE.pack(_COMPRESSED, 0, size, inside, len(payload), codec)
    return head + payload + bytes(padding)


# ---- Reading


class _Reader(NamedTuple):
    """Who wanted the bytes of a pack, for messages."""

    full_name: FullName
    pack: PackRef
    leaf: int | None = None  # the leaf that needs them, if it is known
    number: int | None = None  # of the checkpoint

    def damaged(self, offset: int, what: str) -> DamagedError:
        wanted = "" if self.leaf is None else _wanted(self.leaf, self.number)
        return damaged(self.full_name(self.pack.name), offset, f"{what}{wanted}")


def _wanted(leaf: int, number: int | None) -> str:
    checkpoint = "" if number is None else f" of checkpoint {number}"
    return f", which leaf {leaf}{checkpoint} needs"


class Stored(NamedTuple):
    """What a pack has of a leaf, as it was read."""

    pack: PackRef
    segment: Segment
    frames: bytes
    header: bytes | None  # of the pack, if it is to be checked


def unpack_chain(
    stored: Iterable[Stored], leaves: int, full_name: FullName, number: int
) -> list[bytes]:
    """The steps of a leaf from what packs have of it, newest first; see Checkpoint.read_leaf().

    Blocks that are older than a full block of the same state are left out. DamagedError says at
    which offset of which pack something is wrong. leaves: how many there are in all; number: that
    of the checkpoint, for messages.
    """
    steps = []
    done: set[bytes] = set()  # states that have had a full block: their older blocks do not count
    for pack, segment, frames, header in stored:
        reader = _Reader(full_name, pack, segment.leaf, number)
        if header is not None:
            check_header(header, full_name, pack)
        _verify(reader, segment, frames)
        seen: set[bytes] = set()
        kept = []
        newly = []
        is_all = True
        for offset, block in _each_block(reader, segment.offset, memoryview(frames)):
            try:
                head = read_head(block)
            except CorruptBlockError as error:
                what = f"there is a block that is not valid ({error})"
                raise reader.damaged(offset, what) from None
            _check_place(reader, offset, head.leaf, head.name, segment.leaf, seen)
            if head.leaves != leaves:
                raise reader.damaged(offset, f"a block is of {head.leaves} leaves")
            if head.name in done:
                is_all = False
                continue
            kept.append(block)
            is_all &= block.obj is frames
            if not head.is_delta:
                newly.append(head.name)
        if kept:
            # Most often nothing was compressed: then the blocks are what was read, without a copy.
            steps.append(frames if is_all else b"".join(kept))
        done.update(newly)
    return steps


def unpack_segment(
    data: bytes,
    full_name: FullName,
    pack: PackRef,
    segment: Segment,
    *,
    number: int | None = None,
) -> bytes:
    """The blocks of a segment, one after the other, verified and decompressed.

    data: the bytes of the segment in the pack. The checksum fields of the blocks that are returned
    have no meaning. DamagedError says at which offset of the pack the bad frame is; number: that of
    the checkpoint, for messages.
    """
    reader = _Reader(full_name, pack, segment.leaf, number)
    _verify(reader, segment, data)
    return _blocks(reader, segment, data)


def unpack_frames(
    data: bytes,
    full_name: FullName,
    pack: PackRef,
    segment: Segment,
    *,
    number: int | None = None,
) -> memoryview:
    """The frames of a segment as they are, verified, with plain checksums: for add_frames()."""
    _verify(_Reader(full_name, pack, segment.leaf, number), segment, data)
    frames = memoryview(bytearray(data))
    bind(frames, pack.id, segment.offset)  # binding twice to the same place undoes it
    return frames


def _verify(reader: _Reader, segment: Segment, data: bytes) -> None:
    bad = verify(data, reader.pack.id, segment.offset)
    if bad is not None:
        raise reader.damaged(segment.offset + bad, _BAD_FRAME)


_BAD_FRAME = "there is no good frame"


def _blocks(reader: _Reader, segment: Segment, frames: bytes) -> bytes:
    """The blocks of frames that were verified."""
    seen: set[bytes] = set()
    parts = []
    for offset, block in _each_block(reader, segment.offset, memoryview(frames)):
        _check_place(reader, offset, *_leaf_and_name(block), segment.leaf, seen)
        parts.append(block)
    # Most often nothing was compressed: then the blocks are what was read, without a copy.
    return frames if all(block.obj is frames for block in parts) else b"".join(parts)


def _each_block(
    reader: _Reader, offset: int, frames: memoryview
) -> Iterator[tuple[int, memoryview]]:
    """The blocks of frames that were verified, with the offsets of their frames."""
    for at, size in _walk(frames):
        assert size, "verified frames end where they should"
        frame = frames[at : at + size]
        is_block = frame[:4] == _BLOCK
        yield offset + at, frame if is_block else _decompressed(reader, offset + at, frame)


def _leaf_and_name(block: memoryview) -> tuple[int, bytes]:
    """The leaf and the name in a block's header. Verified frames have a header."""
    name = bytes(block[_BLOCK_HEADER : _BLOCK_HEADER + block[_BLOCK_NAME_LENGTH_AT]])
    return _BLOCK_LEAF.unpack_from(block, _BLOCK_LEAF_AT)[0], name


def _check_place(
    reader: _Reader, offset: int, found: int, name: bytes, leaf: int, seen: set[bytes]
) -> None:
    """Checks condition 4. found: the leaf in the block's header; seen: states met before."""
    if found != leaf:
        raise reader.damaged(offset, "there is a block of another leaf")
    if name in seen:
        raise reader.damaged(offset, "there is a second block of the same state")
    seen.add(name)


def _decompressed(reader: _Reader, offset: int, frame: memoryview) -> memoryview:
    _, _, size, inside, length, codec = _ENVELOPE.unpack_from(frame)
    end = _ENVELOPE.size + length
    is_good = codec <= 255 and end <= size < end + 8 and not any(frame[end:])
    block = decompress(frame[_ENVELOPE.size : end], codec, inside) if is_good else None
    if block is None or len(block) < _BLOCK_HEADER or block[:8] != _BLOCK + bytes(4):
        raise reader.damaged(offset, "there is a compressed block that cannot be decompressed")
    if int.from_bytes(block[8:16], "little") != len(block):
        raise reader.damaged(offset, "there is a compressed block of a wrong size")
    return memoryview(block)


def check_header(found: Any, full_name: FullName, pack: PackRef) -> None:
    """DamagedError if a pack does not begin as it should. found: its first PACK_HEADER bytes."""
    expected = pack_header(pack.id, pack.number)
    if found != expected:
        at = next((at for at in range(len(found)) if found[at] != expected[at]), len(found))
        raise _Reader(full_name, pack).damaged(at, "its header is not that of this pack")


# ---- Verifying


def damage_of(
    data: memoryview,
    full_name: FullName,
    pack: PackRef,
    segments: Iterable[Segment] = (),
    *,
    number: int | None = None,
) -> Iterator[DamagedError]:
    """All damage of a pack: of its header, its frames, and every entry in their blocks.

    The size of a bad frame cannot be trusted. After a bad frame, verifying goes on where its size
    leads to; if there is no frame, with the next segment. So the more segments are given, from all
    manifests that name the pack, the more damage is found at once. number: that of the checkpoint,
    for messages.
    """
    try:
        check_header(data[:PACK_HEADER], full_name, pack)
    except DamagedError as error:
        yield error
    if len(data) != pack.size:
        what = f"it has {len(data)} bytes, not {pack.size}"
        yield _Reader(full_name, pack).damaged(min(len(data), pack.size), what)
    for start, stop, leaf in _rows(segments, len(data)):
        reader = _Reader(full_name, pack, leaf, number)
        if start >= len(data):
            yield reader.damaged(len(data), "it ends before a segment")
        else:
            yield from _verify_row(reader, data[: min(stop, len(data))], start, leaf)


def _rows(segments: Iterable[Segment], end: int) -> Iterator[tuple[int, int, int | None]]:
    """Start, stop and leaf of the segments and of the gaps between them. A gap's leaf is None."""
    at = PACK_HEADER
    places = {(part.offset, part.offset + part.length, part.leaf) for part in segments}
    for start, stop, leaf in sorted(places):
        if at < min(start, end):
            yield at, min(start, end), None
        yield start, stop, leaf
        at = max(at, stop)
    if at < end:
        yield at, end, None


def _verify_row(
    reader: _Reader, data: memoryview, at: int, leaf: int | None
) -> Iterator[DamagedError]:
    """The damage in frames from `at` to the end of data."""
    seen: set[bytes] = set()
    while at < len(data):
        bad = verify(data[at:], reader.pack.id, at)
        good = data[at:] if bad is None else data[at : at + bad]
        for offset, size in _walk(good):
            try:
                _check_deeply(reader, at + offset, good[offset : offset + size], leaf, seen)
            except DamagedError as error:
                yield error
        if bad is None:
            return
        at += bad
        yield reader.damaged(at, _BAD_FRAME)
        _, size = next(_walk(data[at:]))
        at += size or len(data)


def _check_deeply(
    reader: _Reader, offset: int, frame: memoryview, leaf: int | None, seen: set[bytes]
) -> None:
    for _, data in _each_block(reader, offset, frame):
        try:
            block = Block(data)
            block.check()
        except CorruptBlockError as error:
            raise reader.damaged(offset, f"there is a block that is not valid ({error})") from None
        if leaf is not None:
            _check_place(reader, offset, *_leaf_and_name(data), leaf, seen)
