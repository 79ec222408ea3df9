"""Workers of the migration tests: real processes that hold providers and do what a test says.

    pytest ──(unix socket)── nursery ──fork──> worker    one socket per worker, a thread per caller
       └──────(unix socket)──────────────────────┘

A worker has *nodes*: a provider each, with its counters, arrivals and departures. A test opens one
per case, so that a process serves hundreds of cases. The nursery has imported everything and used
nothing: gRPC does not survive fork, but it can be imported before. So a worker that was killed is
replaced in 20 ms rather than half a second.

What a node raises goes to the test as it is. Times are of CLOCK_MONOTONIC, which all processes of a
machine share; workers whose clock is turned (row 17) turn the other one, time.time().
"""

import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from grpc import _channel, _common, _server

import statekit as sk
from statekit.errors import MigrationError
from statekit.keys import key_codec
from statekit.migration import asking as asking_module
from statekit.migration import fetch as fetch_module
from statekit.migration import new_owner as new_owner_module
from statekit.migration import peer as peer_module
from statekit.migration import report as report_module
from statekit.migration import returning as returning_module
from statekit.migration import stream as stream_module
from statekit.native.columns import route
from statekit.protocol.calls import CHUNK_BYTES, Limits
from statekit.remote import channel, server  # noqa: F401  (imported once, in the nursery)
from statekit.residence.residence import Residence

KEY_GROUPS, SUBGROUPS = 8, 2
SECONDS_MAX = 120.0  # if anything takes longer, it hangs
# Half a megabyte is all that one Fetch may bring, so that leaves of half a megabyte need FetchLong.
LIMITS = Limits(message_bytes=2 * CHUNK_BYTES)

_SIZE = struct.Struct("<i")


class Gone(Exception):
    """The worker was killed: nobody knows whether it did what it was asked."""


# ---- In the worker


class Node:
    """A provider in a worker: what a test can ask of it."""

    def __init__(self, kv: sk.KVProvider, generation: int | None) -> None:
        self.kv = kv
        self.counts = kv.value("counts", int, default=0, key=int)
        self.blobs = kv.value("blobs", bytes, default=b"", key=int)
        self.server = kv.serve(limits=LIMITS, generation=generation)
        self.arrivals: dict[str, Any] = {}
        self.departures: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return self.server.address

    def be_at(self, address: str) -> None:
        """Tells others to reach it at this address, which is that of a proxy."""
        self.server.address = address

    # Work

    def add(self, key: int) -> tuple[int, float, float]:
        """The new count, and when it was counted."""
        began = time.monotonic()
        count = self.counts.add(key, 1)
        self.keep()
        return count, began, time.monotonic()

    def keep(self) -> None:
        """What was done survives a kill, if there is a home."""
        if self.kv._residence.home is not None:
            self.kv.flush()

    def held(self) -> list[int]:
        """Key-groups that are complete here, as their old owner may not know."""
        arrivals = self.kv._recorded.arrivals
        return [group for one in arrivals for part in one.held for group in part]

    def preload(self, keys: Sequence[int], blobs: Sequence[int], size: int) -> None:
        for key in keys:
            self.counts.add(key, 1)
        for key in blobs:
            self.blobs[key] = key.to_bytes(4, "little") * (size // 4)
        self.keep()

    def fill(self, keys: Sequence[int], size: int) -> None:
        for key in keys:
            self.blobs[key] = os.urandom(size // len(keys))

    def get(self, keys: Sequence[int]) -> list[int]:
        return [self.counts[key] for key in keys]

    def get_blobs(self, keys: Sequence[int]) -> list[bytes]:
        return [self.blobs[key] for key in keys]

    def groups(self) -> list[int]:
        return [group for part in self.kv.key_groups for group in part]

    # Moving

    def fetch(self, address: str, groups: Sequence[int], strategy: str, timeout: float) -> str:
        arrival = self.kv.fetch_from(address, key_groups=groups, strategy=strategy, timeout=timeout)
        self.arrivals[arrival.id] = arrival
        return arrival.id

    def seamless(self, address: str, groups: Sequence[int], timeout: float) -> None:
        """Copies key-groups, and takes over one after the other."""
        if not (left := sorted({*groups} - {*self.groups()})):
            return
        steps = self.kv.fetch_from(
            address, key_groups=left, strategy="seamless", step=1, timeout=timeout
        )
        try:
            steps.wait(SECONDS_MAX)
        except BaseException:
            steps.stop()
            raise

    def migrate(self, address: str, groups: Sequence[int], strategy: str, timeout: float) -> str:
        departure = self.kv.migrate(address, key_groups=groups, strategy=strategy, timeout=timeout)
        return departure.id

    def load(self, keys: Sequence[int]) -> None:
        """Brings the entries of keys here, and then their leaves as wholes."""
        self.kv.prefetch(keys, key=int).result(SECONDS_MAX)
        residence = self.kv._residence
        leaves = {*route(keys, key_codec(int), residence.store.leaves)}
        residence.load_leaves(sorted(leaves))

    def is_here(self, keys: Sequence[int]) -> bool:
        return self.kv.is_here(keys, key=int)

    def wait(self, migration: str, timeout: float) -> None:
        for one in self.kv.migrations:
            if one.id == migration:
                one.wait(timeout)

    def wait_all(self, timeout: float) -> None:
        """Waits until everything that is on its way has come, or has gone."""
        until = time.monotonic() + timeout
        while moving := self.kv.migrations:
            for one in moving:
                one.wait(max(until - time.monotonic(), 0.001))
            if time.monotonic() > until:
                raise TimeoutError(f"{moving} are not done")
            time.sleep(0.001)  # all is here, but the peer may not know it yet: there is no event

    def moving(self) -> list[str]:
        return [one.id for one in self.kv.migrations]

    def give_back(self, migration: str) -> list[int]:
        return [group for part in self.arrivals[migration].give_back() for group in part]

    def give_back_all(self) -> None:
        for one in self.kv.migrations:
            if hasattr(one, "give_back"):
                one.give_back()

    def take_back_all(self) -> None:
        """Takes back what nobody has asked for."""
        for one in self.kv.migrations:
            if hasattr(one, "abort"):
                with contextlib.suppress(MigrationError):
                    one.abort()

    def abort_all(self) -> list[str]:
        """The new owners are dead. Returns what is said about key-groups that are lost."""
        told = []
        for one in self.kv.migrations:
            try:
                one.abort(target_is_dead=True)
            except MigrationError as error:
                told.append(str(error))
        return told

    def fence(self, generation: int) -> None:
        self.kv.fence(generation)

    def checkpoint(self, place: str) -> None:
        self.kv.checkpoint(place)

    def close(self) -> None:
        self.kv.close()


class Worker:
    """All nodes of a process."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.faults: list[str] = []  # errors that were not expected
        self._answering: list[threading.Thread] = []

    def open(self, node: str, owned: Sequence[int], home: str = "memory:") -> str:
        kv = sk.open(home, key_groups=KEY_GROUPS, subgroups=SUBGROUPS, owned=owned)
        return self._add(node, kv, None)

    def restore(self, node: str, place: str, owned: Sequence[int], generation: int) -> str:
        return self._add(node, sk.restore(place, key_groups=owned), generation)

    def _add(self, node: str, kv: sk.KVProvider, generation: int | None) -> str:
        made = self.nodes[node] = Node(kv, generation)
        return made.address

    def forget(self, node: str) -> None:
        self.nodes.pop(node).close()

    def set_patience(self, seconds: float) -> None:
        """Sets time-outs for what has none of its own: proposed fetches, closing, repeating."""
        peer_module.TIMEOUT_S = seconds
        for module in (asking_module, new_owner_module, returning_module):
            module.CLOSE_SECONDS = seconds  # type: ignore[attr-defined]
        report_module.RETRY_SECONDS = stream_module.RETRY_SECONDS = seconds

    def break_on_purpose(self, what: str) -> None:
        """A fault in statekit that tests must find."""
        if what == "leaves are not shut":
            Residence.shut = lambda self, ranges: None
        elif what == "leaves are copied, not moved":
            whole = Residence.encode_shut

            def encode(self: Any, leaf: int, *args: Any, **kwargs: Any) -> bytes:
                blocks = whole(self, leaf, *args, **kwargs)
                self.reopen([range(leaf, leaf + 1)])
                return blocks

            Residence.encode_shut = encode
        else:
            assert what == "damage is passed on"
            fetch_module.verify = lambda *args: None

    def turn_clock(self, offset: float, speed: float) -> None:
        """Turns the wall clock: its offset and speed from now on. Speed 0: it stands still."""
        # gRPC computes deadlines from time.time() for its C part, which reads the real clock. No
        # machine has two clocks that differ, so gRPC's Python part keeps the real one.
        for module in _GRPC_MODULES:
            module.time = _REAL_TIME
        real, now = time.monotonic, time.monotonic()
        base = _REAL_TIME.time() + offset

        def shown() -> float:
            return base + (real() - now) * speed

        time.time = shown
        time.time_ns = lambda: int(shown() * 1e9)

    def bytes_now(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def leftovers(self) -> list[str]:
        """Threads that are not the worker's own."""
        own = (threading.main_thread(), *self._answering)
        return [each.name for each in threading.enumerate() if each not in own]

    def seen_faults(self) -> list[str]:
        seen, self.faults = self.faults, []
        return seen

    # Calls

    def serve(self, path: str) -> None:
        listener = Listener(path, backlog=64)
        while True:
            connection = listener.accept()
            thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            self._answering.append(thread)
            thread.start()

    def _answer(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                node, name, args = connection.recv()
                try:
                    owner = self if node is None else self.nodes[node]
                    reply = (True, getattr(owner, name)(*args))
                except Exception as error:
                    reply = (False, _plain(error))
                connection.send(reply)


_REAL_TIME = types.SimpleNamespace(**vars(time))
_GRPC_MODULES: tuple[Any, ...] = (_channel, _common, _server)


def _plain(error: Exception) -> Exception:
    """The error, without what cannot be sent."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
    return error


class _Faults(logging.Handler):
    """Keeps what was logged as an error: a test that sees any has found something."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(logging.ERROR)
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        self._worker.faults.append(logging.Formatter().format(record))


def _run_worker(path: str) -> None:
    worker = Worker()
    logging.getLogger("statekit").addHandler(_Faults(worker))

    def unraised(args: Any) -> None:
        worker.faults.append(f"{args.thread}: {args.exc_value!r}")
        sys.__excepthook__(args.exc_type, args.exc_value, args.exc_traceback)

    threading.excepthook = unraised
    worker.serve(path)


# ---- In the nursery


def _run_nursery(fd: int) -> None:
    """Forks a worker for each path that it is told."""
    assert threading.active_count() == 1, "fork copies only the thread that calls it"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=fd) as test:
        while path := test.recv(4096):
            pid = os.fork()
            if pid == 0:
                test.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    _run_worker(path.decode())
                finally:
                    os._exit(1)
            test.send(_SIZE.pack(pid))


# ---- In the test


class Process:
    """A worker, from outside. Threads may share it: each call has a connection of its own."""

    def __init__(self, pid: int, path: str) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)  # when the worker is dead, another process may get its number
        self._path = path
        self._idle: list[Connection] = []
        self._is_known = False  # it has answered
        self.call(None, "set_patience", 0.5)

    def _connect(self) -> Connection:
        until = time.monotonic() + SECONDS_MAX
        while True:
            try:
                return Client(self._path)
            except OSError as error:
                if self._is_known or time.monotonic() > until:
                    raise Gone(f"worker {self.pid}: {error}") from None
                time.sleep(0.001)  # it has been forked, but does not listen yet

    def call(self, node: str | None, name: str, *args: Any) -> Any:
        """Raises what the worker raises, and Gone if it is gone."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            connection.send((node, name, args))
            is_good, result = connection.recv()
        except (EOFError, OSError) as error:
            connection.close()
            raise Gone(f"worker {self.pid}: {error!r}") from None
        self._is_known = True
        self._idle.append(connection)
        if not is_good:
            raise result
        return result

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """Kills it with SIGKILL, and returns when it is gone."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(Gone):
            while True:
                self.call(None, "leftovers")

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self._fd < 0:
            return
        self.go_on()
        self.kill()
        os.close(self._fd)
        self._fd = -1
        for connection in self._idle:
            connection.close()


class Nursery:
    """Where workers come from. A context manager: all of them end with it."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="statekit-workers-")
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._workers: list[Process] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
        )
        theirs.close()

    def worker(self) -> Process:
        with self._lock:
            path = f"{self._directory.name}/{next(self._numbers)}"
            self._socket.send(path.encode())
            (pid,) = _SIZE.unpack(self._socket.recv(_SIZE.size))
            made = Process(pid, path)
            self._workers.append(made)
        return made

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.close()
        self._socket.close()
        self._process.wait(SECONDS_MAX)
        self._directory.cleanup()


if __name__ == "__main__":
    _run_nursery(int(sys.argv[1]))
