"""An attempt at a checkpoint: packs are written as they fill up, then a manifest publishes them.

    whoever has blocks      add(), fill(), refer()      -> a pack in memory, 64 MiB at most
    the attempt's thread    finishes packs (compresses, names, binds checksums) and writes them
    publish()               waits for the packs, syncs, and creates the manifest

Nothing exists for readers before the manifest does: its creation is the one step that counts, and
the storage makes it all or nothing. What an attempt leaves behind when it fails is named by no
manifest, so it is garbage: it is collected at once where the storage can tell that nobody else is
writing, and by a later gc where it cannot. An attempt never deletes a pack by itself. Two
processes that checkpoint the same state under the same number write packs of the same name, and
the one that loses must not take them away from the one that won.
"""

import contextlib
import queue
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import IO, Any, cast

from statekit import failpoints
from statekit.checkpoint.manifest import (
    Manifest,
    PackRef,
    Segment,
    Segments,
    arrange,
    manifest_name,
    number_of,
)
from statekit.checkpoint.pack import PACK_BYTES, PackBuilder
from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.retention import collect
from statekit.checkpoint.storage import Storage
from statekit.errors import CheckpointCancelledError, CheckpointError, StorageError
from statekit.schema import StateSchema
from statekit.store.snapshot import Filled, Snapshot

_PACKS_WAITING_MAX = 2  # finished faster than they are written; then who fills must wait
_KEEP_ALL = 1 << 62

failpoints.register(
    "attempt.begin", "attempt.fill", "attempt.pack", "attempt.publish", "attempt.published"
)


class Link:
    """A segment in the chain of a leaf; where it is becomes known when its pack is finished."""

    __slots__ = ("length", "offset", "pack")

    def __init__(self, pack: PackRef | None = None, offset: int = 0, length: int = 0) -> None:
        self.pack = pack
        self.offset = offset
        self.length = length


class Attempt:
    """One checkpoint in the making. Use it in a `with`; leaving without publish() gives it up.

    One thread at a time may call its methods; cancel() may come from any.
    """

    def __init__(self, storage: Storage, *, compression: str | None = None) -> None:
        self.storage = storage
        self.compression = compression
        self.number = 0  # known once the attempt has begun
        self.bytes_written = 0
        self._chains: dict[int, list[Link]] = {}
        self._pack: PackBuilder | None = None
        self._links: list[Link] = []  # of what is in _pack, in its order
        self._packs: list[PackRef] = []
        self._stack = contextlib.ExitStack()
        self._writer: _PackWriter | None = None
        self._is_cancelled = threading.Event()
        self._is_published = False

    # ---- Beginning and giving up

    def __enter__(self) -> "Attempt":
        failpoints.visit("attempt.begin")
        self._stack.enter_context(self.storage.writing())
        try:
            self.number = self._newest() + 1
            self._writer = _PackWriter(self._write_pack, self.storage)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._writer is not None
        self._writer.stop()
        self._stack.close()
        if error is not None:
            # The frames of the traceback hold views of packs, and the packs' writer holds the
            # error. CPython before 3.12.3 may crash on collecting such a circle (gh-77894), and
            # nobody wants a failed pack in memory as long as its error.
            traceback.clear_frames(trace)
        if self._is_published or not self.storage.has_locks:
            return
        try:
            collect(self.storage, keep=_KEEP_ALL)
        except CheckpointError as left:
            # What remains is garbage, and no reason to hide why the attempt failed.
            if error is not None:
                error.add_note(f"its packs could not be removed: {left} A later gc will do it.")

    def cancel(self) -> None:
        """Makes the next step of the attempt raise CheckpointCancelledError."""
        self._is_cancelled.set()

    def _check_cancelled(self) -> None:
        if self._is_cancelled.is_set():
            raise CheckpointCancelledError(
                f"checkpoint {self.number} of {self.storage.shown!r} was cancelled. "
                "Nothing of it remains."
            )

    # ---- What is in it

    def fill(
        self, snapshot: Snapshot, on_leaves: Callable[[Sequence[Filled]], None] = lambda _: None
    ) -> None:
        """Adds all leaves that a snapshot has left."""
        while True:
            failpoints.visit("attempt.fill")
            pack = self._room()
            records = snapshot.fill(pack.buffer, PACK_BYTES)
            if not records:
                return
            pack.add_filled(records)
            for record in records:
                self._links.append(self._link(record.leaf, below=False))
            on_leaves(records)

    def add(self, leaf: int, blocks: bytes, *, below: bool = False) -> None:
        """Adds a segment at the end of a leaf's chain, or below all that it has so far."""
        self._room().add(leaf, blocks)
        self._links.append(self._link(leaf, below))

    def add_frames(self, leaf: int, frames: Any, *, below: bool = False) -> None:
        """As add(), with frames that read_frames() took out of another pack."""
        self._room().add_frames(leaf, frames)
        self._links.append(self._link(leaf, below))

    def refer(self, leaf: int, chain: Iterable[Segment], packs: Sequence[PackRef]) -> None:
        """Puts segments that are in this storage already below what a leaf has so far."""
        links = [Link(packs[part.pack], part.offset, part.length) for part in chain]
        if links:
            self._chains[leaf] = links + self._chains.get(leaf, [])

    def _link(self, leaf: int, below: bool) -> Link:
        link = Link()
        chain = self._chains.setdefault(leaf, [])
        chain.insert(0 if below else len(chain), link)
        return link

    def _room(self) -> PackBuilder:
        """The pack in the making, after handing on one that is full."""
        self._check_cancelled()
        if self._pack is not None and self._pack.size >= PACK_BYTES:
            self._hand_on()
        if self._pack is None:
            self._pack = PackBuilder(self.number, self.compression)
        return self._pack

    def _hand_on(self) -> None:
        assert self._writer is not None
        if self._pack is not None and self._links:
            self._writer.put(self._pack, self._links)
        self._pack, self._links = None, []

    def _write_pack(self, ref: PackRef, parts: Sequence[Any]) -> None:
        """On the attempt's thread: a finished pack into the storage."""
        self._check_cancelled()
        failpoints.visit("attempt.pack")
        self.storage.write(ref.name, parts)
        self._packs.append(ref)
        self.bytes_written += ref.size

    # ---- Publishing

    def publish(
        self,
        *,
        key_groups: int,
        subgroups: int,
        owned: tuple[range, ...],
        schemas: Sequence[StateSchema],
        base: int | None = None,
        watermark: int | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Checkpoint:
        """Makes the checkpoint exist, durably, and gives it."""
        assert self._writer is not None
        self._hand_on()
        self._writer.finish()
        self._check_cancelled()
        packs, segments = self._contents()
        manifest = Manifest(
            number=self.number,
            key_groups=key_groups,
            subgroups=subgroups,
            owned=owned,
            schemas=tuple(sorted(schemas, key=lambda schema: schema.name)),
            base=base,
            compression=self.compression,
            watermark=watermark,
            metadata=metadata or {},
            packs=packs,
            segments=segments,
        )
        failpoints.visit("attempt.publish")
        if self._packs:
            self.storage.sync()
        if base is not None and not self.storage.has_locks:
            # A collector in another process does not see our pin there: look as late as can be.
            self.storage.size(manifest_name(base))
        # A name that is taken means that somebody else writes here: never overwrite.
        name = manifest_name(self.number)
        if not self.storage.create(name, manifest.encode()):
            raise self._overtaken(self.number)
        if (newest := self._newest()) > self.number:
            # We were slow: others have published this number and later ones, and perhaps have
            # collected it, so that our packs, which have the same names, may be gone.
            self.storage.retire(name)
            raise self._overtaken(newest)
        self._is_published = True
        failpoints.visit("attempt.published")
        return Checkpoint(self.storage, manifest)

    def _newest(self) -> int:
        numbers = (number_of(entry.name) for entry in self.storage.list())
        return max((number for number in numbers if number), default=0)

    def _overtaken(self, number: int) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {number} of {self.storage.shown!r} was published by another writer in the "
            "meantime; this one is given up. Let each provider have a directory of its own, or "
            "see whether an old process is still running."
        )

    def _contents(self) -> tuple[tuple[PackRef, ...], Segments]:
        places: dict[PackRef, int] = {}
        segments = [
            Segment(
                leaf,
                places.setdefault(cast(PackRef, link.pack), len(places)),
                link.offset,
                link.length,
                at > 0,
            )
            for leaf, chain in self._chains.items()
            for at, link in enumerate(chain)
        ]
        return arrange(list(places), segments)


class _PackWriter:
    """The thread of an attempt that finishes and writes packs, in order.

    Filling must not wait for a slow store for long: writers of the state wait for the filler when
    it falls behind (csrc/snapshot.c). So packs for a store on the network go through a temporary
    file while others are before them. On a local disk that would be writing twice.
    """

    def __init__(self, write: Callable[[PackRef, Sequence[Any]], None], storage: Storage) -> None:
        self._write = write
        self._storage = storage
        self._error: BaseException | None = None
        self._packs: queue.Queue[tuple[PackRef, Sequence[Any] | IO[bytes]] | None]
        self._builders: queue.Queue[tuple[PackBuilder, list[Link]] | None]
        self._builders = queue.Queue(_PACKS_WAITING_MAX)
        self._packs = queue.Queue()
        self._threads = [threading.Thread(target=self._finish_packs, name="statekit-packs")]
        if not storage.is_local:
            self._threads.append(threading.Thread(target=self._send, name="statekit-upload"))
        for thread in self._threads:
            thread.start()

    def put(self, pack: PackBuilder, links: list[Link]) -> None:
        self._raise()
        self._builders.put((pack, links))

    def finish(self) -> None:
        """Waits until everything is written."""
        self._end()
        self._raise()

    def stop(self) -> None:
        """Ends the threads; what they were not done with is dropped."""
        self._error = self._error or StorageError("the attempt was given up")
        self._end()

    def _end(self) -> None:
        if self._threads[0].is_alive():
            self._builders.put(None)
        for thread in self._threads:
            thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _finish_packs(self) -> None:
        while (item := self._builders.get()) is not None:
            if self._error is None:
                self._try(self._finish_pack, *item)
        self._packs.put(None)

    def _finish_pack(self, pack: PackBuilder, links: list[Link]) -> None:
        ref, parts, segments = pack.finish()
        for link, segment in zip(links, segments, strict=True):
            link.pack, link.offset, link.length = ref, segment.offset, segment.length
        if self._storage.is_local:
            self._write(ref, parts)
        elif self._packs.qsize() < _PACKS_WAITING_MAX:
            self._packs.put((ref, parts))
        else:
            spool = tempfile.TemporaryFile()  # noqa: SIM115  (the other thread closes it)
            spool.writelines(parts)
            self._packs.put((ref, spool))

    def _send(self) -> None:
        while (item := self._packs.get()) is not None:
            self._try(self._send_pack, *item)

    def _send_pack(self, ref: PackRef, parts: Sequence[Any] | IO[bytes]) -> None:
        if isinstance(parts, Sequence):
            if self._error is None:
                self._write(ref, parts)
            return
        with parts as spool:
            if self._error is None:
                spool.seek(0)
                self._write(ref, [spool.read()])

    def _try(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except BaseException as error:  # raised again by whoever waits
            self._error = self._error or error
