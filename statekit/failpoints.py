"""Fail points: named places on the checkpoint path where a test makes the program fail.

    STATEKIT_FAILPOINTS="storage.pack.fsync=error;storage.manifest.link=kill@2" python job.py

    text     entry [";" entry ...]
    entry    name "=" action ["@" n]       acts at the n-th visit only (n = 1 if not given)
    action   error       OSError(EIO) is raised at the place
             kill        the process gets SIGKILL: nothing is flushed, closed or cleaned up
             delay:MS    the thread sleeps for MS milliseconds
             short       the place writes half of what it should, then the disk is full

A module names its points when it is imported (register) and passes them with visit(). They are
off unless the environment variable is set when statekit is imported, or configure() was called;
then each visit is counted, so that a test can prove that it came by all of them. Off, a visit
costs one test of a module constant.

The C library has points of its own, in testing builds only. They follow the same syntax:
configure() hands them their entries, names() and visits() include them. An entry for a name that
nobody has is kept: the module that registers it may be imported later.
"""

import errno
import os
import signal
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

from statekit._native import ffi, lib
from statekit.errors import ArgumentError

__all__ = ["configure", "names", "register", "visit", "visits"]

VARIABLE = "STATEKIT_FAILPOINTS"

# As sk_failpoint_set() numbers them; 0 is off.
_ACTIONS = {"error": 1, "kill": 2, "delay": 3, "short": 4}


class _Entry(NamedTuple):
    name: str
    action: str
    nth: int  # counted from 1
    delay_ms: int  # of delay, else 0


is_on = False  # public: places that are passed very often test it, and save the call of visit()
_lock = threading.Lock()
_names: set[str] = set()
_visits: Counter[str] = Counter()
_entries: dict[tuple[str, int], _Entry] = {}  # by name and visit
_native_set: set[str] = set()  # what configure() has set in the library
_native_before: dict[str, int] = {}  # the library's counts at that time: it never sets them to 0


def register(*names: str) -> None:
    """Makes names known. A module does so when it is imported."""
    _names.update(names)


def names() -> list[str]:
    """All fail points of the modules imported so far and of the C library, sorted."""
    return sorted(_names | _native_visits().keys())


def visits() -> dict[str, int]:
    """How often each fail point was passed since configure(), 0 if never; empty if they are off."""
    if not is_on:
        return {}
    native = _native_visits()
    with _lock:
        return {
            name: native.get(name, 0) + _visits[name] for name in sorted(_names | native.keys())
        }


def visit(name: str) -> str | None:
    """Passes a fail point: does what configure() asked for. "short" is left to the caller."""
    if not is_on:
        return None
    assert name in _names, f"the fail point {name} was not registered"
    with _lock:
        _visits[name] += 1
        entry = _entries.get((name, _visits[name]))
    if entry is None:
        return None
    if entry.action == "error":
        raise OSError(errno.EIO, f"fail point {name}, visit {entry.nth}")
    if entry.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if entry.action == "delay":
        time.sleep(entry.delay_ms / 1000)
    return "short" if entry.action == "short" else None


def configure(text: str | None) -> None:
    """Switches the fail points on, with these entries and all counts at 0; None switches off."""
    global is_on
    entries = [] if text is None else _parse(text)
    with _lock:
        is_on = text is not None
        _visits.clear()
        _entries.clear()
        _entries.update({(entry.name, entry.nth): entry for entry in entries})
    _configure_native(entries)


def _parse(text: str) -> list[_Entry]:
    """
    >>> _parse("a.b=error; c=delay:20@3")
    [_Entry(name='a.b', action='error', nth=1, delay_ms=0), \
_Entry(name='c', action='delay', nth=3, delay_ms=20)]
    """
    entries = []
    for item in filter(None, (item.strip() for item in text.split(";"))):
        name, _, rest = item.partition("=")
        what, _, nth = rest.partition("@")
        action, _, delay = what.partition(":")
        if (
            not name
            or action not in _ACTIONS
            or not _is_count(nth or "1", least=1)
            or (not _is_count(delay, least=0) if action == "delay" else bool(delay))
        ):
            raise ArgumentError(
                f"{item!r} is no fail point. Use name=action or name=action@n with one of the "
                "actions error, kill, delay:MILLISECONDS and short, and n from 1 on."
            )
        entries.append(_Entry(name, action, int(nth or 1), int(delay or 0)))
    return entries


def _is_count(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least


def _native(name: str) -> Any:
    """A function of the library, or None where it has no fail points."""
    return getattr(lib, name, None) if lib.sk_is_testing_build() else None


def _native_visits() -> dict[str, int]:
    """The library's own fail points and how often each was passed since configure()."""
    return {name: n - _native_before.get(name, 0) for name, n in _native_counts().items()}


def _native_counts() -> dict[str, int]:
    list_points = _native("sk_failpoint_list")
    if list_points is None:
        return {}
    buf = ffi.gc(ffi.new("sk_buf *"), lib.sk_buf_free)
    length = list_points(buf)
    assert length >= 0, "no memory for the list of fail points"
    lines = bytes(ffi.buffer(buf.data, buf.len)).decode().splitlines() if buf.len else []
    return {name: int(count) for name, count in (line.split() for line in lines)}


def _configure_native(entries: list[_Entry]) -> None:
    """Hands the library its entries. If several name the same point, the library keeps the last."""
    set_point = _native("sk_failpoint_set")
    if set_point is None:
        return
    _native_before.clear()
    _native_before.update(_native_counts())
    # Points that STATEKIT_C_FAILPOINTS has set are left alone: they are not ours.
    while _native_set:
        set_point(_native_set.pop().encode(), 0, 0, 0)
    for entry in entries:
        if entry.name in _native_before:
            set_point(entry.name.encode(), entry.nth, _ACTIONS[entry.action], entry.delay_ms)
            _native_set.add(entry.name)


if VARIABLE in os.environ:
    configure(os.environ[VARIABLE])
