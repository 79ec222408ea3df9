"""The threads that write packs end when they are told to, whichever of them is told first."""

import queue
import threading
from pathlib import Path
from typing import Any

from statekit.checkpoint import writer
from statekit.storage import open_storage

HANGS_SECONDS = 20.0


class Unfair:
    """A queue whose first item goes to the last thread, which is done before put() returns."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.last = threading.Thread()
        self.is_known = threading.Event()

    def get(self) -> Any:
        self.is_known.wait()
        if threading.current_thread() is not self.last:
            self.last.join()
        return self.items.get()

    def put(self, item: Any) -> None:
        self.items.put(item)
        self.last.join()


def test_every_thread_ends_also_if_the_others_end_while_it_is_told(
    tmp_path: Path, monkeypatch: Any
) -> None:
    unfair = Unfair()
    monkeypatch.setattr(writer.queue, "SimpleQueue", lambda: unfair)
    packs = writer._PackWriter(lambda *_: None, open_storage(tmp_path), gives_way=False)
    assert len(packs._threads) > 1
    unfair.last = packs._threads[-1]
    unfair.is_known.set()
    ending = threading.Thread(target=packs.finish, daemon=True)
    ending.start()
    ending.join(HANGS_SECONDS)
    is_hanging = ending.is_alive()
    for _ in packs._threads:
        unfair.items.put(None)  # so that the threads, no daemons, end after a failure, too
    assert not is_hanging
