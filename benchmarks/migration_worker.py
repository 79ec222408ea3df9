"""The other processes of bench_migration.py: the old owner of the state, and an engine that takes
it over.

A Remote is an object in a process of its own, so that each side of a hand-over has a GIL and a heap
of its own. Times are those of the monotonic clock, which all processes of a machine share.
"""

import gc
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any

import grpc
import numpy as np

import statekit as sk

KEY_GROUPS = range(128)
VALUE_BYTES = 100
ENTRY_BYTES = VALUE_BYTES + 26  # of an entry in a block: hash, key, two offsets, MessagePack head
COUNT_BYTES = 24  # of a counter in a block
CHUNK = 500_000  # keys that are filled in one call
RECORDS_MAX = 512  # how many the engine takes in one step
FETCHES_MAX = 2  # prefetches of the engine on their way
IDLE_S = 0.0005
LOOK_SHARE = 10  # the engine spends a tenth of its time, at most, on looking at parked records

_SPAWN = multiprocessing.get_context("spawn")  # gRPC does not survive a fork


class Remote:
    """An object in a process of its own: remote.fill(10) calls its fill(10) there."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_answer, args=(theirs, factory), daemon=True)
        self._process.start()
        theirs.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return self.begin(name, *args)()

        return call

    def begin(self, name: str, *args: Any) -> Callable[[], Any]:
        """Calls it, and returns at once. What is returned waits for the result."""
        self._pipe.send((name, args))

        def result() -> Any:
            found, error = self._pipe.recv()
            if error is not None:
                raise error
            return found

        return result

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()


def _answer(pipe: Connection, factory: Callable[[], Any]) -> None:
    target = factory()
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:  # the process that asked is done
            return
        try:
            pipe.send((getattr(target, name)(*args), None))
        except Exception as error:
            pipe.send((None, error))


# ---- The old owner


class Source:
    """Has state and serves it. Beside it there is a bare gRPC server, which only moves bytes."""

    def __init__(self) -> None:
        self.kv: sk.KVProvider | None = None
        self.server: grpc.Server | None = None

    def fill(self, n: int, is_count: bool = False, token: str | None = None) -> str:
        """Makes new state of n keys. Returns the address at which it is served."""
        if self.kv is not None:
            self.kv.close()
        gc.collect()
        self.kv = sk.open("memory:")
        fill(self.kv, n, is_count)
        return self.kv.serve("127.0.0.1:0", token=token).address

    def checkpoint(self, place: str) -> None:
        self.kv.checkpoint(place, base=None)

    def change(self, keys: np.ndarray) -> None:
        self.kv["users"].put_many(keys, [b"u" * VALUE_BYTES] * len(keys))

    def serve_bytes(self) -> str:
        """A bare gRPC server: `get` gives bytes, `stream` gives pieces, as many as asked for."""
        pieces: dict[int, bytes] = {}

        def piece(size: int) -> bytes:
            return pieces.setdefault(size, bytes(size))

        def get(request: bytes, _: grpc.ServicerContext) -> bytes:
            return piece(int(request))

        def stream(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
            size, count = map(int, request.split())
            for _ in range(count):
                yield piece(size)

        self.server = grpc.server(ThreadPoolExecutor(8))
        handlers = {
            "get": grpc.unary_unary_rpc_method_handler(get),
            "stream": grpc.unary_stream_rpc_method_handler(stream),
        }
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bare", handlers),)
        )
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        return f"127.0.0.1:{port}"


class BareChannel:
    """The client of serve_bytes()."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._get = self._channel.unary_unary("/bare/get")
        self._stream = self._channel.unary_stream("/bare/stream")

    def get(self, size: int) -> bytes:
        found: bytes = self._get(b"%d" % size)
        return found

    def stream(self, size: int, count: int) -> int:
        return sum(len(piece) for piece in self._stream(b"%d %d" % (size, count)))

    def close(self) -> None:
        self._channel.close()


class Meter:
    """Forwards connections to an address and counts the bytes, both ways."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self.bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(self._to)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 18):
                with self._lock:
                    self.note(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one side has hung up: the other side is closed, too
            source.close()
            target.close()

    def note(self, data: bytes) -> None:
        self.bytes += len(data)

    def close(self) -> None:
        self._listener.close()


# ---- The new owner


@dataclass
class Load:
    """Records at a constant rate: keys by Zipf 1.0, the same for the same seed."""

    keys: int
    rate: float  # records per second
    seconds: float
    seed: int

    def draw(self) -> np.ndarray:
        shares = np.cumsum(1 / np.arange(1, self.keys + 1))
        drawn = np.random.default_rng(self.seed).random(int(self.rate * self.seconds))
        return np.searchsorted(shares, drawn * shares[-1])


@dataclass
class Waits:
    """How long records waited: from their arrival until they were counted."""

    longest_ms: float
    p99_ms: float
    p50_ms: float
    seconds: float  # until the state was here

    @classmethod
    def of(cls, waits: np.ndarray, seconds: float) -> "Waits":
        ms = 1000 * waits
        p50, p99 = np.percentile(ms, [50, 99])
        return cls(float(ms.max()), float(p99), float(p50), seconds)


class Engine:
    """Counts records, one call for each, as an engine does that calls a function of its user.

    Records that cannot be counted yet are parked, and their keys are prefetched; the others go on.
    (Parked records are not kept in order: sums do not depend on it.)
    """

    def prepare(self, load: Load) -> None:
        """Does everything that is not to be measured."""
        self.load = load
        self.records = load.draw()
        self.own(sk.open("memory:", owned=()))
        self.kv.serve()  # as workers of an engine do: gRPC is there when the hand-over comes
        self.kv.key_groups_of(self.records[:1], key=int)  # and so are the packages for columns

    def own(self, kv: sk.KVProvider) -> None:
        self.kv = kv
        self.counts = kv.value("counts", int, key=int)
        self.migration: Any = None

    def capacity(self, load: Load) -> float:
        """How many records per second this loop can do if there are always more."""
        self.load = load
        self.records = load.draw()
        self.own(sk.open("memory:"))
        fill(self.kv, load.keys, is_count=True)
        began = monotonic()
        for at in range(0, len(self.records), RECORDS_MAX):
            self.count(self.records[at : at + RECORDS_MAX])
        return len(self.records) / (monotonic() - began)

    def take_over(self, address: str, strategy: str) -> Waits:
        began = monotonic()
        self.migration = self.kv.fetch_from(address, key_groups=KEY_GROUPS, strategy=strategy)
        return self.run(began)

    def restore(self, place: str, began: float) -> Waits:
        self.own(sk.restore(place, lazy=False))
        return self.run(began)

    def run(self, began: float) -> Waits:
        """Takes records as they arrive, from the moment `began`, until all are counted."""
        records, rate = self.records, self.load.rate
        done = np.zeros(len(records))
        none = np.empty(0, dtype=np.int64)
        parked = unasked = none  # numbers of records
        fetches: list[Future[Any]] = []
        taken, look_at, here_at = 0, 0.0, None
        while taken < len(records) or len(parked):
            now = monotonic() - began
            arrived = min(len(records), int(now * rate) + 1, taken + RECORDS_MAX)
            fresh = np.arange(taken, arrived)
            taken = arrived
            is_over = self.migration is None or self.migration.done
            if is_over and here_at is None:
                here_at = now
            came = [fetch for fetch in fetches if fetch.done()]
            for fetch in came:
                fetch.result()
                fetches.remove(fetch)
            if len(parked) and (came or is_over or now >= look_at):
                ready, parked = self.sort(parked, is_over)
                self.count(records[ready])
                done[ready] = monotonic() - began
                look_at = monotonic() - began + LOOK_SHARE * (monotonic() - began - now)
                unasked = np.intersect1d(unasked, parked, assume_unique=True)
            if len(fresh):
                ready, absent = self.sort(fresh, is_over)
                self.count(records[ready])
                done[ready] = monotonic() - began
                parked = np.concatenate((parked, absent))
                unasked = np.concatenate((unasked, absent))
            if len(unasked) and len(fetches) < FETCHES_MAX:
                fetches.append(self.kv.prefetch(records[unasked], key=int))
                unasked = none
            if not len(fresh) or len(fresh) < RECORDS_MAX // 8:
                sleep(IDLE_S)
        self.check()
        arrivals = np.arange(len(records)) / rate
        return Waits.of(done - arrivals, here_at or monotonic() - began)

    def sort(self, numbers: np.ndarray, is_over: bool) -> tuple[np.ndarray, np.ndarray]:
        """Records that can be counted now, and those whose state is not here."""
        if is_over:
            return numbers, numbers[:0]
        positions = np.asarray(self.kv.absent(self.records[numbers], key=int), dtype=np.int64)
        is_absent = np.zeros(len(numbers), dtype=bool)
        is_absent[positions] = True
        return numbers[~is_absent], numbers[is_absent]

    def count(self, keys: np.ndarray) -> None:
        add = self.counts.add
        for key in keys.tolist():
            add(key, 1)

    def check(self) -> None:
        """Compares every count with NumPy's."""
        found = self.counts.get_many(np.arange(self.load.keys)).to_numpy()
        wrong = int((found != np.bincount(self.records, minlength=self.load.keys)).sum())
        if wrong:
            raise SystemExit(f"{wrong} counts are wrong (seed {self.load.seed})")


def fill(kv: sk.KVProvider, n: int, is_count: bool = False) -> None:
    """n entries under int keys: counters at 0, or values of 100 bytes."""
    state = kv.value("counts", int, key=int) if is_count else kv.value("users", bytes, key=int)
    for at in range(0, n, CHUNK):
        keys = np.arange(at, min(n, at + CHUNK))
        state.put_many(keys, np.zeros_like(keys) if is_count else [b"v" * VALUE_BYTES] * len(keys))
