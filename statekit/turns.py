"""Short turns: threads of ours that need the interpreter now and then are not kept waiting for it.

A thread that runs Python code gives the interpreter up when it waits for something, or else when
another thread has waited for the switch interval, which is 5 ms. A loop of calls about one key does
not wait for anything (csrc/py.h). Beside such a loop a checkpoint, which comes back from a native
call or from the disk about a hundred times, would wait half a second in all, and a leaf that
another process hands over some tens of milliseconds.

So as long as such work is under way the interval is short. It costs nothing while nobody waits, and
a few per cent while threads of a program compete for the interpreter all the time. Rejected: that
the loop gives way by itself. It cannot tell whether anybody waits, and the thread that gives the
interpreter up for a moment has it again before the one that waits is awake.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

_SHORT_S = 0.0001


class _Turn:
    """One who wants short turns. Held by the frame of short_turns(), and by nobody else: so one
    that Ctrl-C cut in two, before it could say that it has ended, is not counted for ever."""

    __slots__ = ("__weakref__",)


_lock = threading.Lock()
_turns: WeakSet[_Turn] = WeakSet()
_before_s = 0.0  # what the interval was before the first of them; 0: we have not changed it


@contextmanager
def short_turns() -> Iterator[None]:
    """Meanwhile no thread of this process keeps the interpreter for long if another one waits.

    An interval that is shorter already stays, and so does one that the program sets meanwhile.
    """
    global _before_s
    turn = _Turn()
    try:
        with _lock:
            if not _turns and not _is_short():
                _before_s = 0.0
                if (now_s := sys.getswitchinterval()) > _SHORT_S:
                    _before_s = now_s
                    sys.setswitchinterval(_SHORT_S)
            _turns.add(turn)
        yield
    finally:
        with _lock:
            _turns.discard(turn)
            if not _turns:
                _restore()


def _is_short() -> bool:
    """Whether the interval is what we set. (It is kept in microseconds.)"""
    return _before_s > 0 and abs(sys.getswitchinterval() - _SHORT_S) < _SHORT_S / 10


def _restore() -> None:
    global _before_s
    if _is_short():
        sys.setswitchinterval(_before_s)
    _before_s = 0.0


def _end_in_child() -> None:
    """A child of fork has none of the threads that want short turns, or that hold the lock."""
    global _lock
    _lock = threading.Lock()
    _turns.clear()
    _restore()


os.register_at_fork(after_in_child=_end_in_child)
