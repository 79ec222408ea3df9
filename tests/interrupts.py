"""Ctrl-C at every line: runs a step again and again, each time interrupted at another place.

The main thread handles signals, between two instructions of Python. So KeyboardInterrupt can be
raised at any line, also in a `finally` or an `except`, and between a call and the assignment of
what it returned. `each_point` runs a step once to see which places of some files it passes, and
then once for each place, with the interrupt there:

    def make() -> KVProvider: ...                 a fresh thing to work on
    def step(kv: KVProvider) -> None: ...         what is interrupted
    def check(kv: KVProvider, run: Run) -> None:  must hold, and clean up

    for run in each_point(make, step, check, files=[statekit.checkpoint]):
        ...                                       (or list(...), if check says it all)

A place is a line (with calls=True also each return from a call) together with the number of earlier
visits. The first few visits and the last one are tried: with all of them, a loop over leaves would
take for ever. Other threads are not interrupted, as in real life. If something hangs afterwards (a
lock that was not released), the process ends with all tracebacks on stderr.

Two kinds of lines are left out. The interpreter does not look for signals there, so `with lock:` is
safe. But a trace function is called there, and if it raised, the lock would stay locked:

* the line of a `with` whose block has ended, before it calls __exit__;
* a line `try:` in such a block. It is a NOP, which in CPython 3.11 no block may cover.
"""

import dis
import faulthandler
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

NIGHTLY = os.environ.get("STATEKIT_NIGHTLY", "") not in ("", "0")
VISITS_MAX = 2  # how many visits of a place are tried, in addition to the last one
HANG_SECONDS = 300.0  # if one run and its check take longer, it hangs

File = str | Path | ModuleType


class Place(NamedTuple):
    """Where an interrupt may come: before a line, or after a call in it."""

    code: CodeType
    line: int
    after: int = -1  # offset of the call's instruction; -1: before the line
    visit: int = 1

    def __str__(self) -> str:
        when = "before" if self.after < 0 else "after a call in"
        where = f"{self.code.co_filename}:{self.line} ({self.code.co_qualname})"
        return f"{when} {where}, visit {self.visit}"


class Run(NamedTuple):
    """The outcome of one run. If not interrupted, it did not pass the place or swallowed it."""

    place: Place
    is_interrupted: bool
    result: Any = None


def each_point(
    make: Callable[[], T],
    step: Callable[[T], Any],
    check: Callable[[T, Run], None],
    *,
    files: Iterable[File],
    calls: bool = False,
    visits_max: int = VISITS_MAX,
    every: int = 1,
) -> Iterator[Run]:
    """Interrupts a step at every place that it passes. An error of `check` names the place.

    files: those whose lines count: a module, a package with everything in it, or a path.
    every: try only every n-th of the places.
    """
    wanted = _Files(files)
    gc.collect()
    gc.freeze()  # so that each collection need not go over what other tests have left
    try:
        places = _places(make, step, check, wanted, calls, visits_max)[::every]
        yield from _runs(make, step, check, wanted, places)
    finally:
        gc.unfreeze()


def _runs(
    make: Callable[[], T],
    step: Callable[[T], Any],
    check: Callable[[T, Run], None],
    wanted: "_Files",
    places: Iterable[Place],
) -> Iterator[Run]:
    for place in places:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            subject = make()
            run = _interrupted(step, subject, wanted, place)
            gc.collect()  # frees what only the traceback had kept alive
            check(subject, run)
        except BaseException as error:
            error.add_note(f"interrupted {place}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        yield run


def _places(
    make: Callable[[], T],
    step: Callable[[T], Any],
    check: Callable[[T, Run], None],
    wanted: "_Files",
    calls: bool,
    visits_max: int,
) -> list[Place]:
    """All places that the step passes, in their order."""
    subject = make()
    check(subject, Run(Place(step.__code__, 0), False, step(subject)))  # imports what it needs
    subject = make()
    seen: Counter[Place] = Counter()
    found: list[Place] = []

    def note(place: Place) -> None:
        seen[place] += 1
        if seen[place] <= visits_max:
            found.append(place._replace(visit=seen[place]))

    with _Tracing(wanted, note, calls):
        result = step(subject)
    check(subject, Run(Place(step.__code__, 0), False, result))
    found += [place._replace(visit=count) for place, count in seen.items() if count > visits_max]
    assert found, "the step comes by no line of these files"
    return found


def _interrupted(step: Callable[[T], Any], subject: T, wanted: "_Files", place: Place) -> Run:
    visits = 0

    def interrupt(found: Place) -> None:
        nonlocal visits
        if found == place._replace(visit=1):
            visits += 1
            if visits == place.visit:
                raise KeyboardInterrupt

    with _Tracing(wanted, interrupt, place.after >= 0):
        try:
            return Run(place, False, step(subject))
        except KeyboardInterrupt:
            return Run(place, True)


class _Files:
    """Which code is to be interrupted."""

    def __init__(self, files: Iterable[File]) -> None:
        self._paths = tuple(str(path) for one in files for path in _paths(one))
        self._known: dict[str, bool] = {}

    def __contains__(self, name: str) -> bool:
        found = self._known.get(name)
        if found is None:
            full = str(Path(name).resolve())
            found = any(full == path or full.startswith(f"{path}/") for path in self._paths)
            self._known[name] = found
        return found


def _paths(file: File) -> list[Path]:
    if isinstance(file, ModuleType):
        places = getattr(file, "__path__", None) or [file.__file__]
        return [Path(place).resolve() for place in places]
    return [Path(file).resolve()]


class _Tracing:
    """Calls `visit` at each place of this thread, as long as it does not raise."""

    def __init__(self, files: _Files, visit: Callable[[Place], None], calls: bool) -> None:
        self._files = files
        self._visit = visit
        self._calls = calls
        self._last: dict[FrameType, int] = {}  # the instruction that was executed last

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self._last.clear()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if self._calls:
            frame.f_trace_opcodes = True
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            if frame.f_lasti not in _uninterrupted(frame.f_code):
                self._visit(Place(frame.f_code, frame.f_lineno))
        elif event == "opcode":
            last = self._last.get(frame, -1)
            self._last[frame] = frame.f_lasti
            # The interpreter looks for signals after calls, and where loops and functions begin,
            # which are lines, too. Its exception comes from the call. Ours comes from the next
            # instruction, which may be outside of a `try` that the call is in.
            code = frame.f_code
            if (
                last >= 0
                and dis.opname[code.co_code[last]].startswith("CALL")
                and _handler(code, last) == _handler(code, frame.f_lasti)
            ):
                self._visit(Place(code, frame.f_lineno, last))
        elif event in ("return", "exception"):
            self._last.pop(frame, None)
        return self._trace


@cache
def _handlers(code: CodeType) -> list[Any]:
    return list(dis.Bytecode(code).exception_entries)  # type: ignore[attr-defined]


@cache
def _handler(code: CodeType, offset: int) -> int | None:
    """Where an exception of this instruction is caught."""
    for entry in _handlers(code):
        if entry.start <= offset < entry.end:
            target: int = entry.target
            return target
    return None


@cache
def _uninterrupted(code: CodeType) -> frozenset[int]:
    """Where lines begin at which the interpreter does not look for signals."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL")]
    uncovered = {
        step.offset
        for before, step in pairwise(steps)
        if step.opname == "NOP"
        and _handler(code, before.offset) is not None
        and _handler(code, step.offset) is None
    }
    return _ends_of_with(code) | uncovered


@cache
def _ends_of_with(code: CodeType) -> frozenset[int]:
    """Where the block of a `with` has ended and __exit__(None, None, None) is called next."""
    found = set()
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL")]
    for at in range(len(steps) - 3):
        is_none = all(
            step.opname == "LOAD_CONST" and step.argval is None for step in steps[at : at + 3]
        )
        if is_none and steps[at + 3].opname == "CALL" and steps[at + 3].arg == 2:
            found.add(steps[at].offset)
            # An instruction before it may belong to the end: SWAP puts the result of a `return`
            # below, NOP ends a block that does nothing last.
            if at and steps[at - 1].opname in ("SWAP", "NOP"):
                found.add(steps[at - 1].offset)
    return frozenset(found)
