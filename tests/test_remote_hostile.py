"""Peers that want to do harm, or are broken: row 18 of the reliability plan.

Nothing crashes, memory, threads and files stay bounded, and afterwards the server answers as ever.
The seed is printed; STATEKIT_FUZZ_FRAMES asks for more frames than the 10^5 of a usual run.
"""

import itertools
import os
import random
import resource
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from remote_util import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LONG_S,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    TOKEN,
    WINDOW_UPDATE,
    ServerProcess,
    Service,
    call_headers,
    frame,
    grpc_message,
    raw_connection,
    wait_until,
)

from statekit.errors import PeerError, StateKitError
from statekit.native.buffers import BufferSlice
from statekit.protocol.calls import (
    BeginCall,
    FetchCall,
    GiveBackCall,
    InstalledCall,
    Limits,
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
from statekit.remote import wire
from statekit.remote.channel import PeerChannel, _Answers
from statekit.remote.server import PeerServer

FRAMES = int(os.environ.get("STATEKIT_FUZZ_FRAMES", "100000"))
SEED = int(os.environ.get("STATEKIT_FUZZ_SEED", random.randrange(2**32)))
NUMBERS = (b"\xff" * 9 + b"\1", b"\xff\xff\xff\xff\7", b"\xff\xff\xff\xff\x0f", b"\x80" * 11)
FETCH = FetchCall("m", 1, ((1, 9),))


def mutated(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """The data with some damage: bits, bytes, sizes, cuts, parts of other messages."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(damaged))
        match rng.randrange(8):
            case 0 if damaged:
                damaged[at % len(damaged)] ^= 1 << rng.randrange(8)
            case 1 if damaged:
                damaged[at % len(damaged)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del damaged[at:]
            case 3:
                del damaged[at : at + rng.randint(1, 8)]
            case 4:
                damaged[at:at] = rng.randbytes(rng.randint(1, 8))
            case 5:  # a number of up to ten bytes, or a size of up to 2 GB
                damaged[at : at + 1] = rng.choice(NUMBERS)
            case 6:
                other = rng.choice(others)
                start = rng.randint(0, len(other))
                damaged[at:at] = other[start : start + rng.randint(0, 40)]
            case _:
                damaged += rng.choice(others)
    return bytes(damaged[:100_000])


def requests_of(server: PeerServer) -> list[tuple[bytes, Callable[[bytes], Any]]]:
    """Valid requests, and what the server does with each kind."""
    leases = ((1, 9), (2, 9), (300, 2**40))
    fetch = FetchCall("m", 1, leases)
    pick = PickCall("m", 1, leases, (("visits", (b"alice", b"bob")), ("x", (b"",))))
    begin = BeginCall("m", 1, "beta", (range(3), range(7, 9)), 4, bytes(range(32)))
    propose = ProposeCall("m", 1, "127.0.0.1:1", (range(1), range(4, 90)), "fetch")
    return [
        (wire.put_hello_request(), server._hello),
        (wire.put_begin(begin), server._begin),
        (wire.put_fetch(fetch), server._fetch),
        (wire.put_pick(pick), server._pick),
        (wire.put_leases(InstalledCall("m", 1, leases)), server._installed),
        (wire.put_leases(GiveBackCall("m", 1, leases)), server._give_back),
        (wire.put_propose(propose), server._propose),
        (wire.put_query(QueryCall("visits", (b"alice", b"bob"))), server._query),
        (b"", server._show_figures),
        (wire.put_stream(StreamCall("m", 1, (1, 2, 3))), wire.read_stream),
        (wire.put_credit(1 << 20), wire.read_credit),
        (wire.put_scan(ScanCall((range(3), range(7, 9)))), wire.read_scan),
    ]


def replies() -> list[tuple[bytes, Callable[[bytes], Any]]]:
    """Valid replies, and what reads each kind."""
    service = Service()
    begin = service.begin(BeginCall("m", 1, "b", (range(40), range(50, 60)), 4))
    pieces = [
        Piece(PieceKind.HERE, 1, 9, b"x" * 50, bytes_total=50),
        Piece(PieceKind.MOVED, 2, 9, to="gamma"),
        Piece(PieceKind.FENCED, 3, 9, generation=4),
        Piece(PieceKind.NEVER, 3, 9),
    ]
    hello = service.hello()
    query = QueryReply(hello.schemas[0], (b"12345678", None))
    return [
        (wire.put_hello(hello), wire.read_hello),
        (wire.put_begin_reply(begin), wire.read_begin_reply),
        (wire.put_pieces(pieces, True), lambda data: wire.read_pieces(data, 2048, 1 << 20)),
        (wire.put_pick_reply(PickReply(b"x" * 50, (1, 2))), wire.read_pick_reply),
        (wire.put_released(((1, 2), (3, 4))), wire.read_released),
        (wire.put_query_reply(query), lambda data: wire.read_query_reply(data, 2)),
        (wire.put_figures({"a": [1]}), wire.read_figures),
        (wire.put_error(StateKitError("x")), wire.read_error),
    ]


def test_damaged_messages_are_read_or_refused_and_nothing_else() -> None:
    print("STATEKIT_FUZZ_SEED =", SEED)
    rng = random.Random(SEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with PeerServer(Service({1: b"x" * 100, 2: b""})) as server:
        cases = requests_of(server) + replies()
        valid = [data for data, _ in cases]
        for data, handle in cases:
            handle(data)
        passed = 0
        for number in range(FRAMES):
            data, handle = cases[number % len(cases)]
            damaged = mutated(rng, data, valid)
            try:
                handle(damaged)
                passed += 1
            except (wire.WireError, StateKitError):
                pass
            except BaseException:
                print("frame", number, damaged.hex())
                raise
        server._service.asked.clear()  # type: ignore[attr-defined]
    # Some damage makes no difference: unknown fields, other valid values. Most must be found.
    assert 0.05 * FRAMES < passed < 0.7 * FRAMES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB


def test_small_messages_do_not_become_large_objects() -> None:
    # 8 MB that say "leaf 1" four million times; a run of 2^32 leaves; a million empty blocks.
    column = b"\x01" * (4 << 20)
    for read, data in (
        (wire.read_fetch, b"\x0a\x01m\x1a" + b"\x80\x80\x80\x02" + column),  # leaf, packed
        (wire.read_pick, b"\x0a\x01m" + b"\x3a\x00" * (1 << 20)),  # key, each ""
    ):
        assert bytes_taken(read, data) < 30 * len(data)
    many = b"\x2a\x00" * (4 << 20)
    assert bytes_taken(wire.read_pieces, many) < 30 * len(many)


def bytes_taken(read: Any, data: bytes) -> int:
    """The memory that it takes to find out that a message breaks a rule."""
    tracemalloc.start()
    try:
        with pytest.raises(wire.WireError):
            read(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ---- A real server, and frames that no gRPC client sends


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        token=TOKEN, threads=4, streams=4, calls=32, connections=64, call_s=1.0
    ) as server:
        with PeerChannel(server.address, token=TOKEN) as channel:
            for _ in range(50):
                list(channel.fetch(FETCH))
        yield server


class Unharmed:
    """Checks that a server is the same afterwards as before."""

    def __init__(self, server: ServerProcess, rss_kb: int = 50_000) -> None:
        self._server = server
        self._rss_kb = rss_kb

    def __enter__(self) -> None:
        self._before = self._server.rss_kb, self._server.files

    def __exit__(self, kind: Any, *exc: object) -> None:
        if kind is not None:
            return
        server = self._server
        rss_kb, files = self._before
        assert server.is_running
        with PeerChannel(server.address, token=TOKEN) as channel:
            assert channel.hello().name == "alpha"
            [piece] = channel.fetch(FETCH)
            assert piece.blocks == b"\1" * 65536
        assert server.rss_kb < rss_kb + self._rss_kb
        # 4 + 4 of the pool, 4 of streams, two watches, and gRPC's own.
        assert server.threads < 40
        wait_until(lambda: server.files <= files + 8)


def send_and_leave(address: str, data: bytes, timeout_s: float = 0.0) -> None:
    """Connects, sends, perhaps waits for an answer or the end, and is gone."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
        try:
            connection.sendall(data)
            if timeout_s:
                connection.settimeout(timeout_s)
                connection.recv(4096)
        except (ConnectionError, TimeoutError):
            pass


def conversation(token: str = TOKEN, method: str = "Fetch") -> bytes:
    """A whole valid call."""
    body = grpc_message(wire.put_fetch(FETCH))
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, call_headers(method, token))
        + frame(DATA, END_STREAM, 1, body)
    )


def test_the_conversation_that_is_damaged_below_is_a_valid_one(server: ServerProcess) -> None:
    with raw_connection(server.address) as connection:
        connection.sendall(conversation()[len(PREFACE) + 9 :])
        received = b""
        while b"\1" * 1000 not in received:
            got = connection.recv(65536)
            assert got
            received += got


def test_damaged_connections_do_no_harm(server: ServerProcess) -> None:
    rng = random.Random(SEED)
    print("STATEKIT_FUZZ_SEED =", SEED)
    valid = conversation()
    others = [valid, conversation("x" * 20), conversation(method="Stream"), PREFACE]
    with Unharmed(server):
        for number in range(4000):
            data = mutated(rng, rng.choice(others), others)
            if number % 3 == 0:  # past the preface, else most end there
                data = PREFACE + frame(SETTINGS, 0, 0, b"") + data[len(PREFACE) + 9 :]
            send_and_leave(server.address, data, 0.02 if number % 20 == 0 else 0.0)


def test_frames_of_wrong_sizes_and_kinds_do_no_harm(server: ServerProcess) -> None:
    rng = random.Random(SEED)
    opening = PREFACE + frame(SETTINGS, 0, 0, b"")
    headers = frame(HEADERS, END_HEADERS, 1, call_headers("Fetch", TOKEN))
    body = wire.put_fetch(FETCH)
    with Unharmed(server):
        for data in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00" + bytes(500),  # TLS
            PREFACE[:-1],
            PREFACE + frame(SETTINGS, 0, 0, b"x" * 5),
            PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**32 - 1)),
            opening + frame(DATA, 0, 0, b"x"),
            opening + frame(DATA, 0, 1, b"x"),
            opening + frame(HEADERS, END_HEADERS, 2, call_headers("Fetch", TOKEN)),
            opening + frame(HEADERS, 0, 1, call_headers("Fetch", TOKEN)),  # never continued
            opening + frame(HEADERS, END_HEADERS, 1, b"\xff" * 200),
            opening + frame(HEADERS, END_HEADERS, 1, b"x", length=2**24 - 1),
            opening + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 0)),
            opening + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)) * 3,
            opening + frame(PING, 0, 0, b"x" * 8) * 200,
            opening + frame(PING, 0, 0, b"x" * 7),
            opening + headers + frame(RST_STREAM, 0, 1, bytes(4)),
            opening + headers + frame(DATA, END_STREAM, 1, b""),  # no request at all
            opening + headers + frame(DATA, END_STREAM, 1, b"\0\0"),
            opening + headers + frame(DATA, END_STREAM, 1, grpc_message(body, 2**31 - 1)),
            opening + headers + frame(DATA, END_STREAM, 1, grpc_message(body, 2**32 - 1)),
            opening + headers + frame(DATA, END_STREAM, 1, grpc_message(body, 3)),
            opening + headers + frame(DATA, END_STREAM, 1, b"\1" + grpc_message(body)[1:]),
            opening + headers + frame(DATA, END_STREAM, 1, grpc_message(body) * 50),
            opening + frame(HEADERS, END_HEADERS, 1, call_headers("Nonsense", TOKEN)),
        ):
            for cut in (len(data), rng.randrange(len(data))):
                send_and_leave(server.address, data[:cut], 0.1)
        # Calls that are opened and reset, many on one connection.
        flood = b"".join(
            frame(HEADERS, END_HEADERS, stream, call_headers("Fetch", TOKEN))
            + frame(RST_STREAM, 0, stream, bytes(4))
            for stream in range(1, 2000, 2)
        )
        send_and_leave(server.address, opening + flood, 0.2)


def test_random_frames_do_no_harm(server: ServerProcess) -> None:
    rng = random.Random(SEED + 1)
    with Unharmed(server):
        for _ in range(100):
            frames = [
                frame(
                    rng.choice((rng.randrange(10), rng.randrange(256))),
                    rng.randrange(256),
                    rng.choice((0, 1, 1, 3, rng.randrange(2**31))),
                    rng.randbytes(rng.choice((0, 4, 5, 8, 30, 200))),
                )
                for _ in range(30)
            ]
            opening = PREFACE + frame(SETTINGS, 0, 0, b"")
            start = frame(HEADERS, END_HEADERS, 1, call_headers("Stream", TOKEN))
            send_and_leave(server.address, opening + start + b"".join(frames))


def test_connections_above_the_limit_are_not_taken(server: ServerProcess) -> None:
    files = server.files
    open_ones = []
    try:
        for _ in range(150):
            open_ones.append(raw_connection(server.address))
        for connection in open_ones:
            with suppress(ConnectionError):
                connection.recv(1)  # settings, or the end: the server has handled it
        assert server.files < files + 64 + 16
    finally:
        for connection in open_ones:
            connection.close()
    with Unharmed(server):
        pass


def test_calls_that_send_nothing_do_not_keep_others_out() -> None:
    """Slow loris: every thread of the pool would wait for a request that never comes.

    If the server did not hurry, they would wait here for longer than anybody waits for an answer.
    """
    with (
        ServerProcess(token=TOKEN, threads=4, streams=4, calls=32, call_s=10 * LONG_S) as server,
        raw_connection(server.address) as connection,
    ):
        for stream in range(1, 61, 2):
            headers = frame(HEADERS, END_HEADERS, stream, call_headers("Fetch", TOKEN))
            connection.sendall(headers + frame(DATA, 0, stream, b"\0\0"))
        with PeerChannel(server.address, token=TOKEN, timeout_s=LONG_S) as channel:
            assert channel.hello().name == "alpha"


def test_a_byte_now_and_then_does_not_keep_a_call_alive() -> None:
    message = iter(grpc_message(bytes(1 << 20)))
    with (
        PeerServer(Service(), limits=Limits(call_s=0.4)) as server,
        raw_connection(server.address) as connection,
    ):
        connection.sendall(frame(HEADERS, END_HEADERS, 1, call_headers("Fetch")))

        def is_cut_off_after_one_more() -> bool:
            connection.sendall(frame(DATA, 0, 1, bytes([next(message)])))
            return server.figures()["cut_off"] == 1

        wait_until(is_cut_off_after_one_more)


@pytest.mark.parametrize("method", ["Fetch", "FetchLong"])
def test_a_peer_that_takes_nothing_is_cut_off(method: str) -> None:
    service = Service({leaf: bytes(500_000) for leaf in range(8)})
    many = wire.put_fetch(FetchCall("m", 1, tuple((leaf, 1) for leaf in range(8))))
    with PeerServer(service, limits=Limits(call_s=0.4)) as server:
        no_window = struct.pack(">HI", 4, 0)
        with raw_connection(server.address, no_window) as connection:
            connection.sendall(
                frame(HEADERS, END_HEADERS, 1, call_headers(method))
                + frame(DATA, END_STREAM, 1, grpc_message(many))
            )
            wait_until(lambda: server.figures()["cut_off"] == 1)
        wait_until(lambda: server._slots._value == server.limits.streams)
        assert len(server._running) == 0


def test_a_stream_that_gives_no_credit_and_no_sign_is_cut_off() -> None:
    service = Service({1: bytes(1000)})
    with PeerServer(service, limits=Limits(call_s=0.4)) as server:
        with raw_connection(server.address) as connection:
            opening = grpc_message(wire.put_stream(StreamCall("m", 1)))
            connection.sendall(
                frame(HEADERS, END_HEADERS, 1, call_headers("Stream")) + frame(DATA, 0, 1, opening)
            )
            wait_until(lambda: service.closed == 1)
        wait_until(lambda: server._slots._value == server.limits.streams)


class Flood(Service):
    """Sends one kind of piece for ever, whatever it was granted."""

    def __init__(self, blocks: bytes) -> None:
        super().__init__()
        self._blocks = blocks

    def stream(self, call: StreamCall, credits_: Iterator[int], /) -> Iterator[Piece]:
        piece = Piece(PieceKind.HERE, 1, 1, self._blocks, False, True, False, 1 << 29)
        yield from itertools.repeat(piece)


@pytest.mark.parametrize("size", [1 << 20, 1, 0])
def test_a_stream_that_sends_more_than_it_was_granted_is_ended(size: int) -> None:
    limits = Limits(message_bytes=2 << 20)
    with (
        PeerServer(Flood(bytes(size))) as server,
        PeerChannel(server.address, limits=limits) as channel,
    ):
        channel.hello()  # 2,048 leaves
        found: list[Piece] = []
        stream = channel.stream(StreamCall("m", 1), credit=3 << 20)
        with pytest.raises(PeerError, match=r"bytes in .* pieces of migration 'm'"):
            found.extend(itertools.islice(stream, 10_000))
        assert sum(len(piece.blocks) for piece in found) <= 5 << 20
        assert len(found) <= 2 * 2048 + 5
        assert next(stream, None) is None


def test_a_leaf_in_endless_pieces_is_refused() -> None:
    answers = _Answers("127.0.0.1:1", FETCH, 1 << 30)
    nothing = Piece(PieceKind.HERE, 1, 9, b"", is_last=False)
    assert answers.add(nothing) == []
    with pytest.raises(PeerError, match="leaf 1 in 2 pieces"):
        answers.add(nothing)


def test_pieces_that_are_held_do_not_keep_their_messages() -> None:
    answers = _Answers("127.0.0.1:1", FETCH, 1 << 30)
    small, large = (
        BufferSlice(bytes(1 << 20), 0, 5000),
        BufferSlice(bytes(1 << 20), 0, (1 << 20) - 50),
    )
    for blocks in (small, large):
        answers.add(Piece(PieceKind.HERE, 1, 9, blocks, is_last=False, bytes_total=1 << 21))
    assert [type(piece.blocks) for piece in answers._held] == [bytes, BufferSlice]


def test_many_strangers_at_once_do_no_harm(server: ServerProcess) -> None:
    stop = threading.Event()

    def bother() -> None:
        rng = random.Random(SEED + threading.get_ident())
        data = conversation("x" * 20)
        while not stop.is_set():
            send_and_leave(server.address, mutated(rng, data, [data]))

    with Unharmed(server):
        threads = [threading.Thread(target=bother) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            with PeerChannel(server.address, token=TOKEN) as channel:
                for _ in range(100):
                    assert len(list(channel.fetch(FETCH))) == 1
        finally:
            stop.set()
            for thread in threads:
                thread.join()
