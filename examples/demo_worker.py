"""A worker of demo.py: a small engine, which counts records and never waits for state.

Records whose state is not here yet are parked, and their keys are prefetched; the others go on.
Records of key-groups that were handed over are forwarded to the worker that has them now. Records
of one key are always counted in their order:

    parked     a record is also parked while an earlier record of its key is; those that can go on
               do so in the order in which they came
    strays     records that came to the old owner. It forwards them through one pipe, and a marker
               after the last of them. Until the marker has come, the new owner holds back records
               that come to it directly
"""

import threading
from collections import deque
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from time import monotonic, sleep
from typing import Any

import numpy as np

import statekit as sk

IDLE_S = 0.0005
LOOK_SHARE = 10  # a tenth of the time, at most, goes into looking at parked records
FETCHES_MAX = 2  # prefetches on their way
GROUPS, SUBGROUPS = 128, 16

Records = tuple[np.ndarray, np.ndarray]  # their numbers in the stream, their keys
NONE = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def run(keys: int, token: str, driver: Connection, other: Connection) -> None:
    """The process. driver: says what to do and sends records. other: the pipe for strays, both
    ways.

    token: by it the workers know each other.
    """
    Worker(keys, token, driver, other).run()


class Worker:
    def __init__(self, keys: int, token: str, driver: Connection, other: Connection) -> None:
        self.token, self.driver, self.other = token, driver, other
        self.inbox: deque[tuple[Any, ...]] = deque()
        self.kv = sk.open("memory:", subgroups=SUBGROUPS, owned=())
        self.group_of = np.asarray(self.kv.key_groups_of(np.arange(keys), key=int)).astype(np.int64)
        self.reset()

    def reset(self) -> None:
        self.counts = self.kv.value("counts", int, default=0, key=int)
        self.log: list[tuple[np.ndarray, float]] = []  # what was counted, and when
        self.look_at = 0.0
        self.parked: Records = NONE
        self.unasked = NONE[1]  # keys of parked records that were not prefetched
        self.held: list[Records] = []
        self.held_groups = np.zeros(GROUPS, dtype=bool)
        self.fetches: list[Future[None]] = []
        self.migration: sk.Arrival | None = None
        self.checkpoint_job: tuple[sk.CheckpointJob, int] | None = None

    def run(self) -> None:
        threading.Thread(target=self.receive, daemon=True).start()
        while True:
            if self.inbox:
                name, *args = self.inbox.popleft()
                if name == "end":
                    return
                getattr(self, f"on_{name}")(*args)
            else:
                sleep(IDLE_S)
            self.do_chores()

    def receive(self) -> None:
        """Takes in what comes while the worker is busy, as the buffers of a network would."""
        open_ends = [self.driver, self.other]
        while open_ends:
            for end in wait(open_ends):
                try:
                    self.inbox.append(end.recv())
                except (EOFError, OSError):
                    open_ends.remove(end)
                    if end is self.driver:
                        self.inbox.append(("end",))
                        return

    # ---- Records

    def on_records(self, numbers: np.ndarray, keys: np.ndarray) -> None:
        """Records from the driver."""
        if self.held_groups.any():
            is_held = self.held_groups[self.group_of[keys]]
            self.held.append((numbers[is_held], keys[is_held]))
            numbers, keys = numbers[~is_held], keys[~is_held]
        self.take(numbers, keys)

    def on_strays(self, numbers: np.ndarray, keys: np.ndarray) -> None:
        """Records that came to the old owner after the hand-over."""
        self.take(numbers, keys)

    def on_marker(self) -> None:
        """There are no more strays."""
        self.held_groups[:] = False
        for records in self.held:
            self.take(*records)
        self.held = []

    def take(self, numbers: np.ndarray, keys: np.ndarray) -> None:
        """Counts records, or parks or forwards them."""
        mine = np.zeros(GROUPS, dtype=bool)
        for part in self.kv.key_groups:
            mine[part.start : part.stop] = True
        is_mine = mine[self.group_of[keys]]
        if not is_mine.all():
            self.forward(numbers[~is_mine], keys[~is_mine])
            numbers, keys = numbers[is_mine], keys[is_mine]
        is_here = self.is_here(keys)
        if len(self.parked[1]):
            is_here &= ~np.isin(keys, self.parked[1])
        if not is_here.all():
            self.park(numbers[~is_here], keys[~is_here])
            numbers, keys = numbers[is_here], keys[is_here]
        self.count(numbers, keys)

    def is_here(self, keys: np.ndarray) -> np.ndarray:
        """For each key: whether its count is in this process."""
        found = np.ones(len(keys), dtype=bool)
        found[np.asarray(self.kv.absent(keys, key=int), dtype=np.int64)] = False
        return found

    def count(self, numbers: np.ndarray, keys: np.ndarray) -> None:
        """One call for each record, as an engine does that calls a function of its user."""
        add, done = self.counts.add, 0
        try:
            for key in keys.tolist():
                add(key, 1)
                done += 1
        except sk.errors.NotOwnedError:  # it was handed over just now
            self.log.append((numbers[:done], monotonic()))
            sleep(IDLE_S)  # kv.key_groups shows it a moment later
            self.take(numbers[done:], keys[done:])
            return
        if done:
            self.log.append((numbers, monotonic()))

    def forward(self, numbers: np.ndarray, keys: np.ndarray) -> None:
        self.other.send(("strays", numbers, keys))

    def park(self, numbers: np.ndarray, keys: np.ndarray) -> None:
        before = self.parked
        self.parked = np.concatenate((before[0], numbers)), np.concatenate((before[1], keys))
        self.unasked = np.concatenate((self.unasked, keys))

    def look(self) -> None:
        """Counts the parked records whose state has come."""
        numbers, keys = self.parked
        ready = self.is_here(keys)
        self.parked = numbers[~ready], keys[~ready]
        self.count(numbers[ready], keys[ready])

    def do_chores(self) -> None:
        came = [fetch for fetch in self.fetches if fetch.done()]
        for fetch in came:
            fetch.result()
            self.fetches.remove(fetch)
        now = monotonic()
        if len(self.parked[1]) and (came or now >= self.look_at):
            self.look()
            self.look_at = monotonic() + LOOK_SHARE * (monotonic() - now)
        if len(self.unasked) and len(self.fetches) < FETCHES_MAX:
            self.fetches.append(self.kv.prefetch(self.unasked, key=int))
            self.unasked = NONE[1]
        if self.migration is not None and self.migration.done:
            self.driver.send(("here", monotonic(), self.migration.progress))
            self.migration = None
        if self.checkpoint_job is not None and self.checkpoint_job[0].done:
            made, offset = self.checkpoint_job[0].wait(), self.checkpoint_job[1]
            self.driver.send(("checkpointed", made.number, made.new_bytes, offset))
            self.checkpoint_job = None

    # ---- What the driver says

    def on_fill(self, keys: int) -> None:
        """Starts anew, with a count of 0 for each key, or with nothing. Tells its address."""
        self.kv.close()
        self.kv = sk.open("memory:", subgroups=SUBGROUPS, owned=None if keys else ())
        self.reset()
        if keys:
            every = np.arange(keys)
            self.counts.put_many(every, np.zeros_like(every))
        self.driver.send(("filled", self.kv.serve(token=self.token).address))

    def on_measure(self, numbers: np.ndarray, keys: np.ndarray) -> None:
        """How many records per second this loop can do."""
        began = monotonic()
        for at in range(0, len(keys), 256):
            self.take(numbers[at : at + 256], keys[at : at + 256])
        self.driver.send(("measured", len(keys) / (monotonic() - began)))

    def on_take_over(self, address: str, groups: range, strategy: str) -> None:
        """Takes key-groups over from the other worker. Their records may come from now on."""
        self.migration = self.kv.fetch_from(
            address, key_groups=groups, strategy=strategy, token=self.token
        )
        self.held_groups[groups.start : groups.stop] = True
        self.driver.send(("took", monotonic()))

    def on_switch(self) -> None:
        """Records of what was handed over go to its new owner from now on."""
        self.other.send(("marker",))

    def on_stop(self, place: str) -> None:
        """Writes a checkpoint of everything."""
        self.kv.checkpoint(place)
        self.driver.send(("stopped", monotonic()))

    def on_checkpoint(self, place: str, offset: int) -> None:
        """Takes a checkpoint while counting goes on. offset: the next record, for a replay."""
        assert not len(self.parked[0])
        job = self.kv.checkpoint_async(place, metadata={"offset": offset})
        self.checkpoint_job = job, offset

    def on_restore(self, place: str, groups: range, lazy: bool) -> None:
        began = monotonic()
        log = self.log
        self.kv.close()
        self.kv = sk.restore(place, key_groups=groups, lazy=lazy)
        self.reset()
        self.log = log
        self.driver.send(("restored", monotonic(), monotonic() - began))

    def on_report(self) -> None:
        """Reports what was counted, and when, and all counts."""
        if len(self.parked[0]) or self.held:  # not yet
            self.inbox.append(("report",))
            return
        numbers = np.concatenate([part for part, _ in self.log] or [NONE[0]])
        times = np.repeat([at for _, at in self.log], [len(part) for part, _ in self.log])
        owned = [np.arange(part.start, part.stop) for part in self.kv.key_groups]
        keys = np.flatnonzero(np.isin(self.group_of, np.concatenate(owned)))
        counts = np.asarray(self.counts.get_many(keys).to_numpy())
        self.driver.send(("report", numbers, times, keys, counts))
