"""Frozen: a provider's state at one moment, in memory and at home, while it goes on changing.

Memory has snapshots (csrc/snapshot.c). A home has them too, or it has not:

    it has     RocksDB, say: what the home's snapshot gives is what was there at that moment
    it has not the *guard* copies before write: before a row of a leaf that the reader has not
               taken yet is changed, or the leaf goes to another provider, all rows of that leaf
               are put aside, where the reader finds them. Copies beyond a few megabytes wait in a
               temporary file.

Both moments are one: freezing holds the residence's lock, under which alone rows are written,
entries are evicted and answers of the home installed. What users do meanwhile happens in memory,
and memory's snapshot is exact by itself.

The leaf as it was is then what memory had of it over what the home had of it; or, while a provider
is being restored, over what its source has, which never changes (assemble.py). With both, a leaf
that was coming at that moment (moving_in.py) is taken from the source, also if it moves in before
it is read.
"""

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from tempfile import SpooledTemporaryFile
from typing import IO

import msgpack

from statekit.errors import HomeError, StateKitError, StorageError, temporary_failed
from statekit.homes.home import HomeSnapshot
from statekit.homes.ledger import Ledger
from statekit.native import Store
from statekit.native.snapshot import Snapshot
from statekit.residence.assemble import Assembly, Rows
from statekit.residence.sources import PullSource
from statekit.schema import StateSchema

_ASIDE_BYTES_MAX = 16 << 20  # of copied rows in memory; the rest waits in a file


class Guard:
    """The rows of a home without snapshots, as they were when the guard was set up."""

    def __init__(self, home: Ledger, numbers: Sequence[int], snapshot: Snapshot) -> None:
        self._home = home
        self._numbers = numbers
        self._snapshot = snapshot  # tells which leaves had more at home than here
        self._lock = threading.Lock()  # nothing else is locked under it
        self._is_done: set[int] = set()  # leaves that were taken or put aside
        self._aside: dict[int, tuple[int, int]] = {}  # leaf -> where its rows are in the file
        self._file: IO[bytes] = SpooledTemporaryFile(_ASIDE_BYTES_MAX)  # noqa: SIM115
        self._error: StateKitError | None = None  # why copies are missing

    def protect(self, leaf: int) -> None:
        """To be called before the rows of a leaf are changed, or the leaf goes elsewhere."""
        with self._lock:
            if leaf in self._is_done or self._error is not None:
                return
            if self._snapshot.residency(leaf) in ("whole", "away"):
                return
            try:
                self._aside[leaf] = self._put_aside(msgpack.packb(self._load(leaf)))
                self._is_done.add(leaf)
            except Exception as error:
                # State in use comes before a copy of it: the change goes on, the copy is lost.
                self._error = _lost_copy(leaf, error)

    def _put_aside(self, data: bytes) -> tuple[int, int]:
        try:
            start = self._file.seek(0, 2)
            self._file.write(data)
        except OSError as error:
            raise temporary_failed(error) from error
        return start, len(data)

    def take(self, leaf: int) -> Rows:
        """The rows of a leaf; once."""
        with self._lock:
            if self._error is not None:
                raise copy(self._error)
            if (place := self._aside.pop(leaf, None)) is not None:
                rows: Rows = msgpack.unpackb(self._read_aside(*place), use_list=False)
            else:
                assert leaf not in self._is_done, f"the rows of leaf {leaf} were taken before"
                rows = self._load(leaf)
                self._is_done.add(leaf)
            return rows

    def _read_aside(self, start: int, length: int) -> bytes:
        try:
            self._file.seek(start)
            return self._file.read(length)
        except OSError as error:
            raise temporary_failed(error) from error

    def _load(self, leaf: int) -> list[tuple[int, bytes, bytes]]:
        load = self._home.load
        return [(number, key, row) for number in self._numbers for key, row in load(leaf, number)]

    def close(self) -> None:
        with self._lock:
            self._file.close()
            self._error = HomeError("the frozen state was closed")


def _lost_copy(leaf: int, error: Exception) -> StateKitError:
    """What whoever reads the rows of a guard gets, once some could not be put aside."""
    if isinstance(error, HomeError | StorageError):
        return copy(error)  # without a traceback, which would hold the rows
    return HomeError(
        f"the rows of leaf {leaf} could not be copied before they were changed "
        f"({type(error).__name__}: {error}). Take the checkpoint again."
    )


class Frozen:
    """A residence at one moment; made by Residence.freeze(). Close it."""

    def __init__(
        self,
        store: Store,
        snapshot: Snapshot,
        since: "array[int] | None",
        source: PullSource | None,
        rows: "Guard | HomeSnapshot | None",
        coming: frozenset[int],
        schemas: Sequence[StateSchema],
        on_close: Callable[["Frozen"], None],
    ) -> None:
        self.store = store  # the one in use
        self.snapshot = snapshot
        self.since = since  # what the snapshot was taken with: epochs, one a leaf
        self.source = source  # of leaves that were not whole, or (with a home) coming
        self._rows = rows
        self._coming = coming
        self._schemas = schemas  # a state's number at home is its place in it
        self._assembly: Assembly | None = None  # with the types of that moment
        self._on_close = on_close
        self._is_closed = False
        if rows is not None or source is not None:
            self._assembly = Assembly.beside(store, schemas, snapshot.watermark)

    @property
    def has_home(self) -> bool:
        return self._rows is not None

    @property
    def guard(self) -> Guard | None:
        """Who is to be told before rows change; None if nobody."""
        return self._rows if isinstance(self._rows, Guard) else None

    def complete(self, leaf: int, blocks: bytes) -> bytes:
        """All of a leaf that was not whole, from what the snapshot gave of it (with since 0).

        Once for each leaf; several threads may do this for different ones.
        """
        assembly = self._assembly
        assert assembly is not None, f"leaf {leaf} was whole: all others come from somewhere"
        if self._rows is not None and leaf not in self._coming:
            return assembly.over_rows(leaf, blocks, self._rows_of(leaf))
        assert self.source is not None
        return assembly.over_steps(leaf, blocks, self.source.read_leaf(leaf))

    def leaves(self, ranges: Sequence[range]) -> Iterator[tuple[int, bytes]]:
        """All that leaves of these ranges had, each once; those without entries are left out."""
        wanted = {leaf for part in ranges for leaf in part}
        for leaf, blocks in self.snapshot:
            if leaf in wanted:
                wanted.remove(leaf)
                is_whole = self.snapshot.residency(leaf) == "whole"
                yield leaf, blocks if is_whole else self.complete(leaf, blocks)
        for leaf in sorted(wanted):  # nothing of them was in memory
            if self.snapshot.residency(leaf) != "whole" and (blocks := self.complete(leaf, b"")):
                yield leaf, blocks

    def _rows_of(self, leaf: int) -> Rows:
        rows = self._rows
        if isinstance(rows, Guard):
            return rows.take(leaf)
        assert rows is not None
        load = rows.load
        return (
            (number, key, row)
            for number in range(len(self._schemas))
            for key, row in load(leaf, number)
        )

    def close(self) -> None:
        """Lets go of the snapshots. Closing twice does no harm."""
        if self._is_closed:
            return
        self._is_closed = True
        # The residence comes last: who holds its lock may be waiting for a reader of the snapshot.
        if self._rows is not None:
            self._rows.close()
        self.snapshot.close()
        self._on_close(self)
        if self.source is not None:
            self.source.release()
        if self._assembly is not None:
            self._assembly.close()

    def __enter__(self) -> "Frozen":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
