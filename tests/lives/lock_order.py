"""Lock order: the locks of statekit are taken in one order, whichever threads take them.

Two threads that take two locks in opposite orders wait for each other for ever, one time in many
thousands. The order itself shows at once: a lock is known by the line that makes it, and whoever
takes one while it holds another says which comes first. A circle among lines is a deadlock that
some run will meet, though this one did not.

    watch()             from now on, locks that statekit makes are watched
    edges()             which lock was held when which other was taken, and where that was first
    circles(edges)      the circles among these, each with its stacks; none is what should be

Edges of several processes may be put together: the same lines make the same locks.

Two locks of one line (of two providers) are not told apart: statekit orders those by id(). A lock
that is only tried waits for nobody, so nothing comes before it.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

_FRAMES = 6  # up to the statekit line that makes a lock: threading.Condition makes one, too
_STACK_LINES = 14

_real = {"Lock": threading.Lock, "RLock": threading.RLock}
_held = threading.local()
_guard = _real["Lock"]()
Edges = dict[tuple[str, str], str]  # (held, taken) -> the stack when that was first
_edges: Edges = {}


def watch() -> None:
    """Watches the locks that statekit makes from now on. Call it before statekit is imported."""
    for name, real in _real.items():
        setattr(threading, name, _maker(real))


def _maker(real: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        line = _maker_line()
        return real() if line is None else WatchedLock(real(), line)

    return make


def _maker_line() -> str | None:
    frame: Any = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        name = frame.f_globals.get("__name__", "")
        if name.startswith("statekit."):
            return f"{name}:{frame.f_lineno}"
        if name != "threading":
            return None
        frame = frame.f_back
    return None


class WatchedLock:
    """A lock that says what was held when it was taken."""

    def __init__(self, real: Any, line: str) -> None:
        self._real = real
        self._line = line

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking:
            _note(self)
        taken = self._real.acquire(blocking, timeout)
        if taken:
            _mine().append(self)
        return bool(taken)

    def release(self) -> None:
        self._real.release()
        _forget(self)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)  # locked(), _is_owned(), which a plain lock has not

    # What a condition asks of the lock that it is made with, if it has them.

    def _release_save(self) -> Any:
        held = [one for one in _mine() if one is self]
        _mine()[:] = [one for one in _mine() if one is not self]
        if hasattr(self._real, "_release_save"):
            return held, self._real._release_save()
        self._real.release()
        return held, None

    def _acquire_restore(self, saved: Any) -> None:
        held, state = saved
        _note(self)
        if hasattr(self._real, "_acquire_restore"):
            self._real._acquire_restore(state)
        else:
            self._real.acquire()
        _mine().extend(held)

    def _is_owned(self) -> bool:
        if hasattr(self._real, "_is_owned"):
            return bool(self._real._is_owned())
        return any(one is self for one in _mine())


def _mine() -> list[WatchedLock]:
    try:
        return _held.locks  # type: ignore[no-any-return]
    except AttributeError:
        _held.locks = []
        return _held.locks  # type: ignore[no-any-return]


def _forget(lock: WatchedLock) -> None:
    mine = _mine()
    for at in range(len(mine) - 1, -1, -1):
        if mine[at] is lock:
            del mine[at]
            return
    # A lock that another thread has taken: its list is out of reach, and says too much.


def _note(lock: WatchedLock) -> None:
    mine = _mine()
    if any(one is lock for one in mine):
        return  # once more: nobody is waited for
    for held in mine:
        edge = held._line, lock._line
        if edge[0] != edge[1] and edge not in _edges:
            stack = "".join(traceback.format_stack(sys._getframe(2), limit=_STACK_LINES))
            with _guard:
                _edges.setdefault(edge, stack)


def edges() -> Edges:
    with _guard:
        return dict(_edges)


def circles(edges: Edges) -> list[str]:
    after: dict[str, list[str]] = {}
    for first, second in edges:
        after.setdefault(first, []).append(second)
    found = []
    for first, second in sorted(edges):
        path = _path(after, second, first)
        if path is not None and first == min([first, *path]):
            lines = [first, *path]
            found.append(
                "\n".join(
                    f"{one} is held, and {other} taken:\n{edges[one, other]}"
                    for one, other in pairwise(lines)
                )
            )
    return found


def _path(after: dict[str, list[str]], start: str, end: str) -> list[str] | None:
    """The shortest way from one line to another, with both; None if there is none."""
    came: dict[str, str | None] = {start: None}
    line = [start]
    for at in _growing(line):
        if at == end:
            path: list[str] = []
            step: str | None = at
            while step is not None:
                path.append(step)
                step = came[step]
            return path[::-1]
        for other in after.get(at, ()):
            if other not in came:
                came[other] = at
                line.append(other)
    return None


def _growing(line: list[str]) -> Iterator[str]:
    at = 0
    while at < len(line):
        yield line[at]
        at += 1
