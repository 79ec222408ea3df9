"""A checkpoint, or a part of one, that is being taken in the background, as its user sees it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from statekit.checkpoint.parts import Part
from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.writer import Attempt
from statekit.errors import CheckpointCancelledError, CheckpointError, InProcess, clear_frames
from statekit.native.snapshot import Filled

E = TypeVar("E", bound=BaseException)
R = TypeVar("R", Checkpoint, Part)


class CheckpointProgress(NamedTuple):
    """How far a checkpoint is."""

    leaves_done: int
    leaves_total: int
    bytes_written: int

    @property
    def fraction(self) -> float:
        """From 0 to 1, by leaves."""
        return self.leaves_done / self.leaves_total if self.leaves_total else 1.0


class Job(InProcess, Generic[R]):
    """What jobs of checkpoints and jobs of parts have in common."""

    _instead = "Pass on what wait() gives."

    def __init__(self, url: str, on_cancel: Callable[[], None]) -> None:
        self.url = url
        #: Why older checkpoints could not be removed, if keep= was given. This one was taken.
        self.cleanup_error: Exception | None = None
        self._on_cancel = on_cancel
        self._is_frozen = threading.Event()  # or it is over: the caller of start() may go on
        self._leaves_total = 0
        self._leaves_done = 0
        self._bytes_written = 0  # used once there is no attempt any more
        self._attempt: Attempt | None = None
        self._is_cancelled = False
        self._is_base_gone = False  # it failed because its base is gone
        self._is_taken_up = False  # the state was frozen for it: wait() raises later failures
        self._done = threading.Event()
        self._result: R | None = None
        self._error: BaseException | None = None

    @property
    def progress(self) -> CheckpointProgress:
        """How far it is."""
        attempt = self._attempt
        written = self._bytes_written if attempt is None else attempt.bytes_written
        return CheckpointProgress(self._leaves_done, self._leaves_total, written)

    @property
    def done(self) -> bool:
        """Whether it is over, successfully or not."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None if it did not, or is not done."""
        return self._error

    def wait(self, timeout: float | None = None) -> R:
        """The result, once it is durable. Raises what went wrong; TimeoutError if not done."""
        if not self._done.wait(timeout):
            raise TimeoutError(
                f"the checkpoint to {self.url!r} is not done after {timeout} s "
                f"({self.progress.fraction:.0%}). Wait again, or cancel() it."
            )
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Gives it up, unless it is done already; wait() raises CheckpointCancelledError then."""
        self._is_cancelled = True
        if (attempt := self._attempt) is not None:
            attempt.cancel()
        self._on_cancel()

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise CheckpointCancelledError(
                f"the checkpoint to {self.url!r} was cancelled. Nothing of it remains."
            )

    def _begin(self, attempt: Attempt) -> None:
        self._attempt = attempt
        if self._is_cancelled:  # cancelled before there was an attempt that cancel() could stop
            attempt.cancel()

    def _filled(self, records: Sequence[Filled]) -> None:
        self._leaves_done += len(records)

    def _reach(self, leaves_left: int) -> None:
        """All but `leaves_left` leaves are done; some of them needed no work."""
        self._leaves_done = max(self._leaves_done, self._leaves_total - leaves_left)

    def _finish(self, result: R | None, error: BaseException | None) -> None:
        self._result, self._error = result, error
        if (attempt := self._attempt) is not None:
            self._bytes_written, self._attempt = attempt.bytes_written, None
        if result is not None:
            self._leaves_done = self._leaves_total
        self._done.set()
        self._is_frozen.set()

    def __repr__(self) -> str:
        state = f"failed: {self._error}" if self._error else f"{self.progress.fraction:.0%}"
        name = type(self).__name__
        return f"<{name} to {self.url!r}, {'done' if self._result else state}>"


class CheckpointJob(Job[Checkpoint]):
    """A checkpoint that is being taken in the background."""


class PartJob(Job[Part]):
    """A part of a checkpoint that is being written in the background."""


class NothingOwnedError(CheckpointError):
    """There is nothing to take a checkpoint of."""


def cause_of(error: BaseException) -> tuple[Any, ...]:
    """Identifies the cause of a failure, whichever file was concerned: equal for equal causes."""
    cause = error.__cause__
    return type(error), type(cause), getattr(cause, "errno", None)


def kept(error: E) -> E:
    """An error to be kept: with its traceback, but without the local variables of the calls."""
    clear_frames(error)
    trace = error.__traceback__
    return error.with_traceback(trace and trace.tb_next)  # without our caller, which still runs
