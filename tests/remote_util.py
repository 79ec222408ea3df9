"""A service for tests that answers from memory, certificates, a server process, raw HTTP/2.

`python remote_util.py '{"token": ...}'` serves until its input ends: see ServerProcess.
"""

import datetime
import ipaddress
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from statekit.errors import SchemaError
from statekit.protocol.calls import (
    CHUNK_BYTES,
    BeginCall,
    BeginReply,
    FetchCall,
    GiveBackCall,
    InstalledCall,
    Limits,
    PeerHello,
    PickCall,
    PickReply,
    Piece,
    PieceKind,
    ProposeCall,
    QueryCall,
    QueryReply,
    ScanCall,
    StreamCall,
)
from statekit.protocol.messages import Grant, Offer
from statekit.schema import StateSchema

SCHEMA = StateSchema("visits", "value", "s", "int")
TOKEN = "0123456789abcdef-token"
LONG_S = 120.0  # time-out for what is sure to come, however busy the machine is


def cut(leaf: int, epoch: int, content: bytes, chunk: int = CHUNK_BYTES) -> Iterator[Piece]:
    """A leaf in pieces."""
    starts = range(0, max(len(content), 1), chunk)
    for start in starts:
        part = content[start : start + chunk]
        is_last = start + chunk >= len(content)
        yield Piece(PieceKind.HERE, leaf, epoch, part, is_last, bytes_total=len(content))


class Service:
    """Leaves and values in dicts; it remembers what it was asked."""

    def __init__(self, leaves: dict[int, bytes] | None = None) -> None:
        self.leaves = leaves or {}
        self.values: dict[bytes, bytes] = {}
        self.asked: list[Any] = []
        self.error: Exception | None = None
        self.closed = 0  # streams and fetches that came to their end
        self.gate = threading.Event()  # streams wait for it
        self.gate.set()
        self.hold: threading.Event | None = None  # all calls wait for it

    def _note(self, call: Any) -> None:
        self.asked.append(call)
        if self.hold is not None:
            self.hold.wait(LONG_S)
        if self.error is not None:
            raise self.error

    def hello(self) -> PeerHello:
        self._note("hello")
        return PeerHello("alpha", "inc-1", 3, 128, 16, (range(64),), (SCHEMA,), "0.1.0")

    def begin(self, call: BeginCall) -> BeginReply:
        self._note(call)
        leaves = [leaf for part in call.key_groups for leaf in range(part.start, part.stop)]
        grants = tuple(Grant(range(leaf, leaf + 1), 1 << 32, leaf // 8) for leaf in leaves)
        return BeginReply(
            Offer(call.migration, call.generation, 1, "alpha", grants),
            7, (SCHEMA,), 128, 16, -5, (range(3, 5),), array("Q", leaves), False,
        )  # fmt: skip

    def fetch(self, call: FetchCall) -> Iterator[Piece]:
        self._note(call)
        try:
            for leaf, epoch in call.leases:
                if leaf in self.leaves:
                    yield from cut(leaf, epoch, self.leaves[leaf])
                else:
                    yield Piece(PieceKind.NEVER, leaf, epoch)
        finally:
            self.closed += 1

    def pick(self, call: PickCall) -> PickReply:
        self._note(call)
        return PickReply(b"".join(key for _, keys in call.keys for key in keys), (7,))

    def stream(self, call: StreamCall, credits_: Iterator[int], /) -> Iterator[Piece]:
        self._note(call)
        may = sent = 0
        try:
            rest = [leaf for leaf in self.leaves if leaf not in call.first]
            for leaf in [*call.first, *rest]:
                for piece in cut(leaf, 1, self.leaves[leaf]):
                    while sent + len(piece.blocks) > may:
                        more = next(credits_, None)
                        if more is None:
                            return
                        may = more
                    self.gate.wait()
                    sent += len(piece.blocks)
                    yield piece
        finally:
            self.closed += 1

    def installed(self, call: InstalledCall) -> tuple[tuple[int, int], ...]:
        self._note(call)
        return call.leases

    def give_back(self, call: GiveBackCall) -> None:
        self._note(call)

    def propose(self, call: ProposeCall) -> None:
        self._note(call)

    def query(self, call: QueryCall) -> QueryReply:
        self._note(call)
        if call.state != SCHEMA.name:
            raise SchemaError(f"there is no state {call.state!r}")
        return QueryReply(SCHEMA, tuple(map(self.values.get, call.keys)))

    def scan(self, call: ScanCall) -> Iterator[Piece]:
        self._note(call)
        try:
            for leaf, content in self.leaves.items():
                self.gate.wait()
                yield from cut(leaf, 0, content)
        finally:
            self.closed += 1

    def figures(self) -> dict[str, Any]:
        self._note("figures")
        return {"entries": 1, "nested": {"a": [1.5, None]}}


def wait_until(done: Callable[[], Any], timeout_s: float = LONG_S) -> None:
    """For what has no event to wait for: the state of another process, or of gRPC's threads."""
    until = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.005)


# ---- Certificates


class Signed(NamedTuple):
    cert: bytes
    key: bytes


class Authority:
    """Who signs certificates."""

    def __init__(self, name: str = "tests") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        built = self._builder(self._name, self._key, days=1).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.cert = _pem(built.sign(self._key, hashes.SHA256()))

    def _builder(self, name: Any, key: Any, days: int) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=3))
            .not_valid_after(now + datetime.timedelta(days=days))
        )

    def sign(self, host: str = "127.0.0.1", *, expired: bool = False) -> Signed:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
        try:
            alternative: Any = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            alternative = x509.DNSName(host)
        built = self._builder(name, key, days=-1 if expired else 1).add_extension(
            x509.SubjectAlternativeName([alternative]), critical=False
        )
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Signed(_pem(built.sign(self._key, hashes.SHA256())), secret)


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


# ---- A server in a process of its own


class ServerProcess:
    """A Service of leaves 0 to 7, each 64 KiB, in a process of its own."""

    def __init__(self, address: str = "127.0.0.1:0", token: str = "", **limits: Any) -> None:
        told = json.dumps({"address": address, "token": token, "limits": limits})
        self._process = subprocess.Popen(
            [sys.executable, __file__, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().decode().strip()
        assert self.address, "the server did not start"
        self.pid = self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def rss_kb(self) -> int:
        return self._status("VmRSS")

    @property
    def threads(self) -> int:
        return self._status("Threads")

    @property
    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name + ":")).split()[1])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def _serve(told: str) -> None:
    from statekit.remote.server import PeerServer

    given = json.loads(told)
    service = Service({leaf: bytes([leaf]) * 65536 for leaf in range(8)})
    limits = Limits(**given["limits"])
    token = given["token"] or None
    with PeerServer(service, given["address"], token=token, limits=limits) as server:
        print(server.address, flush=True)
        sys.stdin.buffer.read()


# ---- HTTP/2 by hand: what gRPC's own client would never send

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _field(name: str, value: str) -> bytes:
    """A header in HPACK, literally: neither indexed nor compressed."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def call_headers(method: str, token: str = "") -> bytes:
    fields = {
        ":method": "POST", ":scheme": "http", ":path": f"/statekit.v1.Peer/{method}",
        ":authority": "x", "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    if token:
        fields["authorization"] = f"Bearer {token}"
    return b"".join(_field(name, value) for name, value in fields.items())


def grpc_message(data: bytes, length: int | None = None) -> bytes:
    return b"\0" + struct.pack(">I", len(data) if length is None else length) + data


def raw_connection(address: str, settings: bytes = b"") -> socket.socket:
    """A connection that has said hello in HTTP/2."""
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=LONG_S)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
    return connection


if __name__ == "__main__":
    _serve(sys.argv[1])
