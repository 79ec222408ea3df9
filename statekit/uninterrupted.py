"""Work that Ctrl-C cannot cut in two, and finalizers that cut no other work in two.

Python handles signals in the main thread, between any two instructions: in the middle of a
`finally`, or between a call that takes a lock and the line that takes note of it. No order of lines
is safe from that. But other threads are safe: an interrupt is never raised in them. So work that
must be done as a whole is done by another thread while the caller waits, and an interrupt only ends
the waiting. The result of the work is then undone in that thread, as if nobody had asked for it.

Finalizers run wherever memory is allocated, so they may run while this very thread holds locks, or
has changed one half of something. A finalizer must not take locks there, nor wait for somebody who
takes them.
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
    """Returns the result of work(is_abandoned).

    If the caller is interrupted before it has the result, undo(result) is called. The interrupt is
    raised here once the work has ended, successfully or not.

    is_abandoned: a function that tells whether nobody waits any more. Work that takes long should
    call it now and then, and raise if it says so.
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


_finalizing: dict[int, "_thread.LockType"] = {}  # one per thread of finalize(), held until it ends
os.register_at_fork(after_in_child=_finalizing.clear)  # a child has no such threads
_BUSY = ("statekit", "threading")  # packages that hold locks


def finalize(work: Callable[[], object]) -> None:
    """For __del__: runs `work` now, or in another thread if this one is in the middle of something.

    It is, if a function of statekit or threading is among its callers.
    """
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
    """Waits for the work that finalize() has left to other threads."""
    for busy in [*_finalizing.values()]:
        with busy:
            pass  # that thread has ended


class _Task(Generic[T]):
    def __init__(
        self, work: Callable[[Callable[[], bool]], T], undo: Callable[[T], object]
    ) -> None:
        self._work = work
        self._undo = undo
        self._lock = threading.Lock()  # guards the next three
        self._is_begun = False
        self._is_abandoned = False
        self._results: list[T] = []  # one, once the work is done, unless it was abandoned
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
                del error  # else the error, its traceback and this frame would form a cycle
        return self._results[0]

    def abandon(self) -> None:
        """Undoes the result, or has the thread undo it. Afterwards nothing of the work goes on."""
        with self._lock:
            self._is_abandoned = True
            results, self._results = self._results, []
            is_begun = self._is_begun
        for result in results:
            self._undo(result)
        if is_begun:
            self._is_over.wait()
