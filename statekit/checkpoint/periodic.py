"""PeriodicCheckpoints: one every so many seconds, the older ones removed."""

import threading
from collections import deque
from time import monotonic
from typing import Any, Protocol

from statekit.checkpoint.job import NothingOwnedError, kept
from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.retention import check_keep, collect
from statekit.checkpoint.storage import open_storage
from statekit.errors import ArgumentError, shorten

_ERRORS_KEPT = 16


class Taker(Protocol):
    """Who takes checkpoints: the Checkpointer of a provider."""

    def take(self, url: Any, base: Any = ..., **options: Any) -> Checkpoint: ...
    def forget(self, periodic: "PeriodicCheckpoints") -> None: ...


class PeriodicCheckpoints:
    """Checkpoints that are taken every so many seconds; see KVProvider.checkpoint_every()."""

    def __init__(
        self, owner: Taker, url: Any, seconds: float, keep: int, options: dict[str, Any]
    ) -> None:
        if not isinstance(seconds, int | float) or not 0 < seconds < threading.TIMEOUT_MAX:
            raise ArgumentError(f"{shorten(seconds)} is no interval. Give seconds above 0.")
        check_keep(keep)
        self._owner = owner
        self._storage = open_storage(url)
        self._seconds = seconds
        self._keep = keep
        self._options = options
        self._is_stopped = threading.Event()
        self.last: Checkpoint | None = None  # the newest one taken
        self.taken = 0
        self.errors: deque[Exception] = deque(maxlen=_ERRORS_KEPT)  # newest last
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="statekit-periodic", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = monotonic() + self._seconds
        while not self._is_stopped.wait(max(0.0, due - monotonic())):
            try:
                self.last = self._owner.take(
                    None, storage=self._storage, must_own=True, **self._options
                )
                self.taken += 1
                collect(self._storage, keep=self._keep)
            except NothingOwnedError:
                pass  # one of nothing would push out the last that has something
            except Exception as error:
                # The next one may do better; whoever watches over it looks at `errors`.
                self.errors.append(kept(error))
            due = max(due + self._seconds, monotonic())

    def stop(self) -> None:
        """Takes no more of them; one that is being written is finished first."""
        self._owner.forget(self)
        self._halt()

    def _halt(self) -> None:
        self._is_stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _go_on(self) -> None:
        if self._is_stopped.is_set():
            self._is_stopped.clear()
            self._start()

    def __enter__(self) -> "PeriodicCheckpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._is_stopped.is_set() else f"every {self._seconds} s"
        return (
            f"<PeriodicCheckpoints to {self._storage.shown!r}, {state}, {self.taken} taken, "
            f"{len(self.errors)} errors>"
        )
