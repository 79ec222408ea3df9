"""Sessions: clicks of a user belong together until the user is silent for a while, in event time.

Clicks arrive out of order, by up to DISORDER_MS, so the watermark stays that far behind the latest
click. A user may therefore have several open sessions, and a click that comes late may join two of
them. Each session has a timer at the moment from which on it can no longer grow. When the watermark
reaches that moment, the session is over and is given out. Sorting the whole stream says whether it
is right.

    python examples/sessions.py
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import statekit as sk

SEED = 3
USERS, CLICKS = 200, 8_000
SPAN_MS = 3_600_000  # an hour
GAP_MS = 60_000  # a session is over after a silence of a minute
DISORDER_MS = 90_000
WATERMARK_EVERY = 50  # clicks


@dataclass
class Session:
    start: int
    last: int
    clicks: int


def arrivals() -> list[tuple[str, int]]:
    """Clicks (user, time) in the order in which they arrive."""
    rng = random.Random(SEED)
    clicks = [(f"user-{rng.randrange(USERS)}", rng.randrange(SPAN_MS)) for _ in range(CLICKS)]
    return sorted(clicks, key=lambda click: click[1] + rng.randrange(DISORDER_MS))


class Sessions:
    """The operator: process() for a click, advance() for a watermark."""

    def __init__(self, kv: sk.KVProvider, emit: Callable[[str, Session], None]) -> None:
        self.kv = kv
        self.emit = emit
        self.open = kv.list("open", Session)  # a user's sessions that are not over yet
        self.ends = kv.timers("ends")  # one timer for each of them

    def process(self, user: str, at: int) -> None:
        joined = Session(at, at, 1)
        others = []
        for session in self.open[user]:
            if session.start - GAP_MS < at < session.last + GAP_MS:
                self.ends.cancel(user, session.last + GAP_MS)
                joined.start = min(joined.start, session.start)
                joined.last = max(joined.last, session.last)
                joined.clicks += session.clicks
            else:
                others.append(session)
        self.open[user] = [*others, joined]
        self.ends.set(user, joined.last + GAP_MS)

    def on_timer(self, user: str, due: int) -> None:
        sessions = self.open[user].copy()
        over = [session for session in sessions if session.last + GAP_MS == due]
        rest = [session for session in sessions if session.last + GAP_MS != due]
        for session in over:
            self.emit(user, session)
        if rest:
            self.open[user] = rest
        else:
            del self.open[user]  # nothing stays behind for a user who has left

    def advance(self, watermark: int) -> None:
        for timer in self.ends.pop_due(watermark):
            self.on_timer(timer.key, timer.due)


def brute_force(clicks: Iterable[tuple[str, int]]) -> list[tuple[str, int, int, int]]:
    """All sessions, from the sorted stream."""
    times = defaultdict(list)
    for user, at in clicks:
        times[user].append(at)
    found = []
    for user, all_times in times.items():
        ordered = sorted(all_times)
        start, clicked = ordered[0], 0
        for before, at in zip([ordered[0], *ordered], ordered, strict=False):
            if at - before >= GAP_MS:
                found.append((user, start, before, clicked))
                start, clicked = at, 0
            clicked += 1
        found.append((user, start, ordered[-1], clicked))
    return sorted(found)


def main() -> None:
    stream = arrivals()
    kv = sk.open("memory:")
    found: list[tuple[str, int, int, int]] = []
    operator = Sessions(kv, lambda user, s: found.append((user, s.start, s.last, s.clicks)))
    latest = early = 0
    for number, (user, at) in enumerate(stream, 1):
        early += at < latest
        latest = max(latest, at)
        operator.process(user, at)
        if number % WATERMARK_EVERY == 0:
            operator.advance(latest - DISORDER_MS)
        if number == len(stream) // 2:
            print(f"half-way: {len(found):,} sessions are over, {len(operator.open)} users active")
    operator.advance(latest + GAP_MS)  # the stream has ended
    left = len(operator.open) + len(operator.ends)
    kv.close()

    print(f"{len(stream):,} clicks, {early:,} of them out of order: {len(found):,} sessions")
    is_in_order = all(a[2] <= b[2] for a, b in pairwise(found))
    if sorted(found) != brute_force(stream) or not is_in_order or left:
        raise SystemExit(f"the sessions are wrong (seed {SEED})")
    print("they are those of the sorted stream, came in order of their end and left nothing behind")


if __name__ == "__main__":
    main()
