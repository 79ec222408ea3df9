"""Packs in a storage: reads what format/pack.py decodes and verifies."""

from collections.abc import Iterable, Iterator

from statekit.errors import DamagedError, MissingFileError
from statekit.format import pack as form
from statekit.format.manifest import PACK_HEADER, PackRef, Segment, damaged
from statekit.storage import Storage


def read_segment(
    storage: Storage, pack: PackRef, segment: Segment, *, number: int | None = None
) -> bytes:
    """The blocks of a segment, one after the other, verified and decompressed.

    The checksum fields of the blocks have no meaning. number: that of the checkpoint that wants
    them, for messages.
    """
    data = storage.read(pack.name, segment.offset, segment.length)
    return form.unpack_segment(data, storage.file, pack, segment, number=number)


def read_frames(
    storage: Storage, pack: PackRef, segment: Segment, *, number: int | None = None
) -> memoryview:
    """The frames of a segment as they are, verified: for PackBuilder.add_frames()."""
    data = storage.read(pack.name, segment.offset, segment.length)
    return form.unpack_frames(data, storage.file, pack, segment, number=number)


def check_header(storage: Storage, pack: PackRef) -> None:
    """DamagedError if a pack does not begin as it should."""
    form.check_header(storage.read(pack.name, 0, PACK_HEADER), storage.file, pack)


def verify_pack(
    storage: Storage, pack: PackRef, segments: Iterable[Segment] = (), *, number: int | None = None
) -> Iterator[DamagedError]:
    """Reads a pack and gives all its damage; see format.pack.damage_of()."""
    try:
        data = memoryview(storage.read(pack.name))
    except MissingFileError:
        yield damaged(storage.file(pack.name), None, "it is not there")
        return
    yield from form.damage_of(data, storage.file, pack, segments, number=number)
