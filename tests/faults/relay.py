"""Relay: passes bytes between TCP connections, and treats them as a bad network does.

    client ──> Relay ──> server

These faults are below the messages of gRPC: connections that are cut in the middle of a frame, a
byte that is changed, a link with a limited speed, a network that is silent one way or both. Bytes
that are not passed on are not read either, so senders feel it, as with a full receive window.
"""

import contextlib
import socket
import struct
import threading
from enum import StrEnum
from types import TracebackType

HOST = "127.0.0.1"
CHUNK_BYTES = 16 << 10
STEPS_PER_SECOND = 20  # of a limited link
_RESET = struct.pack("ii", 1, 0)  # makes close() send RST: a cut connection is not closed politely


class Way(StrEnum):
    UP = "up"  # from client to server
    DOWN = "down"


class Relay:
    """A context manager: closes everything when it is left."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._lock = threading.Condition()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._blocked: set[Way] = set()
        self._cut_after: dict[Way, int] = {}
        self._corrupt_at: dict[Way, int] = {}
        self._bytes_per_second = 0
        self._is_closed = False
        self.passed = {Way.UP: 0, Way.DOWN: 0}
        self.is_cut = threading.Event()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"{HOST}:{self.port}"
        threading.Thread(target=self._accept, name="relay-accept", daemon=True).start()

    # ---- What a test says

    def cut(self) -> None:
        """Breaks every connection now; new ones are fine."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _break(*pair)
        self.is_cut.set()

    def cut_after(self, way: Way, count: int) -> None:
        """Breaks all connections, once, when `count` more bytes have passed this way."""
        with self._lock:
            self._cut_after[way] = self.passed[way] + count
            self.is_cut.clear()

    def corrupt_at(self, way: Way, count: int) -> None:
        """Changes one byte, once: the one after `count` more bytes this way."""
        with self._lock:
            self._corrupt_at[way] = self.passed[way] + count

    def limit(self, bytes_per_second: int) -> None:
        """Limits the speed of each connection, each way; 0: as fast as it goes."""
        with self._lock:
            self._bytes_per_second = bytes_per_second

    def freeze(self) -> None:
        self.partition(*Way)

    def partition(self, *ways: Way) -> None:
        """Nothing gets through this way; connections stay."""
        with self._lock:
            self._blocked.update(ways)

    def heal(self) -> None:
        with self._lock:
            self._blocked.clear()
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- Connections

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(self._upstream, timeout=120)
            except OSError:
                _break(client)
                continue
            server.settimeout(None)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((client, server))
            for way, source, sink in ((Way.UP, client, server), (Way.DOWN, server, client)):
                threading.Thread(
                    target=self._pump, args=(way, source, sink), name=f"relay-{way}", daemon=True
                ).start()

    def _pump(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self._chunk_bytes()):
                with self._lock:
                    self._lock.wait_for(lambda: way not in self._blocked or self._is_closed)
                    is_last, data = self._change(way, data)
                    speed = self._bytes_per_second
                sink.sendall(data)
                if is_last:
                    self.cut()
                    return
                if speed:
                    with self._lock:
                        self._lock.wait_for(lambda: self._is_closed, len(data) / speed)
            sink.shutdown(socket.SHUT_WR)

    def _chunk_bytes(self) -> int:
        speed = self._bytes_per_second
        return max(speed // STEPS_PER_SECOND, 1) if speed else CHUNK_BYTES

    def _change(self, way: Way, data: bytes) -> tuple[bool, bytes]:
        """What arrives of the data, and whether the connections end with it."""
        start = self.passed[way]
        at = self._corrupt_at.get(way, -1) - start
        if 0 <= at < len(data):
            del self._corrupt_at[way]
            data = data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
        end = self._cut_after.get(way)
        is_last = end is not None and start + len(data) >= end
        if end is not None and is_last:
            del self._cut_after[way]
            data = data[: end - start]
        self.passed[way] = start + len(data)
        return is_last, data


def _break(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            one.shutdown(socket.SHUT_RDWR)  # wakes up the thread that waits for its bytes
        one.close()
