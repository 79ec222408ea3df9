"""Time to live: what a state says about it, and the thread that clears away what has expired."""

import threading
import weakref
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

from statekit.errors import ArgumentError, shorten
from statekit.native import Store

Timestamp: TypeAlias = int | datetime

_SWEEP_INTERVAL_S = 1.0
SWEEP_SLOTS = 65536  # slots that one sweep looks at
_MS_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TTL:
    """How long entries live.

    after: a timedelta, or seconds. time: "processing" (the clock on the wall) or "event" (the
    watermark, see KVProvider.advance_watermark). refresh: an entry's time starts anew when it
    is written ("write"), or also when it is read ("read").
    """

    after: timedelta | float
    time: Literal["processing", "event"] = "processing"
    refresh: Literal["write", "read"] = "write"

    def __post_init__(self) -> None:
        if self.time not in ("processing", "event") or self.refresh not in ("write", "read"):
            raise ArgumentError(
                f'{self!r} is no time to live. time is "processing" or "event", '
                'refresh is "write" or "read".'
            )
        if not 1 <= self.after_ms <= _MS_MAX:
            raise ArgumentError(
                f"entries cannot live for {shorten(self.after)}. Pass a timedelta or a number of "
                "seconds, of at least a millisecond; leave ttl out if they live for ever."
            )

    @property
    def after_ms(self) -> int:
        after = self.after
        try:
            if isinstance(after, timedelta):
                return after // timedelta(milliseconds=1)
            return 0 if isinstance(after, bool) else int(after * 1000)
        except (TypeError, ValueError, OverflowError):
            return 0


def as_ttl(ttl: Any) -> TTL | None:
    """What a `ttl=` argument stands for: None, a TTL, a timedelta or seconds."""
    return ttl if ttl is None or isinstance(ttl, TTL) else TTL(ttl)


def as_ms(when: Timestamp, what: str = "a timestamp") -> int:
    """Milliseconds since 1970 of a timestamp: an int is taken as it is.

    >>> as_ms(datetime(2026, 11, 16, tzinfo=UTC))
    1794787200000
    """
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise ArgumentError(f"{when!r} has no time zone ({what}). Use an aware datetime.")
        return (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    try:
        number = int(when.__index__())
    except (AttributeError, TypeError):
        number = _MS_MAX + 1
    if not -_MS_MAX <= number <= _MS_MAX:
        raise ArgumentError(
            f"{shorten(when)} is no timestamp ({what}). Pass an int of 64 bits or a datetime."
        )
    return number


class Sweeper:
    """Clears expired entries of a store away, a part every second, until the store is gone."""

    def __init__(self, store: Store) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_sweep_until, args=(weakref.ref(store), self._stop), daemon=True
        )
        self._thread.name = "statekit-sweeper"
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def _sweep_until(store: "weakref.ref[Store]", stop: threading.Event) -> None:
    while not stop.wait(_SWEEP_INTERVAL_S):
        alive = store()
        if alive is None:
            return
        # Sweeps until one finds nothing, 64 times at most: expired entries must not pile up.
        for _ in range(64):
            if stop.is_set() or alive.sweep(SWEEP_SLOTS) == 0:
                break
        del alive
