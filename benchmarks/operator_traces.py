"""What streaming operators do to their state: accesses made by models of four operators.

Each model is an endless iterator of accesses (operation, key, value), in the order in which the
operator makes them. Time is the number of records so far. `span` is how many records a window, an
interval of a join or the gap of a session lasts; live state is of that order. Keys are new all the
time, and are deleted when their time has passed. All values have 64 bytes.

    window aggregate   tumbling windows, one aggregate for each user and window: get and put for a
                       record; get and delete when the window has passed
    window records     the same windows, but the records are kept: append for a record; read the
                       list and delete it when the window has passed
    session            one aggregate for each user: get and put for a record. A timer looks whether
                       the session is over: get, and then delete
    join               orders and payments of one key within an interval: put into one side and get
                       from the other; delete both when the interval has passed

Keys are str objects of their own in each access, as keys that come from outside are.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from random import Random

GET, PUT, DELETE, APPEND, ITEMS, DROP = range(6)  # the last three are about lists
VALUE_BYTES = 64

Access = tuple[int, str, bytes]
Trace = Iterator[Access]

_NONE = b""
_VALUES = [Random(i).randbytes(VALUE_BYTES) for i in range(256)]


def window_aggregate(span: int) -> Trace:
    for at, (user, window, is_over) in enumerate(_windows(span)):
        yield GET, f"{user:08d}@{window:06d}", _NONE
        if is_over:
            yield DELETE, f"{user:08d}@{window:06d}", _NONE
        else:
            yield PUT, f"{user:08d}@{window:06d}", _VALUES[at & 255]


def window_records(span: int) -> Trace:
    for at, (user, window, is_over) in enumerate(_windows(span)):
        if is_over:
            yield ITEMS, f"{user:08d}@{window:06d}", _NONE
            yield DROP, f"{user:08d}@{window:06d}", _NONE
        else:
            yield APPEND, f"{user:08d}@{window:06d}", _VALUES[at & 255]


def _windows(span: int) -> Iterator[tuple[int, int, bool]]:
    """User and window of each record; once more, with True, when the window is over. Records are
    late by up to a tenth of a window, so two windows are live for a while."""
    random = Random(1)
    users = max(span // 2, 1)
    late = max(span // 10, 1)
    live: dict[int, dict[int, None]] = {}
    time = 0
    while True:
        window = max(time - random.randrange(late), 0) // span
        user = int(users * random.random() ** 2)  # some users have more records than others
        live.setdefault(window, {})[user] = None
        yield user, window, False
        time += 1
        over = (time - late) // span - 1
        for user in live.pop(over, ()):
            yield user, over, True


def session(span: int) -> Trace:
    random = Random(2)
    timers: list[tuple[int, int]] = []  # when to look, and at which user
    last: dict[int, int] = {}  # when the user was last seen
    active: list[int] = []
    next_user = time = 0
    while True:
        # Every fourth record is of a user who was never seen before.
        if not active or random.random() < 0.25:
            user, next_user = next_user, next_user + 1
            active.append(user)
        else:
            user = active[random.randrange(len(active))]
        yield GET, f"user-{user:09d}", _NONE
        yield PUT, f"user-{user:09d}", _VALUES[time & 255]
        if user not in last:
            heapq.heappush(timers, (time + span, user))
        last[user] = time
        if len(active) > span // 4:  # one who does not come back
            at = random.randrange(len(active))
            active[at] = active[-1]
            active.pop()
        while timers and timers[0][0] <= time:
            _, user = heapq.heappop(timers)
            yield GET, f"user-{user:09d}", _NONE
            if last[user] + span <= time:
                del last[user]
                yield DELETE, f"user-{user:09d}", _NONE
            else:
                heapq.heappush(timers, (last[user] + span, user))
        time += 1


def join(span: int) -> Trace:
    random = Random(3)
    coming: list[tuple[int, int, int]] = []  # when which order is paid
    live: deque[tuple[int, int]] = deque()  # until when which order is kept
    order = time = 0
    while True:
        if coming and coming[0][0] <= time:
            _, number, value = heapq.heappop(coming)
            yield PUT, f"paid-{number:09d}", _VALUES[value]
            yield GET, f"order-{number:09d}", _NONE
        else:
            yield PUT, f"order-{order:09d}", _VALUES[order & 255]
            yield GET, f"paid-{order:09d}", _NONE
            if random.random() < 0.9:  # the others are never paid
                delay = int(random.random() ** 3 * span * 0.9)
                heapq.heappush(coming, (time + delay, order, time & 255))
            live.append((time + span, order))
            order += 1
        while live and live[0][0] <= time:
            _, number = live.popleft()
            yield DELETE, f"order-{number:09d}", _NONE
            yield DELETE, f"paid-{number:09d}", _NONE
        time += 1


MODELS: dict[str, Callable[[int], Trace]] = {
    "window aggregate": window_aggregate,
    "window records": window_records,
    "session": session,
    "join": join,
}
