"""Work that Ctrl-C must not cut in two.

Python raises KeyboardInterrupt in the main thread, between any two steps. Where two steps must
both happen and no order of them is safe, they are done in another thread, and the interrupt is
passed on once they are done.
"""

import threading
from collections.abc import Callable


def uninterrupted(work: Callable[[], None]) -> None:
    """Does work that no interrupt can end half-way; the caller holds no lock that it takes."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="statekit-uninterrupted")
    interrupt: BaseException | None = None
    thread.start()
    while True:
        try:
            thread.join()
            break
        except BaseException as error:  # a second one must not end it either
            interrupt = error
    if failed:
        raise failed[0]
    if interrupt is not None:
        raise interrupt
