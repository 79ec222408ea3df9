"""Kept: leaves of an arrival as they came, for a checkpoint that was begun before they did."""

import threading
from collections.abc import Sequence
from tempfile import SpooledTemporaryFile
from typing import IO, TYPE_CHECKING

from statekit.errors import MigrationError, StateKitError, temporary_failed
from statekit.native.block import block_pieces, rewrite
from statekit.native.buffers import BufferSlice
from statekit.residence.sources import PullSource

if TYPE_CHECKING:
    from statekit.migration.arrival import Arrival

KEPT_BYTES = 16 << 20  # in memory; the rest waits in a file


class Kept(PullSource):
    """The leaves of an arrival that had not come, and are as they were when they do."""

    def __init__(self, arrival: "Arrival") -> None:
        super().__init__()
        self._arrival = arrival
        self._lock = threading.Lock()
        self._places: dict[int, list[tuple[int, int]]] = {}
        self._file: IO[bytes] = SpooledTemporaryFile(KEPT_BYTES)  # noqa: SIM115
        self._error: StateKitError | None = None

    def keep(self, leaf: int, steps: Sequence[bytes | BufferSlice]) -> None:
        """A leaf has come."""
        # State in use comes before a copy of it: if there is no room, the checkpoint fails.
        with self._lock:
            if self._error is not None:
                return
            try:
                places = []
                for step in steps:
                    places.append((self._file.seek(0, 2), len(step)))
                    self._file.write(bytes(step))
                self._places[leaf] = places
            except OSError as error:
                self._error = temporary_failed(error)
            except ValueError:  # closed: nobody reads it any more
                return

    def read_leaf(self, leaf: int) -> list[bytes]:
        if leaf not in self._places:
            loading = self._arrival.shell.loading
            if loading is not None:
                loading.load(leaf)
            self._arrival.wait_taken(leaf)  # whoever took it in may not have come to keep() yet
        with self._lock:
            if self._error is not None:
                raise self._error
            if leaf not in self._places:
                raise MigrationError(
                    f"leaf {leaf} was given back while a checkpoint was waiting for it. "
                    "Take the checkpoint again."
                )
            steps = []
            for start, length in self._places[leaf]:
                self._file.seek(start)
                # With no checksums: those of messages and of other packs are bound to these.
                step = self._file.read(length)
                steps.append(b"".join(rewrite(piece) for _, piece in block_pieces(step)))
            return steps

    def _close(self) -> None:
        self._arrival.unshare(self)
        with self._lock:
            self._file.close()
