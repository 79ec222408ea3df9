"""Timers: per key, in event time, in order, each fired once. They live in the key's leaf."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from statekit.errors import ArgumentError, StateKitError, shorten, where
from statekit.native.timers import TimersState as RawTimers
from statekit.native.ttl import Timestamp, as_ms
from statekit.residence.residence import Residence
from statekit.schema import StateSchema
from statekit.state.keyed import KeyedState

_FIRST, _LAST = -(2**63), 2**63 - 1
_LOOKS_MAX = 5  # for the next timer, at leaves that are still handed over


class Timer(NamedTuple):
    """A timer that was due."""

    due: int
    key: Any


class TimersState(KeyedState[tuple[int, ...]]):
    """Any number of timers under each key. Setting one twice is the same as setting it once.

    Times are ints (milliseconds since 1970, or whatever your watermarks count in) or aware
    datetimes. All timers are kept in memory, wherever the home is: a timer that is due must be
    found at once.

    >>> import statekit as sk
    >>> timers = sk.open("memory:").timers("expiry")
    >>> timers.set("alice", 300); timers.set("bob", 100); timers.set("alice", 300)
    >>> timers["alice"], timers.next_due
    ((300,), 100)
    >>> timers.pop_due(200)
    [Timer(due=100, key='bob')]
    >>> timers.pop_due(300), timers.pop_due(300)
    ([Timer(due=300, key='alice')], [])
    """

    __slots__ = ()
    _raw: RawTimers

    def __init__(self, raw: Any, residence: Residence, schema: StateSchema) -> None:
        super().__init__(raw, residence, schema, None)

    def set(self, key: Any, due: Timestamp) -> None:
        """Sets a timer. One that is set for this key and time already stays as it is."""
        self._when_here(self._raw.set, key, as_ms(due, "due time"))

    def move(self, key: Any, due: Timestamp) -> None:
        """Cancels the key's timers and sets this one: for the end of a session that goes on."""
        at = as_ms(due, "due time")
        self.set(key, at)
        for other in self[key]:
            if other != at:
                self.cancel(key, other)

    def cancel(self, key: Any, due: Timestamp | None = None) -> bool:
        """Cancels one timer, or all of a key; True if there was one."""
        if due is None:
            return self.discard(key)
        return self._when_here(self._raw.cancel, key, as_ms(due, "due time"))

    def __getitem__(self, key: Any) -> tuple[int, ...]:
        """The due times of a key, in order; empty if it has none."""
        return self._when_here(self._raw.get, key)

    def get(self, key: Any) -> tuple[int, ...]:
        return self[key]

    def pop_due(self, watermark: Timestamp, limit: int | None = None) -> list[Timer]:
        """Takes out the timers that are due at the watermark, ordered by time, then by key.

        Each timer is given to one caller, once. limit: take at most this many, the first ones.
        """
        at = as_ms(watermark, "watermark")
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise ArgumentError(
                f"limit={shorten(limit)} is no number of timers{where(self.name)}. "
                "Pass an int, 0 or more, or leave it out."
            )
        self._residence.bring_timers(at)
        if limit is None:
            return [Timer(due, key) for due, key in self._raw.due(at)]
        taken: list[Timer] = []
        for due, key in self._raw.due(at, peek=True):
            if len(taken) >= limit:
                break
            try:
                is_ours = self.cancel(key, due)  # False: another caller has it
            except StateKitError:
                # The key may have moved away. Timers that were taken must be delivered: they will
                # not come again.
                if not taken:
                    raise
                break
            if is_ours:
                taken.append(Timer(due, key))
        return taken

    @property
    def next_due(self) -> int | None:
        """When the next timer is due; None if there is none."""
        residence = self._residence
        residence.bring_timers(_FIRST)  # those of which nothing is known
        for look in range(_LOOKS_MAX):
            elsewhere = residence.next_due_elsewhere  # first: a leaf may come between the two
            due = self._raw.next_due
            if elsewhere is None or (due is not None and due <= elsewhere):
                break
            # What is due elsewhere may be of other states: in the end, all leaves are looked into.
            residence.bring_timers(elsewhere if look < _LOOKS_MAX - 1 else _LAST)
        else:
            due = self._raw.next_due
        if due is None and self:  # by a scan: the store's count may include leaves handed over
            return _LAST  # due at the end of time, the number by which C says "none"
        return due

    def _decoded(self, stored: Any) -> tuple[int, ...]:
        return self._raw.decode(stored)

    def _bind(self, key: Any) -> "KeyedTimers":
        return KeyedTimers(self, key)

    def __len__(self) -> int:
        """The number of keys that have timers."""
        return super().__len__()

    def all(self) -> Iterator[Timer]:
        """All timers, in no order."""
        return (Timer(due, key) for key, dues in self.items() for due in dues)


class KeyedTimers:
    """Timers under one key."""

    __slots__ = ("_key", "_state")

    def __init__(self, state: TimersState, key: Any) -> None:
        self._state = state
        self._key = key

    def set(self, due: Timestamp) -> None:
        self._state.set(self._key, due)

    def move(self, due: Timestamp) -> None:
        self._state.move(self._key, due)

    def cancel(self, due: Timestamp | None = None) -> bool:
        return self._state.cancel(self._key, due)

    def get(self) -> tuple[int, ...]:
        return self._state[self._key]

    def __repr__(self) -> str:
        return f"<{self._state.name!r} of {shorten(self._key)}: {shorten(self.get())}>"
