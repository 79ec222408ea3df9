"""PeriodicCheckpoints: a checkpoint at regular intervals; older ones are removed.

    background        a thread takes them, at any moment: perhaps between two changes that one
                      record makes, or between a change and the counting of its offset
    not background    poll() takes them, in the thread of its caller, between two records

A failure is logged once for each cause: a checkpoint that fails every minute for a whole night
makes one line in the log, and another when it works again.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.retention import check_keep
from statekit.errors import ArgumentError, FencedError, shorten
from statekit.live.job import CheckpointJob, NothingOwnedError, cause_of, kept
from statekit.storage import open_storage

_ERRORS_KEPT = 16
_log = logging.getLogger("statekit")


class Taker(Protocol):
    """What takes checkpoints: the Checkpointer of a provider."""

    @property
    def start(self) -> Callable[..., CheckpointJob]: ...
    def forget(self, periodic: "PeriodicCheckpoints") -> None: ...


class PeriodicCheckpoints:
    """Checkpoints that are taken at regular intervals; see KVProvider.checkpoint_every()."""

    def __init__(
        self,
        owner: Taker,
        url: Any,
        seconds: float,
        keep: int,
        options: dict[str, Any],
        background: bool = True,
        on_error: Callable[[Exception], object] | None = None,
    ) -> None:
        if not isinstance(seconds, int | float) or not 0 < seconds < threading.TIMEOUT_MAX:
            raise ArgumentError(f"{shorten(seconds)} is no interval. Give seconds above 0.")
        if on_error is not None and not callable(on_error):
            raise ArgumentError(f"on_error={shorten(on_error)} is no function of an exception.")
        check_keep(keep)
        self._owner = owner
        self._storage = open_storage(url)
        self._seconds = seconds
        self._options = {"storage": self._storage, "must_own": True, "keep": keep, **options}
        self._on_error = on_error
        self._is_stopped = threading.Event()
        self._causes: set[tuple[Any, ...]] = set()  # of failures that were logged
        self._lock = threading.RLock()  # held while polling; reentrant: on_error may call stop()
        self._job: CheckpointJob | None = None  # the one that was begun last, until it is over
        self._due = monotonic() + seconds
        self.background = background
        self.last: Checkpoint | None = None  # the newest one taken
        self.taken = 0
        self.failed = 0
        self.errors: deque[Exception] = deque(maxlen=_ERRORS_KEPT)  # newest last
        self._thread: threading.Thread | None = None
        self._start()

    # ---- Between records

    @property
    def due(self) -> bool:
        """Whether it is time for the next one, and none is being written."""
        return not (
            monotonic() < self._due
            or self._is_stopped.is_set()
            or (self._job is not None and not self._job.done)
        )

    def poll(self) -> CheckpointJob | None:
        """Takes a checkpoint if it is time for one, as checkpoint_async() does. Returns its job.

        For checkpoint_every(background=False), between two records. If there is nothing to do, it
        costs a look at the clock. It never waits for a checkpoint that is being written. A failure
        raises nothing here, unless on_error raises: it is called from here.
        """
        if self.background:
            raise ArgumentError(
                "these checkpoints are taken by a thread. Pass background=False to "
                "checkpoint_every() if you want to say when."
            )
        if self._job is None and monotonic() < self._due:
            return None
        with self._lock:
            self._look(self._tell)
            return self._begin(self._tell) if self.due else None

    def _begin(self, tell: Callable[[Exception], None]) -> CheckpointJob | None:
        self._due = max(self._due + self._seconds, monotonic())
        try:
            self._job = self._owner.start(None, **self._options)
        except NothingOwnedError:
            pass  # an empty checkpoint would push out the last one that has state
        except Exception as error:
            self._fail(error, tell)
        return self._job

    def _look(self, tell: Callable[[Exception], None]) -> None:
        """Takes note of the outcome of the last one, if it is over."""
        job = self._job
        if job is None or not job.done:
            return
        self._job = None
        self._end(job, tell)

    # ---- Outcomes

    def _end(self, job: CheckpointJob, tell: Callable[[Exception], None]) -> None:
        if job._is_base_gone:
            self._due = monotonic()  # take another at once: it will be full
        elif isinstance(job.error, Exception):
            self._fail(job.error, tell)
        else:
            self.last = job.wait()
            self.taken += 1
            if self._causes:
                self._causes.clear()
                _log.warning("checkpoints to %r are taken again", self._storage.shown)
            if job.cleanup_error is not None:  # which the checkpointer logs
                self.errors.append(job.cleanup_error)
                tell(job.cleanup_error)

    def _fail(self, error: Exception, tell: Callable[[Exception], None]) -> None:
        self.failed += 1
        self.errors.append(kept(error))
        if (cause := cause_of(error)) not in self._causes:
            self._causes.add(cause)
            again = (
                ""
                if isinstance(error, FencedError)
                else f" It is tried again every {self._seconds} s."
            )
            _log.error(
                "a checkpoint to %r failed: %s: %s.%s The same cause is not logged again.",
                self._storage.shown,
                type(error).__name__,
                str(error).rstrip(". "),
                again,
            )
        tell(error)

    def _tell(self, error: Exception) -> None:
        if self._on_error is not None:
            self._on_error(error)

    def _tell_safely(self, error: Exception) -> None:
        """For our own thread, and while closing: nobody is there who could catch what it raises."""
        try:
            self._tell(error)
        except Exception:
            _log.exception("on_error of the checkpoints to %r failed", self._storage.shown)

    # ---- In the background

    def _start(self) -> None:
        if self.background:
            self._thread = threading.Thread(target=self._run, name="statekit-periodic", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_stopped.wait(max(0.0, self._due - monotonic())):
            if (job := self._begin(self._tell_safely)) is not None:
                job._done.wait()
                self._look(self._tell_safely)
            self._due = max(self._due, monotonic())

    # ---- The end

    def stop(self) -> None:
        """Takes no more of them; one that is being written is finished first."""
        self._owner.forget(self)
        self._halt()

    def _halt(self) -> None:
        self._is_stopped.set()
        thread = self._thread
        if thread is not None:
            if thread is not threading.current_thread():
                thread.join()
            return
        with self._lock:
            if self._job is not None:
                self._job._done.wait()
            self._look(self._tell_safely)

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
            f"{self.failed} failed>"
        )
