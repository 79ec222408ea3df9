"""Copying segments into another checkpoint as they are: no block is decoded, none is sealed again.

A frame's checksum is that of its bytes, mixed with the id of its pack and its place in it
(pack.py). So the bytes are read once, to verify them; moving them changes four bytes per frame.

Then copying memory is what costs most. A local pack is mapped, privately. The four bytes are
changed in the map, which costs a page each and leaves the file alone. The map itself is written to
the new pack, so the system copies from its cache of one file to that of the other. (Measured, CPU
time for 0.9 GB: 0.5 s, of which 0.15 s for verifying; reading into buffers that are used again
takes 1.8 s, appending to a growing buffer 5 s.) The price: if the disk cannot read a mapped page,
the system ends the process (SIGBUS), where a read would have failed with an error. Then nothing is
published, as if the process had been killed.
"""

import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

from statekit.checkpoint.packs import check_header
from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.writer import Attempt
from statekit.errors import ArgumentError
from statekit.format.manifest import PACK_HEADER, PackRef, Segment, damaged
from statekit.format.pack import PACK_BYTES, PackBuilder, pack_header
from statekit.native.digest import xxh64
from statekit.native.frames import bind, digest, verify
from statekit.storage import Storage

OnBytes: TypeAlias = Callable[[int], None]  # called with the number of bytes done since

_RUN_BYTES = 8 << 20  # at most, of neighbouring segments that are taken together


class Run(NamedTuple):
    """Segments that lie one after the other in a pack."""

    pack: PackRef
    segments: list[Segment]

    @property
    def offset(self) -> int:
        return self.segments[0].offset

    @property
    def length(self) -> int:
        last = self.segments[-1]
        return last.offset + last.length - self.offset


def runs(packs: Sequence[PackRef], wanted: Iterable[Segment]) -> Iterator[Run]:
    """Segments of a manifest in runs of neighbours. The segments of a leaf stay oldest first."""
    by_place: list[Segment] = []
    by_chain: list[Segment] = []  # of the few leaves whose chain is not in the order of places
    chain: list[Segment] = []
    for segment in wanted:
        if not segment.is_delta:
            _sort_in(chain, by_place, by_chain)
            chain = []
        chain.append(segment)
    _sort_in(chain, by_place, by_chain)
    by_place.sort(key=lambda segment: (segment.pack, segment.offset))
    run: Run | None = None
    end = 0
    for segment in (*by_place, *by_chain):
        pack = packs[segment.pack]
        if run is not None:
            is_next = pack is run.pack and segment.offset == end
            if is_next and end + segment.length - run.offset <= _RUN_BYTES:
                run.segments.append(segment)
                end += segment.length
                continue
            yield run
        run = Run(pack, [segment])
        end = segment.offset + segment.length
    if run is not None:
        yield run


def _sort_in(chain: list[Segment], by_place: list[Segment], by_chain: list[Segment]) -> None:
    places = [(segment.pack, segment.offset) for segment in chain]
    (by_place if places == sorted(places) else by_chain).extend(chain)


class _CopiedPack(PackBuilder):
    """A pack whose frames lie in several places."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._parts: list[memoryview] = []
        self._end = PACK_HEADER

    @property
    def size(self) -> int:
        return self._end

    def take(self, frames: memoryview, run: Run) -> None:
        """Adds a run. frames: its frames, verified, with plain checksums."""
        for segment in run.segments:
            self._note(segment.leaf, self._end + segment.offset - run.offset, segment.length, False)
        self._parts.append(frames)
        self._end += len(frames)

    def finish(self) -> tuple[PackRef, Sequence[Any], list[Segment]]:
        assert self._segments, "an empty pack is not written"
        digests = b"".join(map(digest, self._parts))
        seeds = (2 * self.number, 2 * self.number + 1)
        id_ = b"".join(xxh64(digests, seed).to_bytes(8, "little") for seed in seeds)
        at = PACK_HEADER
        for part in self._parts:
            bind(part, id_, at)
            at += len(part)
        parts = (pack_header(id_, self.number), *self._parts)
        return PackRef(id_, self._end, self.number), parts, self._segments


class CopyAttempt(Attempt):
    """An attempt that can take segments of other checkpoints."""

    def __enter__(self) -> "CopyAttempt":
        super().__enter__()
        return self

    def copy(
        self, source: Checkpoint, wanted: Iterable[Segment], on_bytes: OnBytes = lambda _: None
    ) -> None:
        """Puts segments at the end of their leaves' chains. wanted: by leaf, oldest first."""
        for run, frames in _verified(source, wanted):
            bind(frames, run.pack.id, run.offset)  # binding twice to the same place undoes it
            self._copied_pack().take(frames, run)
            for segment in run.segments:
                self._links.append(self._link(segment.leaf, below=False))
            on_bytes(run.length)

    def _copied_pack(self) -> _CopiedPack:
        self._check_cancelled()
        pack = self._pack
        if isinstance(pack, _CopiedPack) and pack.size < PACK_BYTES:
            return pack
        self._hand_on()
        made = self._pack = _CopiedPack(self.number)
        return made

    def _room(self) -> PackBuilder:
        if isinstance(self._pack, _CopiedPack):  # segments that are added go into another pack
            self._hand_on()
        return super()._room()


def check_segments(
    source: Checkpoint, wanted: Iterable[Segment], on_bytes: OnBytes = lambda _: None
) -> None:
    """DamagedError if one of these segments is damaged. To be called before referring to them."""
    checked: PackRef | None = None
    for run, _ in _verified(source, wanted):
        if run.pack != checked:  # segments that are referred to keep this header, copies do not
            check_header(source.storage, run.pack)
            checked = run.pack
        on_bytes(run.length)


def _verified(source: Checkpoint, wanted: Iterable[Segment]) -> Iterator[tuple[Run, memoryview]]:
    """The verified frames of segments, as memory that may be changed without changing the packs."""
    opened: tuple[PackRef, memoryview] | None = None
    for run in runs(source.manifest.packs, wanted):
        ref = run.pack
        if opened is None or opened[0] != ref:
            opened = ref, _writable(source.storage, ref)
        frames = opened[1][run.offset : run.offset + run.length]
        if len(frames) != run.length:
            size = len(opened[1])
            raise source.storage.ends_early(ref.name, size, run.offset, run.length)
        bad = verify(frames, ref.id, run.offset)
        if bad is not None:
            raise damaged(
                source.storage.file(ref.name),
                run.offset + bad,
                f"there is no good frame, and checkpoint {source.number} needs it",
            )
        yield run, frames


def _writable(storage: Storage, pack: PackRef) -> memoryview:
    """A pack's bytes, as memory that may be changed without changing the pack."""
    if not storage.is_local:
        return memoryview(bytearray(storage.read(pack.name)))
    try:
        fd = os.open(f"{storage.url}/{pack.name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not os.fstat(fd).st_size:
                return memoryview(b"")
            flags, rights = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            return memoryview(mmap.mmap(fd, 0, flags, rights))
        finally:
            os.close(fd)
    except OSError as error:
        raise storage.failed("read", pack.name, error) from error


# ---- What all these operations have in common


def ignore(_: int) -> None:
    """For on_bytes, if nobody wants to know."""


@contextmanager
def pinned(sources: Iterable[Checkpoint]) -> Iterator[None]:
    """Keeps garbage collection from taking them away."""
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source.storage.pin(source.manifest.name))
        yield


def check_empty(out: Storage) -> None:
    """ArgumentError if a directory for a new line of checkpoints is not empty."""
    is_empty = not out.list()
    for name in out.subdirectories() if is_empty else ():
        # A rescale that failed leaves directories behind that have nothing but a lock file.
        is_empty = name.startswith("worker-") and not out.sub(name).list()
        if not is_empty:
            break
    if not is_empty:
        raise ArgumentError(f"{out.shown!r} is not empty. Name a directory that is new.")


def segments_of(source: Checkpoint, leaves: Iterable[range]) -> list[Segment]:
    """The segments of leaves, by leaf, oldest first."""
    segments = source.manifest.segments
    found: list[Segment] = []
    for part in leaves:
        start = bisect_left(segments.leaves, part.start)
        found += segments[start : bisect_left(segments.leaves, part.stop, start)]
    return found


def refer(
    attempt: Attempt, source: Checkpoint, chains: Iterable[tuple[int, Sequence[Segment]]]
) -> None:
    """Takes chains over as they are, without copying them."""
    packs = source.manifest.packs
    for leaf, chain in chains:
        attempt.refer(leaf, chain, packs)


def publish_like(attempt: Attempt, source: Checkpoint) -> Checkpoint:
    """Publishes nearly the same state as the source, or the same in another shape."""
    return attempt.publish(
        key_groups=source.key_group_count,
        subgroups=source.subgroups,
        owned=source.key_groups,
        schemas=source.manifest.schemas,
        base=source.number,
        watermark=source.watermark,
        metadata=source.metadata,
        attachments=source.manifest.attachments
        if attempt.storage.url == source.storage.url
        else (),
    )
