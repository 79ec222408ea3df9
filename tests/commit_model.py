"""Commits against a plain model: what must be there now, and what after a crash.

`Model` has, per key-group, the state as it is and as it was committed, in plain dicts. `World` has
the providers: siblings on one home, one in memory, one on another home. Both do the same steps.

Homes are real ones or a `DiskHome`. In a crash it forgets any part of what was not flushed, as its
contract allows. `Faults` stands in front of any home and makes the n-th call fail.
"""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, ClassVar

import statekit as sk
from statekit.errors import HomeError
from statekit.homes import Home, HomeSnapshot, HomeUrl, open_home, register_home
from statekit.homes.home import Change, Named, Row, rows_of

GROUPS, SUBGROUPS = 4, 2
TTL_MS = 100

Entries = dict[str, dict[str, Any]]  # state -> key -> value


# ---- Homes


class DiskHome(Home):
    """Rows in a dict. Only rows that were flushed are safe."""

    places: ClassVar[dict[str, "DiskHome"]] = {}
    is_locked = True  # one process is played

    def __init__(self, is_atomic: bool) -> None:
        self.is_atomic = is_atomic
        self.rows: dict[Row, bytes] = {}
        self.safe: dict[Row, bytes] = {}
        self.unsafe: list[dict[Row, bytes | None]] = []  # since the last flush; each is one step
        self.meta: bytes | None = None
        self.lock = threading.Lock()

    @classmethod
    def open(cls, url: HomeUrl, cache_bytes: int) -> Home:
        is_atomic = url.options.pop("atomic", "0") == "1"
        url.refuse_rest()
        return cls.places.setdefault(url.place, cls(is_atomic))

    def crash(self, rng: random.Random) -> None:
        """Loses what is not safe, all or a part of it."""
        with self.lock:
            survive = rng.choice([0.0, 0.5, 1.0])
            steps: list[dict[Row, bytes | None]] = []
            for step in self.unsafe:
                if self.is_atomic:
                    steps.append(step)
                else:
                    steps += [{row: value} for row, value in step.items()]
            for step in steps:
                if rng.random() < survive:
                    _apply(self.safe, step)
            self.unsafe.clear()
            self.rows = dict(self.safe)

    def get(self, rows: Sequence[Row]) -> list[bytes | None]:
        with self.lock:
            return [self.rows.get(row) for row in rows]

    def load(self, leaf: int, state: int) -> list[tuple[bytes, bytes]]:
        with self.lock:
            return [(row[2], data) for row, data in self.rows.items() if row[:2] == (leaf, state)]

    def write(self, changes: Sequence[Change]) -> None:
        self._step(dict(changes))

    def write_rows(
        self, rows: Named, cleared: Iterable[tuple[int, int]] = (), durable: bool = False
    ) -> None:
        if not self.is_atomic:
            super().write_rows(rows, cleared, durable)
            return
        step: dict[Row, bytes | None] = {}
        for leaf, state in cleared:
            step |= {(leaf, state, key): None for key, _ in self.load(leaf, state)}
        self._step(step | rows_of(rows))
        if durable:
            self.flush()

    def _step(self, step: dict[Row, bytes | None]) -> None:
        with self.lock:
            _apply(self.rows, step)
            self.unsafe.append(step)

    def flush(self) -> None:
        with self.lock:
            for step in self.unsafe:
                _apply(self.safe, step)
            self.unsafe.clear()

    def read_meta(self) -> bytes | None:
        return self.meta

    def write_meta(self, meta: bytes, expected: bytes | None) -> bool:
        with self.lock:
            if self.meta != expected:
                return False
            self.meta = meta
            return True


def _apply(rows: dict[Row, bytes], step: dict[Row, bytes | None]) -> None:
    for row, value in step.items():
        if value is None:
            rows.pop(row, None)
        else:
            rows[row] = value


class Crash(BaseException):
    """The process ends here: nobody handles it."""


#: What happens to the n-th call: it fails before it has done anything, in the middle, or
#: afterwards; it is done and a signal comes; the process ends before it, in the middle of it, or
#: after it.
KINDS = ("error", "torn", "late", "interrupt", "crash", "crash-torn", "crash-late")


class Faults:
    """Counts the calls of homes, and makes one of them go wrong."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.nth = 0  # 0: none
        self.kind = ""
        self.is_on = False
        self.is_dead = False  # after a crash nothing reaches the home any more

    def arm(self, nth: int, kind: str) -> None:
        self.calls.clear()
        self.nth, self.kind, self.is_on, self.is_dead = nth, kind, True, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        was_on, self.is_on = self.is_on, False
        yield
        self.is_on = was_on

    def begin(self, name: str) -> bool:
        """Whether this is the call that goes wrong. Raises if it is not to happen at all."""
        if self.is_dead:
            raise Crash
        if not self.is_on:
            return False
        self.calls.append(name)
        if len(self.calls) != self.nth:
            return False
        if self.kind == "error":
            raise HomeError(f"{name} fails, as the test wants.")
        if self.kind == "crash":
            self.die()
        return True

    def end(self, name: str) -> None:
        """For a call that goes wrong after it was done, or half done."""
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind.startswith("crash"):
            self.die()
        raise HomeError(f"{name} fails when it is done, as the test wants.")

    def die(self) -> None:
        self.is_dead = True
        raise Crash


class FaultyHome(Home):
    """A home whose calls may go wrong."""

    places: ClassVar[dict[str, tuple[str, Faults]]] = {}  # name -> URL of the home behind, faults

    def __init__(self, inner: Home, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    @classmethod
    def open(cls, url: HomeUrl, cache_bytes: int) -> Home:
        behind, faults = cls.places[url.place]
        url.refuse_rest()
        return cls(open_home(HomeUrl.parse(behind), cache_bytes), faults)

    @property
    def is_atomic(self) -> bool:  # type: ignore[override]
        return self.inner.is_atomic

    @property
    def is_locked(self) -> bool:  # type: ignore[override]
        return self.inner.is_locked

    def _call(self, name: str, *args: Any, half: Callable[[], None] | None = None) -> Any:
        faults = self.faults
        is_it = faults.begin(name)
        if is_it and faults.kind.endswith("torn"):
            if half is not None and not self.is_atomic:
                half()
            faults.end(name)
        answer = getattr(self.inner, name)(*args)
        if is_it:
            faults.end(name)
        return answer

    def get(self, rows: Sequence[Row]) -> Any:
        return self._call("get", rows)

    def load(self, leaf: int, state: int) -> Iterator[tuple[bytes, bytes]]:
        is_it = self.faults.begin("load")
        found = [*self.inner.load(leaf, state)]
        if is_it and self.faults.kind.endswith("torn"):
            yield from found[: len(found) // 2]
        elif not is_it:
            yield from found
        if is_it:
            self.faults.end("load")

    def write(self, changes: Sequence[Change]) -> None:
        self._call("write", changes, half=lambda: self.inner.write(changes[::2]))

    def write_rows(
        self, rows: Named, cleared: Iterable[tuple[int, int]] = (), durable: bool = False
    ) -> None:
        if self.is_atomic:
            self._call("write_rows", rows, [*cleared], durable)
        else:
            super().write_rows(rows, cleared, durable)

    def clear(self, leaf: int, state: int) -> None:
        def half() -> None:
            some = [*self.inner.load(leaf, state)][::2]
            self.inner.write([((leaf, state, key), None) for key, _ in some])

        self._call("clear", leaf, state, half=half)

    def clear_leaves(self, leaves: range, states: int) -> None:
        half = range(leaves.start, leaves.start + len(leaves) // 2)
        self._call(
            "clear_leaves", leaves, states, half=lambda: self.inner.clear_leaves(half, states)
        )

    def snapshot(self) -> HomeSnapshot | None:
        found: HomeSnapshot | None = self._call("snapshot")
        return found

    def flush(self) -> None:
        self._call("flush")

    def read_meta(self) -> bytes | None:
        return self.inner.read_meta()

    def write_meta(self, meta: bytes, expected: bytes | None) -> bool:
        if self.faults.is_dead:
            raise Crash
        return self.inner.write_meta(meta, expected)

    def close(self) -> None:
        self.inner.close()


register_home("disk", DiskHome.open)
register_home("faulty", FaultyHome.open)


# ---- The model


DECLARE: dict[str, Callable[[sk.KVProvider], Any]] = {
    "counts": lambda kv: kv.value("counts", int, default=0),
    "texts": lambda kv: kv.value("texts", str),
    "lists": lambda kv: kv.list("lists", int),
    "maps": lambda kv: kv.map("maps", str, int),
    "sets": lambda kv: kv.state("sets", set[str]),
    "deep": lambda kv: kv.state("deep", dict[str, list[int]]),
    "fresh": lambda kv: kv.value("fresh", int, ttl=sk.TTL(TTL_MS / 1000, time="event")),
    "timers": lambda kv: kv.timers("timers"),
}
STATES = tuple(DECLARE)


def declare(kv: sk.KVProvider, states: Iterable[str] = STATES) -> None:
    for name in states:
        DECLARE[name](kv)


PLAIN: dict[str, Callable[[Any], Any]] = {"lists": list, "maps": dict, "timers": tuple, "sets": set}


def read(kv: sk.KVProvider, states: Iterable[str] = STATES) -> Entries:
    """All that a provider holds, as plain values."""
    found = empty()
    for name in states:
        if name not in kv:
            continue
        plain = PLAIN.get(name, lambda value: value)
        if name == "deep":
            found[name] = {
                key: {field: list(items) for field, items in value.items()}
                for key, value in kv[name].items()
            }
        else:
            found[name] = {key: plain(value) for key, value in kv[name].items()}
    return found


def empty() -> Entries:
    return {name: {} for name in STATES}


class Kept:
    """A key-group as it was committed."""

    def __init__(self, entries: Entries | None = None, position: Any = None) -> None:
        self.entries = empty() if entries is None else deepcopy(entries)
        self.position = position  # None: committed without a position, or never


class Model:
    """What must be there. Entries of "fresh" are pairs: value, time of the write."""

    def __init__(self) -> None:
        self.now = [empty() for _ in range(GROUPS)]
        self.kept: dict[str, dict[int, Kept]] = {}  # by the name of the home
        self.watermark = 1000

    def kept_of(self, home: str, group: int) -> Kept:
        return self.kept.setdefault(home, {}).setdefault(group, Kept())

    def commit(self, home: str, groups: Iterable[int], position: Any) -> None:
        for group in groups:
            self.kept.setdefault(home, {})[group] = Kept(self.now[group], position)

    def flush(self, home: str, groups: Iterable[int]) -> None:
        for group in groups:
            self.commit(home, [group], self.kept_of(home, group).position)

    def rollback(self, home: str, groups: Iterable[int]) -> None:
        for group in groups:
            self.now[group] = deepcopy(self.kept_of(home, group).entries)

    def seen(self, groups: Iterable[int], entries: Callable[[int], Entries]) -> Entries:
        """What a reader sees of key-groups."""
        found = empty()
        for group in groups:
            for name, keys in entries(group).items():
                for key, value in keys.items():
                    if name == "fresh":
                        value, stamp = value
                        if stamp + TTL_MS <= self.watermark:
                            continue
                    found[name][key] = deepcopy(value)
        return found

    def seen_now(self, groups: Iterable[int]) -> Entries:
        return self.seen(groups, lambda group: self.now[group])

    def seen_kept(self, home: str, groups: Iterable[int]) -> Entries:
        return self.seen(groups, lambda group: self.kept_of(home, group).entries)


def groups_of(kv: sk.KVProvider) -> list[int]:
    return [group for part in kv.key_groups for group in part]


def spill(kv: sk.KVProvider, is_all: bool = True) -> None:
    """Sends home what is in memory, ahead of the commit, and drops it."""
    residence = kv._residence
    if residence.ledger is None:
        return
    with residence._lock:
        residence._hand = 0
        residence._write_back(1 << 62 if is_all else 2000, cold=False)
        residence._evict(1 << 62)
        residence._evict(1 << 62)  # entries that were used lately are dropped at the second pass


def pending_rows(kv: sk.KVProvider) -> int:
    """How many rows have gone home ahead of the commit."""
    ledger = kv._residence.ledger
    assert ledger is not None
    return sum(1 for leaf in ledger._since for _ in ledger._pending(leaf))


def check_now(kv: sk.KVProvider, model: Model) -> None:
    check_equal(read(kv), model.seen_now(groups_of(kv)))


def check_equal(found: Entries, expected: Entries) -> None:
    """Like `assert found == expected`, but says only what differs."""
    wrong = [
        f"{name}[{key!r}] is {_short(found[name], key)}, expected {_short(expected[name], key)}"
        for name in expected
        for key in sorted({*found[name], *expected[name]})
        if found[name].get(key) != expected[name].get(key)
    ]
    assert not wrong, "; ".join(wrong[:5])


def _short(entries: dict[str, Any], key: str) -> str:
    return repr(entries[key])[:60] if key in entries else "missing"


def check_position(kv: sk.KVProvider, model: Model, home: str) -> None:
    """`positions` has what the key-groups were committed with, and each key-group once."""
    found: dict[int, Any] = {}
    for ranges, position in kv.positions:
        for group in (group for part in ranges for group in part):
            assert group not in found
            found[group] = position
    kept = {group: model.kept_of(home, group).position for group in groups_of(kv)}
    assert found == {group: position for group, position in kept.items() if position is not None}
