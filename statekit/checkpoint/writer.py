"""An attempt at a checkpoint: packs are written as they fill up, then a manifest publishes them.

    the caller              add(), fill(), refer()      -> a pack in memory, 16 MiB or a leaf
    threads of the attempt  finish packs (compress, name, bind checksums) and write them
    publish()               waits for the packs, syncs, and creates the manifest
    write_part()            instead: the manifest becomes a part, which another publishes (parts.py)

Nothing exists for readers before the manifest does: its creation is the one step that counts, and
the storage makes it all or nothing. Files that a failed attempt leaves behind are named by no
manifest, so they are garbage. They are collected at once if the storage can tell that nobody else
is writing, and by a later gc if it cannot. An attempt never deletes a pack by itself: two processes
that checkpoint the same state under the same number write packs of the same name, and the one that
loses must not take them away from the one that won.
"""

import contextlib
import hashlib
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import TracebackType
from typing import IO, Any, cast

from statekit import failpoints
from statekit.checkpoint.ownership import Caretaker, Claim
from statekit.checkpoint.publishing import Publisher
from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.retention import collect
from statekit.errors import (
    CheckpointCancelledError,
    CheckpointError,
    StorageError,
    clear_frames,
    temporary_failed,
)
from statekit.format.description import Attachment
from statekit.format.manifest import (
    Manifest,
    PackRef,
    Segment,
    Segments,
    arrange,
    part_name,
)
from statekit.format.pack import PACK_BYTES, PackBuilder
from statekit.native.frames import Frames
from statekit.native.snapshot import Filled, Snapshot
from statekit.schema import StateSchema
from statekit.storage import Storage

_PACKS_IN_MEMORY_MAX = 4  # packs that wait or are being written, besides the one being filled
_WRITERS_LOCAL, _WRITERS_FAR = 3, 4
_NICENESS = 10  # of the threads that write packs
_KEEP_ALL = 1 << 62

failpoints.register(
    "attempt.begin",
    "attempt.fill",
    "attempt.pack",
    "attempt.part",
    "attempt.publish",
    "attempt.published",
)


class Link:
    """A segment in the chain of a leaf. Its place becomes known when its pack is finished."""

    __slots__ = ("length", "offset", "pack")

    def __init__(self, pack: PackRef | None = None, offset: int = 0, length: int = 0) -> None:
        self.pack = pack
        self.offset = offset
        self.length = length


class Attempt:
    """The writing of one checkpoint. Use it in a `with`; leaving before publish() gives it up.

    One thread at a time may call its methods; cancel() may be called by any thread.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        compression: str | None = None,
        gives_way: bool = False,
        claim: Claim | None = None,
        number: int | None = None,
    ) -> None:
        """gives_way: threads that use the state have priority over those that write the checkpoint.

        claim: that of the publisher. Without one, it publishes in the name of the last publisher.
        number: for a part, the number of its checkpoint. Without one, this is the next checkpoint.
        """
        self.storage = storage
        self._claim = Caretaker() if claim is None else claim
        self._publisher = Publisher(storage, self._claim)
        self._number_given = number
        self.compression = compression
        self._gives_way = gives_way
        self.number = 0  # known once the attempt has begun
        self.bytes_written = 0
        self._chains: dict[int, list[Link]] = {}
        self._pack: PackBuilder | None = None
        self._links: list[Link] = []  # of the segments in _pack, in their order
        self._has_packs = False
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._writer: _PackWriter | None = None
        self._is_cancelled = threading.Event()
        self._is_done = False  # published, or a part

    # ---- Beginning and giving up

    def __enter__(self) -> "Attempt":
        failpoints.visit("attempt.begin")
        self._stack.enter_context(self.storage.writing())
        try:
            self.number = self._choose_number(self._publisher.look())
            self._writer = _PackWriter(self._write_pack, self.storage, self._gives_way)
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
        # A caller may keep the error, or the attempt for its bytes_written. That must not keep
        # packs in memory.
        self._pack, self._links, self._chains, self._writer = None, [], {}, None
        if error is not None:
            clear_frames(error)
        if self._is_done or not self.storage.has_locks:
            return
        try:
            collect(self.storage, keep=_KEEP_ALL)
        except CheckpointError as left:
            # The files that remain are only garbage. This must not hide why the attempt failed.
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
        """Adds all leaves of a snapshot that were not read yet."""
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
        """Adds a segment at the end of a leaf's chain, or below all segments it has so far."""
        self._room().add(leaf, blocks)
        self._links.append(self._link(leaf, below))

    def add_frames(self, leaf: int, frames: Any, *, below: bool = False) -> None:
        """Like add(), with frames that read_frames() took out of another pack."""
        self._room().add_frames(leaf, frames)
        self._links.append(self._link(leaf, below))

    def refer(self, leaf: int, chain: Iterable[Segment], packs: Sequence[PackRef]) -> None:
        """Puts segments that are already in this storage below those that a leaf has so far."""
        links = [Link(packs[part.pack], part.offset, part.length) for part in chain]
        if links:
            self._chains[leaf] = links + self._chains.get(leaf, [])

    def refer_chains(self, manifest: Manifest, wanted: AbstractSet[int]) -> None:
        """refer() for the chains that a checkpoint of this storage has of some leaves.

        Mostly these are many: all leaves that did not change. So it is one loop.
        """
        packs, chains = manifest.packs, self._chains
        found: dict[int, list[Link]] = {}
        for leaf, pack, offset, length, _, _ in manifest.segments.rows():
            if leaf in wanted:
                found.setdefault(leaf, []).append(Link(packs[pack], offset, length))
        for leaf, links in found.items():
            chains[leaf] = links + chains.get(leaf, [])

    def _link(self, leaf: int, below: bool) -> Link:
        link = Link()
        chain = self._chains.setdefault(leaf, [])
        chain.insert(0 if below else len(chain), link)
        return link

    def _room(self) -> PackBuilder:
        """The pack that is being filled. A full one is handed to the writer first."""
        self._check_cancelled()
        if self._pack is not None and self._pack.size >= PACK_BYTES:
            self._hand_on()
        if self._pack is None:
            assert self._writer is not None
            self._pack = PackBuilder(self.number, self.compression, self._writer.buffer())
        return self._pack

    def _hand_on(self) -> None:
        assert self._writer is not None
        if self._pack is not None and self._links:
            self._writer.put(self._pack, self._links)
        self._pack, self._links = None, []

    def _write_pack(self, ref: PackRef, parts: Sequence[Any]) -> None:
        """Writes a finished pack to the storage; called in a thread of the writer."""
        self._check_cancelled()
        failpoints.visit("attempt.pack")
        self.storage.write(ref.name, parts)
        with self._lock:
            self._has_packs = True
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
        attachments: tuple[Attachment, ...] = (),
    ) -> Checkpoint:
        """Makes the checkpoint exist, durably, and returns it."""
        assert self._number_given is None
        manifest = self._finish(
            key_groups=key_groups,
            subgroups=subgroups,
            owned=owned,
            schemas=schemas,
            base=base,
            watermark=watermark,
            metadata=metadata or {},
            writers=self._claim.writers,
            attachments=attachments,
        )
        failpoints.visit("attempt.publish")
        if self._has_packs:
            self.storage.sync()
        self._publisher.check_scope(manifest)
        self._publisher.check_base(manifest)
        made = self._publisher.publish(manifest)
        if made is None:
            raise self._publisher.overtaken(self.number)
        self._is_done = True
        failpoints.visit("attempt.published")
        return made

    def write_part(
        self,
        *,
        key_groups: int,
        subgroups: int,
        owned: tuple[range, ...],
        schemas: Sequence[StateSchema],
        base: Checkpoint | None = None,
        is_referred: bool = True,
        watermark: int | None = None,
    ) -> tuple[str, Manifest]:
        """Makes the packs and the part durable. Returns the name of the part, and its manifest.

        The name of the part contains the digest of its contents. So it need not be created
        exclusively, and a reader sees whether it is whole.
        base: what the state goes on from. is_referred: its packs are needed, so it must be there.
        """
        assert self._number_given is not None
        manifest = self._finish(
            key_groups=key_groups,
            subgroups=subgroups,
            owned=owned,
            schemas=schemas,
            base=None if base is None else base.number,
            base_digest="" if base is None else base.digest.hex(),
            watermark=watermark,
        )
        data = manifest.encode()
        name = part_name(self.number, hashlib.sha256(data).digest())
        failpoints.visit("attempt.part")
        if self._has_packs:
            self.storage.sync()  # packs first: a part that survives a loss of power has its packs
        self.storage.write(name, [data])
        self.storage.sync()
        if is_referred:
            # Checked after the part is there: a collector that comes later sees the part.
            self._publisher.check_base(manifest)
        self._is_done = True
        return name, manifest

    def _finish(self, *, schemas: Sequence[StateSchema], **fields: Any) -> Manifest:
        """Waits for the packs. Returns the manifest of what is in them."""
        assert self._writer is not None
        self._hand_on()
        self._writer.finish()
        self._check_cancelled()
        packs, segments = self._contents()
        return Manifest(
            number=self.number,
            schemas=tuple(sorted(schemas, key=lambda schema: schema.name)),
            compression=self.compression,
            generation=min(self._claim.generation, self.number),
            owner=self._claim.owner,
            packs=packs,
            segments=segments,
            **fields,
        )

    def _choose_number(self, newest: int) -> int:
        number = self._number_given
        if number is None:
            return newest + 1
        if number <= newest:
            raise CheckpointError(
                f"no part of checkpoint {number} can be written: {self.storage.shown!r} has "
                f"checkpoint {newest}. If this state goes on from that one, number the next one "
                f"{newest + 1}; else restore that one first."
            )
        return number

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
    """The threads of an attempt that finish packs and write them.

    There are three on a local disk: while some wait for fsync, another copies. (Measured speed
    relative to plain writes of the same bytes: two threads with packs of 32 MiB 0.63, three with
    16 MiB 0.75.) The order in which packs are written does not matter: the manifest orders them. An
    attempt that gives way uses one thread only: that keeps the 99th percentile of updates meanwhile
    at 1.5 times its usual value; three threads make it 15 times.

    Filling must not wait long for a slow storage, because threads that change the state wait for
    the filler when it falls behind (csrc/snapshot.c). So for a storage on the network, packs that
    would be too many in memory go through temporary files. On a local disk that would mean writing
    twice.
    """

    def __init__(
        self,
        write: Callable[[PackRef, Sequence[Any]], None],
        storage: Storage,
        gives_way: bool,
    ) -> None:
        self._write = write
        self._gives_way = gives_way
        self._error: BaseException | None = None
        self._is_local = storage.is_local
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._slots = threading.Semaphore(_PACKS_IN_MEMORY_MAX)
        self._buffers: list[Frames] = []  # of written packs: memory in use is cheaper than new
        writers = _WRITERS_FAR
        if storage.is_local:
            writers = 1 if gives_way else _WRITERS_LOCAL
        self._threads = [
            threading.Thread(target=self._run, name="statekit-packs") for _ in range(writers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # the system has no more threads: those that run must be ended
            self._end()
            raise

    def buffer(self) -> Frames | None:
        """A buffer to be used again, if there is one."""
        return self._buffers.pop() if self._buffers else None

    def put(self, pack: PackBuilder, links: list[Link]) -> None:
        """Takes a pack over. On a local disk, waits while there are too many."""
        self._raise()
        # No lambdas: the error of a lambda that failed would keep alive what the lambda is about,
        # despite clear_frames().
        if self._slots.acquire(blocking=self._is_local):
            self._queue.put(partial(self._write_from_memory, pack, links))
            return
        ref, parts, segments = pack.finish()
        _place(links, ref, segments)
        try:
            spool = _spooled(parts)
        except OSError as error:
            raise temporary_failed(error) from error
        self._queue.put(partial(self._write_from_file, ref, spool))

    def finish(self) -> None:
        """Waits until everything is written."""
        self._end()
        self._raise()

    def stop(self) -> None:
        """Ends the threads. Packs that are not written yet are dropped."""
        self._error = self._error or StorageError("the attempt was given up")
        self._end()
        self._buffers.clear()

    def _end(self) -> None:
        # One None for each thread, whether it still runs or not, because any thread may take any
        # None. A thread may have ended by a None that was put for another thread. If the ended
        # thread were left out here, the other one would wait for ever.
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        if self._gives_way:
            _give_way()
        while (task := self._queue.get()) is not None:
            try:
                task()
            except BaseException as error:  # raised again by whoever waits
                self._error = self._error or error

    def _write_from_memory(self, pack: PackBuilder, links: list[Link]) -> None:
        try:
            if self._error is None:
                ref, parts, segments = pack.finish()
                _place(links, ref, segments)
                self._write(ref, parts)
                del parts  # views of the buffer
                self._buffers.append(pack.buffer)
        finally:
            self._slots.release()

    def _write_from_file(self, ref: PackRef, spool: IO[bytes]) -> None:
        with spool:
            if self._error is None:
                try:
                    spool.seek(0)
                    data = spool.read()
                except OSError as error:
                    raise temporary_failed(error) from error
                self._write(ref, [data])


def _spooled(parts: Sequence[Any]) -> IO[bytes]:
    """A temporary file of these parts."""
    spool = tempfile.TemporaryFile()  # noqa: SIM115  (closed by who reads it)
    try:
        spool.writelines(parts)
        spool.flush()
    except BaseException:
        spool.close()
        raise
    return spool


def _give_way() -> None:
    """Lets the threads that use the state go first, where a thread can have a priority."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # then all threads have the same priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _place(links: Sequence[Link], pack: PackRef, segments: Sequence[Segment]) -> None:
    for link, segment in zip(links, segments, strict=True):
        link.pack, link.offset, link.length = pack, segment.offset, segment.length
