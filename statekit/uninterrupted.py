"""Work that Ctrl-C cannot cut in two, and finalizers that cut no other work in two.

Signals are handled by the main thread, between any two instructions of Python: in the middle of a
`finally`, or between a call that takes a lock and the line that takes note of it. No order of lines
is safe from that. But other threads are: an interrupt never comes up there. So what must be done as
a whole is done by another thread while the caller waits, and an interrupt ends the waiting. What
comes of the work is undone then, in its own thread, as if nobody had asked for it.

Finalizers are run wherever memory is allocated: also while this very thread holds locks, or has
changed a half of something. What takes locks itself must not be done there, nor waited for.
"""

import _thread
import os
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def uninterrupted(
    work: Callable[[Callable[[], bool]], T], undo: Callable[[T], object] = lambda _: None
) -> T:
    """What work(is_abandoned) gives. If the caller is interrupted before it has it, undo(that).

    is_abandoned: tells whether nobody waits any more; work that takes long looks now and then, and
    raises. An interrupt is raised here when the work has ended, one way or the other.
    """
    if threading.current_thread() is not threading.main_thread():
        return work(lambda: False)
    task = _Task(work, undo)
    try:
        try:
            threading.Thread(target=task.run, name="statekit-uninterrupted").start()
        except RuntimeError:  # there are no more threads: Python is about to end
            return work(lambda: False)
        return task.wait()
    except BaseException:
        task.abandon()
        raise


_finalizing: dict[int, "_thread.LockType"] = {}  # held by threads of their own until they end
os.register_at_fork(after_in_child=_finalizing.clear)  # a child has no such threads
_BUSY = ("statekit", "threading")  # packages that hold locks


def finalize(work: Callable[[], object]) -> None:
    """For __del__: does it now, or in another thread if this one is in the middle of something."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _BUSY:
            busy = _thread.allocate_lock()
            busy.acquire()
            _finalizing[id(busy)] = busy
            _thread.start_new_thread(_finalize, (work, busy))  # takes no locks, unlike Thread
            return
        frame = frame.f_back
    work()


def _finalize(work: Callable[[], object], busy: "_thread.LockType") -> None:
    try:
        work()
    finally:
        _finalizing.pop(id(busy), None)
        busy.release()


def await_finalizers() -> None:
    """Waits for what finalize() has left to other threads."""
    for busy in [*_finalizing.values()]:
        with busy:
            pass  # it has ended


class _Task(Generic[T]):
    def __init__(
        self, work: Callable[[Callable[[], bool]], T], undo: Callable[[T], object]
    ) -> None:
        self._work = work
        self._undo = undo
        self._lock = threading.Lock()  # of the next three
        self._is_begun = False
        self._is_abandoned = False
        self._results: list[T] = []  # one, once it is there and nobody has abandoned it
        self._error: BaseException | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        """In the thread."""
        with self._lock:
            if self._is_abandoned:
                return
            self._is_begun = True
        try:
            result = self._work(lambda: self._is_abandoned)
            with self._lock:
                if not self._is_abandoned:
                    self._results.append(result)
            if not self._results:
                self._undo(result)
        except BaseException as error:
            self._error = error
        finally:
            self._is_over.set()

    def wait(self) -> T:
        self._is_over.wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else it, its traceback and we would keep each other
        return self._results[0]

    def abandon(self) -> None:
        """Undoes what there is, or has the thread do so; then nothing of it goes on."""
        with self._lock:
            self._is_abandoned = True
            results, self._results = self._results, []
            is_begun = self._is_begun
        for result in results:
            self._undo(result)
        if is_begun:
            self._is_over.wait()
