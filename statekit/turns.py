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

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SHORT_S = 0.0001

_lock = threading.Lock()
_users = 0
_before_s = 0.0  # what the interval was before the first of the users


@contextmanager
def short_turns() -> Iterator[None]:
    """Meanwhile no thread of this process keeps the interpreter for long if another one waits.

    An interval that is shorter already stays, and so does one that the program sets meanwhile.
    """
    global _users, _before_s
    with _lock:
        _users += 1
        if _users == 1:
            _before_s = sys.getswitchinterval()
            if _before_s > _SHORT_S:
                sys.setswitchinterval(_SHORT_S)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _before_s > _SHORT_S and _is_short():
                sys.setswitchinterval(_before_s)


def _is_short() -> bool:
    """Whether the interval is what we set. (It is kept in microseconds.)"""
    return abs(sys.getswitchinterval() - _SHORT_S) < _SHORT_S / 10
