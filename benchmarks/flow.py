"""Records that flow while key-groups are handed over: a generator and two workers, each a process.

    generator   has a record every 1/rate seconds, says when it is due, and routes it by a table:
                which worker has which key-group. It never waits for a worker
    workers     count records, batch by batch as they come. Records of key-groups that a worker has
                handed over it forwards to the other one; there, those that come before their
                key-groups are kept until then, and those whose state is not here yet are parked,
                and their keys prefetched
    memory      what both sides know is in files that all processes map (Tape): the key of each
                record, its key-group, and when it was counted. A record that was never counted is
                seen, and so is one that was counted twice (the counts are compared afterwards)

Records go over Unix sockets, as numbers of records; state goes between the workers by gRPC. A
record's wait is the time at which it was counted less the time at which it was due. All processes
of a machine share the monotonic clock.
"""

import gc
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
from migration_worker import KEY_GROUPS, fill

import statekit as sk
from statekit.errors import NotOwnedError

MOVING = range(len(KEY_GROUPS) // 2, len(KEY_GROUPS))  # the key-groups that are handed over
STAYING = range(len(KEY_GROUPS) // 2)
RECORDS_DRAWN = 1 << 23  # then they come again from the first
TICK_S = 0.001  # of the generator
PACKET_RECORDS = 8192
STEP_RECORDS = 8192  # that a worker takes on at once, about
SOCKET_BYTES = 4 << 20
TOKEN = "that-of-a-benchmark"
IDLE_S, WATCH_S = 0.02, 0.0005  # that a worker waits for records; the same while some are parked
LOOK_SHARE = 10  # a worker spends a tenth of its time, at most, on looking at parked records
FETCHES_MAX = 2  # prefetches of a worker on their way
END = b"\xff\xff\xff\xff"  # the last packet of a channel

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class Flow:
    """What flows: the same records for the same seed."""

    folder: str  # of the files and sockets that the processes share
    keys: int
    rate: float  # records per second
    seconds_max: float

    @property
    def records_max(self) -> int:
        return int(self.rate * self.seconds_max)


class Tape:
    """The files of a Flow."""

    def __init__(self, flow: Flow, mode: Any = "r+") -> None:
        folder = Path(flow.folder)
        drawn = min(RECORDS_DRAWN, flow.records_max)
        self.keys = np.memmap(folder / "keys", np.int64, mode, shape=(drawn,))
        self.groups = np.memmap(folder / "groups", np.uint8, mode, shape=(drawn,))
        self.done = np.memmap(folder / "done", np.float64, mode, shape=(flow.records_max,))

    @classmethod
    def draw(cls, flow: Flow, seed: int) -> "Tape":
        """Makes the files: keys by Zipf 1.0, nothing counted."""
        tape = cls(flow, "w+")
        tape.keys[:] = zipf(flow.keys, len(tape.keys), np.random.default_rng(seed))
        with sk.open("memory:") as kv:
            tape.groups[:] = kv.key_groups_of(np.asarray(tape.keys), key=int)
        return tape

    def keys_of(self, numbers: np.ndarray) -> np.ndarray:
        return np.asarray(self.keys[numbers % len(self.keys)])

    def groups_of(self, numbers: np.ndarray) -> np.ndarray:
        return np.asarray(self.groups[numbers % len(self.groups)])


def zipf(keys: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """n draws of 0..keys-1, k with a probability of 1 / (k + 1), by rejection.

    Without a table: one of some ten million keys takes a second for each million draws.
    """
    found: list[np.ndarray] = []
    missing = n
    while missing > 0:
        # The whole part x of (keys + 1) ** u comes with ln(1 + 1/x), up to a factor.
        x = np.floor((keys + 1) ** rng.random(2 * missing)).clip(1, keys)
        is_taken = rng.random(len(x)) * x * np.log1p(1 / x) < np.log(2)
        found.append(x[is_taken][:missing].astype(np.int64) - 1)
        missing -= len(found[-1])
    return np.concatenate(found)


def _connect(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    made.connect(str(path))
    return made


def _listen(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    made.bind(str(path))
    made.listen()
    return made


class _Out:
    """A channel that never makes its writer wait."""

    def __init__(self, path: Path) -> None:
        self._socket = _connect(path)
        self._socket.setblocking(False)
        self._packets: deque[bytes] = deque()

    def put(self, numbers: np.ndarray) -> None:
        for at in range(0, len(numbers), PACKET_RECORDS):
            self._packets.append(numbers[at : at + PACKET_RECORDS].tobytes())
        self.push()

    def push(self) -> None:
        """Sends what goes."""
        try:
            while self._packets:
                self._socket.send(self._packets[0])
                self._packets.popleft()
        except BlockingIOError:  # the reader is behind
            return

    @property
    def is_behind(self) -> bool:
        return bool(self._packets)

    def end(self) -> None:
        self._packets.append(END)
        self._socket.setblocking(True)
        self.push()
        self._socket.close()


class Generator:
    """Has records, and sends each to the worker that its table names."""

    def prepare(self, flow: Flow, seed: int) -> None:
        """Draws the records. Before anything else is prepared: the others map what it makes."""
        self._folder = Path(flow.folder)
        self._flow = flow
        self._tape = Tape.draw(flow, seed)
        self._routes = _listen(self._folder / "routes")

    def start(self, workers: Sequence[str], began: float) -> None:
        """workers: names; all key-groups are the first one's. began: when a record is first due."""
        self._outs = [_Out(self._folder / name) for name in workers]
        self._began = began
        self._is_over = threading.Event()
        gc.disable()  # what stops the generator would look like a wait at the workers
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> int:
        """Sends no more records. How many there were."""
        self._is_over.set()
        self._thread.join()
        return self._sent

    def _run(self) -> None:
        table = np.zeros(len(KEY_GROUPS), np.uint8)
        tellers: list[socket.socket] = []
        self._sent, most = 0, self._flow.records_max
        while not self._is_over.is_set():
            now = monotonic()
            self._take_routes(table, tellers)
            due = (
                min(most, int((now - self._began) * self._flow.rate) + 1)
                if now > self._began
                else 0
            )
            if due > self._sent:
                numbers = np.arange(self._sent, due, dtype=np.int32)
                to = table[self._tape.groups_of(numbers)]
                for at, out in enumerate(self._outs):
                    out.put(numbers[to == at])
                self._sent = due
            sleep(max(0.0, TICK_S - (monotonic() - now)))
        for out in self._outs:
            out.end()

    def _take_routes(self, table: np.ndarray, tellers: list[socket.socket]) -> None:
        """What the second worker says: these key-groups are mine."""
        for ready in select.select([self._routes, *tellers], [], [], 0)[0]:
            if ready is self._routes:
                tellers.append(ready.accept()[0])
            elif packet := ready.recv(4096):
                table[np.frombuffer(packet, np.uint8)] = 1
            else:
                tellers.remove(ready)


class Worker:
    """Counts records that come to it. One of two: the old or the new owner."""

    def prepare(self, flow: Flow, name: str, is_old: bool) -> str:
        """Makes the state, or a provider that has none. The address where it is served."""
        self._folder = Path(flow.folder)
        self._tape = Tape(flow)
        self._listener = _listen(self._folder / name)
        self._keys = flow.keys
        if is_old:
            self.own(sk.open("memory:"))
            fill(self.kv, flow.keys, is_count=True)
        else:
            self.own(sk.open("memory:", owned=()))
        self._other: _Out | None = None
        self._routes: socket.socket | None = None
        self._working = threading.Lock()
        self._has_come = threading.Event()  # key-groups, since we looked last
        self._error: BaseException | None = None
        if not is_old:
            self._count(np.zeros(1, np.int32))  # refused; but what columns need is imported
        return self.kv.serve("127.0.0.1:0", token=TOKEN).address

    def own(self, kv: sk.KVProvider) -> None:
        self.kv = kv
        self._counts = kv.value("counts", int, key=int)

    def connect(self, other: str) -> None:
        """other: of a worker, which strays are forwarded to; "" for the new owner, which keeps
        them, and tells the generator what is its own."""
        if other:
            self._other = _Out(self._folder / other)
        else:
            self._routes = _connect(self._folder / "routes")

    def start(self, inputs: int) -> None:
        """Counts from now on, until as many channels have ended."""
        gc.collect()
        gc.freeze()
        self._channels = [self._listener.accept()[0] for _ in range(inputs)]
        for channel in self._channels:
            channel.setblocking(False)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def finish(self) -> None:
        """Waits until all that has come is counted."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    # ---- Hand-overs

    def take_over(self, address: str, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
        """Fetches the key-groups that move. When that began and ended, and how much came."""
        began = monotonic()
        if strategy in ("seamless", "fluid", "batched"):
            migration: Any = self.kv.fetch_from(
                address, key_groups=MOVING, strategy=strategy, on_step=self._tell, **options
            )
        else:
            migration = self.kv.fetch_from(address, key_groups=MOVING, strategy=strategy)
            self._tell((MOVING,))
        migration.wait()
        ended = monotonic()
        # Of the time for which key-groups were shut, each has its share: most were not.
        steps = getattr(migration, "arrivals", (migration,))
        shut = sum(one.waits.shut * sum(map(len, one.key_groups)) for one in steps) / len(MOVING)
        waits = {**migration.waits._asdict(), "shut": shut, "stopped": 0.0}
        size = migration.progress.bytes
        if strategy == "seamless":
            size += migration.shadow.progress.bytes
        return {"began": began, "ended": ended, "bytes": size, "waits": waits}

    def pause(self) -> float:
        self._working.acquire()
        return monotonic()

    def checkpoint(self, place: str) -> None:
        self.kv.checkpoint(place, base=None)

    def restore(self, place: str, groups: range) -> None:
        self.kv.close()
        self.own(sk.restore(place, key_groups=groups, lazy=False))
        if self._routes is not None:
            self._tell((groups,))

    def resume(self) -> float:
        self._working.release()
        return monotonic()

    def _tell(self, groups: Sequence[range]) -> None:
        assert self._routes is not None
        self._routes.send(bytes(group for part in groups for group in part))
        self._has_come.set()

    # ---- Counting

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            if self._other is not None:
                self._other.end()

    def _work(self) -> None:
        early = parked = unasked = _NONE
        fetches: list[Future[Any]] = []
        look_at = 0.0
        while self._channels or len(parked) or len(early):
            is_watching = len(parked) or len(early) or self._is_behind()
            fresh = self._receive(WATCH_S if is_watching else IDLE_S)
            with self._working:
                if len(early) and self._has_come.is_set():
                    self._has_come.clear()  # first: more may come while we look
                    fresh, early = np.concatenate((early, fresh)), _NONE
                if len(fresh):
                    absent, strays = self._count(fresh)
                    early = np.concatenate((early, strays))
                    parked = np.concatenate((parked, absent))
                    unasked = np.concatenate((unasked, absent))
                if not len(parked):
                    continue
                came = [fetch for fetch in fetches if fetch.done()]
                for fetch in came:
                    fetch.result()
                    fetches.remove(fetch)
                began = monotonic()
                if came or began >= look_at:
                    parked, _ = self._count(parked)
                    unasked = np.intersect1d(unasked, parked, assume_unique=True)
                    ended = monotonic()
                    look_at = ended + LOOK_SHARE * (ended - began)
                if len(unasked) and len(fetches) < FETCHES_MAX:
                    fetches.append(self.kv.prefetch(self._tape.keys_of(unasked), key=int))
                    unasked = _NONE

    def _is_behind(self) -> bool:
        if self._other is None:
            return False
        self._other.push()
        return self._other.is_behind

    def _receive(self, seconds: float) -> np.ndarray:
        """Numbers of records that have come."""
        found: list[np.ndarray] = []
        count = 0
        if not self._channels:
            sleep(seconds)
        for channel in select.select(self._channels, [], [], seconds)[0] if self._channels else ():
            while count < STEP_RECORDS:
                try:
                    packet = channel.recv(4 * PACKET_RECORDS)
                except BlockingIOError:
                    break
                if packet in (END, b""):
                    self._channels.remove(channel)
                    channel.close()
                    break
                found.append(np.frombuffer(packet, np.int32))
                count += len(found[-1])
        return np.concatenate(found) if found else _NONE

    def _count(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Counts records. Returns those whose state is still to come, and those that are early."""
        keys = self._tape.keys_of(numbers)
        positions = self.kv.absent(keys, key=int)
        if not positions:
            return _NONE, self._add(numbers, keys)
        is_absent = np.zeros(len(numbers), dtype=bool)
        is_absent[np.asarray(positions)] = True
        return numbers[is_absent], self._add(numbers[~is_absent], keys[~is_absent])

    def _add(self, numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Counts records whose state is not expected. Returns those whose key-groups are not here;
        the old owner sends these on."""
        early = _NONE
        while len(numbers):
            try:
                self._counts.add_many(keys)
                self._tape.done[numbers] = monotonic()
                break
            except NotOwnedError as error:
                is_left = np.frombuffer(error.statuses or b"", np.uint8) != 0
                self._tape.done[numbers[~is_left]] = monotonic()
                numbers, keys = numbers[is_left], keys[is_left]
            is_owned = np.zeros(len(KEY_GROUPS), dtype=bool)
            for part in self.kv.key_groups:
                is_owned[part.start : part.stop] = True
            is_ours = is_owned[self._tape.groups_of(numbers)]
            early = np.concatenate((early, numbers[~is_ours]))
            numbers, keys = numbers[is_ours], keys[is_ours]
        if self._other is None:
            return early
        self._other.put(early)
        return _NONE

    def counts_of(self, keys: np.ndarray) -> np.ndarray:
        """The counts of those keys that are this worker's; 0 for the others."""
        groups = np.asarray(self.kv.key_groups_of(keys, key=int))
        is_ours = np.isin(groups, [group for part in self.kv.key_groups for group in part])
        found = np.zeros(len(keys), np.int64)
        found[is_ours] = self._counts.get_many(keys[is_ours]).to_numpy()
        return found
