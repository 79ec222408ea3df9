"""Traces the walks of docs/architecture.md: which files a call passes through, in which order.

    python docs/trace_walks.py              # the walks of this checkout
    python docs/trace_walks.py --functions  # and every function on the way, as it is first entered

A *switch* is a call from one file of statekit into another, or the return from it. Only Python is
seen; what is in C is one step. Threads that are started on the way are seen too.
"""

import secrets
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import statekit as sk

PACKAGE = str(Path(sk.__file__).parent) + "/"


class Trace:
    """What runs in this process while it is open, of the files of statekit."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}  # in the order of their first call
        self.switches = 0
        self._here = threading.local()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        file = frame.f_code.co_filename.removeprefix(PACKAGE)
        if event == "call":
            self.functions.setdefault((file, frame.f_code.co_qualname))
        if event == "return":
            outer = frame.f_back
            while outer is not None and not outer.f_code.co_filename.startswith(PACKAGE):
                outer = outer.f_back
            if outer is None:
                return
            file = outer.f_code.co_filename.removeprefix(PACKAGE)
        if file != getattr(self._here, "file", file):
            self.switches += 1
        self._here.file = file

    def __enter__(self) -> "Trace":
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @property
    def files(self) -> list[str]:
        return [*dict.fromkeys(file for file, _ in self.functions)]


KEYS = [f"key-{i}" for i in range(5000)]
Walk = Callable[[], object]


def batch_add(folder: str, stack: ExitStack) -> Walk:
    counts = stack.enter_context(sk.open("memory:")).value("counts", int)
    counts.add_many(KEYS)
    return lambda: counts.add_many(KEYS)


def miss_with_a_home(folder: str, stack: ExitStack) -> Walk:
    with sk.open(f"rocksdb:{folder}/home") as kv:
        kv.value("names", str).update(dict.fromkeys(KEYS, "x"))
    names = stack.enter_context(sk.open(f"rocksdb:{folder}/home")).value("names", str)
    assert names[KEYS[0]] == "x"
    return lambda: names[KEYS[1]]


def incremental_checkpoint(folder: str, stack: ExitStack) -> Walk:
    kv = stack.enter_context(sk.open("memory:"))
    counts = kv.value("counts", int)
    counts.add_many(KEYS)
    kv.checkpoint(f"{folder}/ck")
    counts.add_many(KEYS[:10])
    return lambda: kv.checkpoint(f"{folder}/ck")


def first_get_of_a_lazy_restore(folder: str, stack: ExitStack) -> Walk:
    incremental_checkpoint(folder, stack)()
    kv = stack.enter_context(sk.restore(f"{folder}/ck", lazy=True))
    counts = kv.value("counts", int)
    return lambda: counts[KEYS[0]]


def migrated_leaf(folder: str, stack: ExitStack) -> Walk:
    old = stack.enter_context(sk.open("memory:", key_groups=4, subgroups=1))
    old.value("counts", int).add_many(KEYS)
    new = stack.enter_context(sk.open("memory:", key_groups=4, subgroups=1, owned=()))
    counts = new.value("counts", int)
    token = secrets.token_urlsafe()
    new.fetch_from(old.serve(token=token).address, token=token, strategy="on_demand")
    return lambda: counts[KEYS[0]]


def rescale(folder: str, stack: ExitStack) -> Walk:
    kv = stack.enter_context(sk.open("memory:"))
    kv.value("counts", int).add_many(KEYS)

    def split_and_merge() -> None:
        (part,) = kv.split([range(64, 128)])
        kv.merge(part)

    return split_and_merge


WALKS = [
    batch_add,
    miss_with_a_home,
    incremental_checkpoint,
    first_get_of_a_lazy_restore,
    migrated_leaf,
    rescale,
]


def main() -> None:
    for walk in WALKS:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            go = walk(folder, stack)
            with Trace() as trace:
                go()
        name = walk.__name__.replace("_", " ")
        print(f"{name}: {len(trace.files)} files, {trace.switches} switches", flush=True)
        if "--functions" in sys.argv:
            for file, function in trace.functions:
                print(f"    {file:32} {function}")


if __name__ == "__main__":
    main()
