"""Cuts off peers that keep this process waiting.

A thread that waits for a peer can do nothing else. Watch knows since when each thread waits, and
cancels calls that have waited for too long. Without it, a peer that opens calls and sends nothing
would take all threads of a server (slow loris), and a peer that stops in the middle of a call would
keep its callers waiting for ever. gRPC's own deadlines are set by the caller, so a server cannot
rely on them.
"""

import math
import threading
import time
from collections.abc import Callable

Cancel = Callable[[], object]


HASTE_S = 0.25  # how long a wait may take while other calls need its thread


class Watch:
    """Ends waits that take longer than `limit_s`, with one thread for all of them.

    crowd: if there are this many waits at once, each may take HASTE_S only. hurry() makes the
    thread look soon.

    begin() and end() only insert into a dict and remove from it, because every call goes through
    them. They need no lock: each is one operation of the interpreter, and _expire() works on a
    copy.
    """

    def __init__(self, limit_s: float, name: str, crowd: float = math.inf) -> None:
        self._limit_s = limit_s
        self._crowd = crowd
        # Of each wait: when it began, how long it may take, what ends it. The oldest comes first.
        self._waits: dict[object, tuple[float, float, Cancel]] = {}
        self.expired = 0
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"statekit-{name}", daemon=True)
        self._thread.start()

    def begin(self, cancel: Cancel, limit_s: float | None = None) -> object:
        """A wait begins; returns what to pass to end()."""
        wait = object()
        self._waits[wait] = (time.monotonic(), limit_s or self._limit_s, cancel)
        self.hurry()  # earlier calls may be queueing for the thread that this wait occupies now
        return wait

    def end(self, wait: object) -> None:
        self._waits.pop(wait, None)

    def hurry(self) -> None:
        """A new call has come: if a crowd of threads is waiting, look at them soon."""
        if len(self._waits) >= self._crowd:
            self._hurry.set()

    def __len__(self) -> int:
        return len(self._waits)

    def close(self) -> None:
        self._stop.set()
        self._hurry.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            if len(self._waits) >= self._crowd or self._hurry.wait(self._limit_s / 4):
                self._stop.wait(HASTE_S / 2)  # not more often than this, however many calls come
                self._hurry.clear()
            self._expire()

    def _expire(self) -> None:
        """Cancels all calls that have waited for too long."""
        most = HASTE_S if len(self._waits) >= self._crowd else math.inf
        now = time.monotonic()
        for wait, (since, limit, cancel) in self._waits.copy().items():
            if now - since > min(limit, most) and self._waits.pop(wait, None) is not None:
                self.expired += 1
                cancel()
