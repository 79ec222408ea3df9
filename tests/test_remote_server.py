"""PeerServer and PeerChannel together, over real connections."""

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from remote_util import LONG_S, TOKEN, Authority, ServerProcess, Service, wait_until

from statekit import errors
from statekit.errors import (
    ArgumentError,
    ClosedError,
    FencedError,
    LeaseError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    SchemaError,
)
from statekit.protocol.calls import (
    CHUNK_BYTES,
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
    StreamCall,
)
from statekit.remote import wire
from statekit.remote.channel import PeerChannel, _Tries
from statekit.remote.security import TLS
from statekit.remote.server import PeerServer

LEAVES = {leaf: bytes([leaf]) * 65536 for leaf in range(8)}
QUICK = Limits(call_s=1.0)


@pytest.fixture
def service() -> Service:
    return Service(dict(LEAVES))


@pytest.fixture
def server(service: Service) -> Iterator[PeerServer]:
    with PeerServer(service) as server:
        yield server


@pytest.fixture
def channel(server: PeerServer) -> Iterator[PeerChannel]:
    with PeerChannel(server.address) as channel:
        yield channel


def leases(*leaves: int) -> tuple[tuple[int, int], ...]:
    return tuple((leaf, 9) for leaf in leaves)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """Grows by one with each call of a function."""
    calls: list[None] = []
    function = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


def is_in_grpc(thread: threading.Thread) -> bool:
    """Whether a thread waits inside gRPC."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if "/grpc/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def joined(pieces: Iterator[Piece]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for piece in pieces:
        found[piece.leaf] = found.get(piece.leaf, b"") + bytes(piece.blocks)
    return found


# ---- The calls


def test_every_call_reaches_the_service_and_its_answer_comes_back(
    service: Service, channel: PeerChannel
) -> None:
    calls: list[Any] = [
        BeginCall("m", 1, "beta", (range(3), range(7, 9)), 4, bytes(range(32))),
        InstalledCall("m", 1, leases(1, 2)),
        GiveBackCall("m", 1, leases(3)),
        ProposeCall("m", 1, "127.0.0.1:1", (range(1),), "fetch"),
        QueryCall("visits", (b"a", b"b")),
        PickCall("m", 1, leases(1, 2), (("visits", (b"a", b"b")),)),
    ]
    service.values[b"a"] = b"12345678"
    hello = channel.hello()
    assert (hello.name, hello.owned) == ("alpha", (range(64),))
    assert channel.begin(calls[0]).offer.grants == service.begin(calls[0]).offer.grants
    assert channel.installed(calls[1]) == leases(1, 2)
    channel.give_back(calls[2])
    channel.propose(calls[3])
    assert channel.query(calls[4]).values == (b"12345678", None)
    assert channel.pick(calls[5]) == PickReply(b"ab", (7,))
    assert channel.figures() == {"entries": 1, "nested": {"a": [1.5, None]}}
    assert service.asked == ["hello", calls[0], calls[0], *calls[1:], "figures"]


def test_small_leaves_come_in_one_call(service: Service, channel: PeerChannel) -> None:
    assert joined(channel.fetch(FetchCall("m", 1, leases(5, 3, 4)))) == {
        leaf: LEAVES[leaf] for leaf in (5, 3, 4)
    }
    assert len(service.asked) == 1


def test_absent_leaves_are_told_apart(service: Service, channel: PeerChannel) -> None:
    found = list(channel.fetch(FetchCall("m", 1, leases(1, 100, 2))))
    assert [piece.kind.name for piece in found] == ["HERE", "NEVER", "HERE"]


@pytest.mark.parametrize(
    "size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 1, 5_000_000]
)
def test_leaves_of_any_size_come_whole(service: Service, channel: PeerChannel, size: int) -> None:
    service.leaves[1] = os.urandom(size)
    found = joined(channel.fetch(FetchCall("m", 1, leases(0, 1, 2))))
    assert found == {leaf: service.leaves[leaf] for leaf in (0, 1, 2)}
    assert service.closed == len(service.asked) <= 2


def test_more_leases_than_fit_into_a_request_are_asked_for_in_parts(
    service: Service, channel: PeerChannel
) -> None:
    many = tuple((leaf, 1) for leaf in range(wire.ITEMS_MAX + 10))
    assert channel.installed(InstalledCall("m", 1, many)) == many
    assert [len(call.leases) for call in service.asked] == [wire.ITEMS_MAX, 10]
    assert channel.installed(InstalledCall("m", 1, ())) == ()


def test_a_fetch_that_is_closed_early_closes_the_services_one(
    service: Service, channel: PeerChannel
) -> None:
    service.leaves = {leaf: os.urandom(CHUNK_BYTES) for leaf in range(64)}
    pieces = channel.fetch(FetchCall("m", 1, leases(*range(64))))
    for _ in range(4):
        next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    wait_until(lambda: service.closed == 2)


# ---- Streams


def test_a_stream_sends_all_the_rest_the_wanted_ones_first(
    service: Service, channel: PeerChannel
) -> None:
    service.leaves[7] = os.urandom(3_000_000)
    with channel.stream(StreamCall("m", 1, (6, 5)), credit=1 << 30) as stream:
        found = joined(stream)
    assert found == service.leaves
    assert list(found) == [6, 5, 0, 1, 2, 3, 4, 7]


def test_a_stream_sends_no_more_than_it_was_granted(service: Service, channel: PeerChannel) -> None:
    got = 0
    with channel.stream(StreamCall("m", 1)) as stream:
        for granted in (65536, 3 * 65536, 8 * 65536):
            stream.grant(granted)
            stream.grant(10)  # less than before changes nothing
            while got < granted:
                got += len(next(stream).blocks)
            assert got == granted
        assert next(stream, None) is None


def test_small_leaves_share_a_message(service: Service, channel: PeerChannel) -> None:
    service.leaves = {leaf: bytes(100) for leaf in range(2048)}
    messages = []
    read = channel._read_pieces
    channel._read_pieces = lambda data: messages.append(read(data)) or messages[-1]  # type: ignore
    assert len(joined(channel.stream(StreamCall("m", 1), credit=1 << 30))) == 2048
    assert len(messages) < 1000


def test_a_stream_that_is_closed_ends_the_services_one(
    service: Service, channel: PeerChannel
) -> None:
    stream = channel.stream(StreamCall("m", 1), credit=65536)
    assert next(stream).leaf == 0
    stream.close()
    assert next(stream, None) is None
    wait_until(lambda: service.closed == 1)


def test_a_stream_may_be_closed_while_another_thread_waits_in_it(channel: PeerChannel) -> None:
    stream = channel.stream(StreamCall("m", 1), credit=0)
    found: list[Piece] = []
    thread = threading.Thread(target=lambda: found.extend(stream))
    thread.start()
    channel.hello()
    stream.close()
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert not found


def test_a_stream_that_waits_for_its_service_is_not_given_up(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs of life come meanwhile, and each starts the time-out of the target anew."""
    with (
        PeerServer(service, limits=QUICK) as server,
        PeerChannel(server.address, timeout_s=LONG_S) as channel,
    ):
        service.gate.clear()
        waits = count_calls(monkeypatch, PeerChannel, "_next")
        found: list[dict[int, bytes]] = []
        stream = channel.stream(StreamCall("m", 1), credit=1 << 30)
        thread = threading.Thread(target=lambda: found.append(joined(stream)))
        thread.start()
        wait_until(lambda: len(waits) > 4)
        service.gate.set()
        thread.join(LONG_S)
        assert len(found[0]) == 8


def test_a_stream_without_credit_is_kept_as_long_as_its_target_lives(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its target repeats its credit, and that starts the server's time-out anew."""
    with (
        PeerServer(service) as server,
        PeerChannel(server.address, limits=QUICK, timeout_s=LONG_S) as channel,
    ):
        credits_heard = count_calls(monkeypatch, wire, "read_credit")
        stream = channel.stream(StreamCall("m", 1), credit=65536)
        next(stream)
        wait_until(lambda: len(credits_heard) > 4)
        assert len(server._running) == 1
        stream.grant(1 << 30)
        assert len(joined(stream)) == 7


def test_an_error_in_a_stream_arrives(service: Service, channel: PeerChannel) -> None:
    def failing(*_: Any) -> Iterator[Piece]:
        yield Piece(PieceKind.HERE, 1, 1, b"x", bytes_total=1)
        raise FencedError("a later generation")

    service.stream = failing  # type: ignore[method-assign]
    stream = channel.stream(StreamCall("m", 1), credit=10)
    assert next(stream).blocks == b"x"
    with pytest.raises(FencedError, match="a later generation"):
        next(stream)


def test_a_fetch_overtakes_a_stream(service: Service, channel: PeerChannel) -> None:
    service.leaves |= {leaf: bytes(CHUNK_BYTES) for leaf in range(100, 200)}
    with channel.stream(StreamCall("m", 1), credit=1 << 30) as stream:
        next(stream)  # then nobody takes what comes: an answer behind it would never come
        found = channel.fetch(FetchCall("m", 1, leases(3)), timeout_s=LONG_S)
        assert joined(found) == {3: LEAVES[3]}


# ---- Errors


@pytest.mark.parametrize(
    "error",
    [
        LeaseError("not mine"),
        FencedError("over"),
        SchemaError("другая"),
        ArgumentError("no"),
        PeerLostError("gone", peer="x:1", leaf=3, seconds=2.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_service_is_raised_at_the_caller(
    service: Service, channel: PeerChannel, error: Exception
) -> None:
    service.error = error
    for call in (channel.hello, channel.figures):
        with pytest.raises(type(error)) as raised:
            call()
        assert str(raised.value) == str(error)
        assert vars(raised.value).items() >= vars(error).items()
    with pytest.raises(type(error)):
        list(channel.fetch(FetchCall("m", 1, leases(1))))
    assert len(service.asked) == 3, "it was no answer to try again after"


def test_what_is_no_error_of_statekit_stays_in_the_log(
    service: Service, channel: PeerChannel, caplog: pytest.LogCaptureFixture
) -> None:
    service.error = RuntimeError("the password is swordfish")
    with pytest.raises(PeerError) as raised:
        channel.hello()
    assert "swordfish" not in str(raised.value)
    assert "swordfish" in caplog.text
    number = str(raised.value).split("look for ")[1].split()[0]
    assert number in caplog.text


def test_a_peer_of_another_protocol_is_refused(
    server: PeerServer, channel: PeerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "put_hello_request", lambda: b"\x08\x63")
    with pytest.raises(PeerRefusedError, match="protocol 99"):
        channel.hello()


def test_a_bad_request_is_told_and_counted(server: PeerServer, channel: PeerChannel) -> None:
    channel.hello()  # from here on the server knows how many leaves there are
    with pytest.raises(PeerError, match="leaf 3000 of 2048"):
        list(channel.fetch(FetchCall("m", 1, leases(3000))))
    assert server.figures()["bad_requests"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        [Piece(PieceKind.NEVER, 2, 1)],
        [Piece(PieceKind.NEVER, 1, 1), Piece(PieceKind.NEVER, 1, 1)],
        [Piece(PieceKind.HERE, 1, 1, b"xx", bytes_total=1)],
        [Piece(PieceKind.HERE, 1, 1, b"x", bytes_total=2)],
        [Piece(PieceKind.HERE, 1, 1, b"x", is_last=False, bytes_total=2)],
        [],
    ],
    ids=["another leaf", "twice", "too long", "too short", "unfinished", "nothing"],
)
def test_an_answer_that_cannot_be_is_refused(
    service: Service, channel: PeerChannel, answer: list[Piece]
) -> None:
    service.fetch = lambda call: iter(answer)  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="cannot be"):
        list(channel.fetch(FetchCall("m", 1, leases(1))))


def test_a_leaf_above_the_limit_is_refused(service: Service, server: PeerServer) -> None:
    service.leaves[1] = bytes(3_000_000)
    with (
        PeerChannel(server.address, limits=Limits(leaf_bytes=2_000_000)) as channel,
        pytest.raises(PeerError, match="cannot be"),
    ):
        list(channel.fetch(FetchCall("m", 1, leases(1))))


# ---- Peers that are away


def test_where_nobody_listens_nothing_is_waited_for(tmp_path: Path) -> None:
    for address in ("127.0.0.1:1", f"unix:{tmp_path}/socket"):
        with PeerChannel(address, timeout_s=LONG_S) as channel:
            with pytest.raises(PeerLostError, match="nobody listens") as raised:
                list(channel.fetch(FetchCall("m", 1, leases(5))))
            assert (raised.value.peer, raised.value.leaf) == (address, 5)
            assert raised.value.seconds < LONG_S


def test_a_peer_that_does_not_answer_is_lost_after_its_time(
    service: Service, server: PeerServer
) -> None:
    """It accepts the call, and nothing comes: only the time-out ends it."""
    service.hold = threading.Event()
    with PeerChannel(server.address, timeout_s=0.5) as channel:
        with pytest.raises(PeerLostError, match="asked for leaf 5") as raised:
            list(channel.fetch(FetchCall("m", 1, leases(5))))
        service.hold.set()
    assert (raised.value.peer, raised.value.leaf) == (server.address, 5)
    assert raised.value.seconds >= 0.4


def test_a_channel_survives_a_restart_of_the_server(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens there for a while, but somebody has before."""
    server = PeerServer(service)
    tried = count_calls(monkeypatch, _Tries, "after")
    with PeerChannel(server.address, timeout_s=LONG_S) as channel:
        channel.hello()
        server.close()
        found: list[Any] = []
        call = InstalledCall("m", 1, leases(1))
        thread = threading.Thread(target=lambda: found.append(channel.installed(call)))
        thread.start()
        wait_until(lambda: len(tried) > 2)
        with PeerServer(service, server.address):
            thread.join(LONG_S)
    assert found == [leases(1)]


def test_a_large_leaf_comes_once_though_the_server_restarts_in_between(service: Service) -> None:
    service.leaves = {leaf: os.urandom(3 * CHUNK_BYTES) for leaf in range(6)}
    server = PeerServer(service)
    with PeerChannel(server.address) as channel:
        pieces = channel.fetch(FetchCall("m", 1, leases(*range(6))))
        found = [next(pieces) for _ in range(4)]
        server.close()
        with PeerServer(service, server.address):
            found += list(pieces)
    assert joined(iter(found)) == service.leaves
    assert [piece.leaf for piece in found] == sorted(piece.leaf for piece in found)


def test_a_stream_from_a_server_that_dies_is_lost() -> None:
    with ServerProcess() as server, PeerChannel(server.address, timeout_s=LONG_S) as channel:
        stream = channel.stream(StreamCall("m", 1), credit=65536)
        next(stream)
        server.kill()
        with pytest.raises(PeerLostError, match="migration 'm'"):
            next(stream)


def test_a_server_that_is_stopped_in_its_tracks_is_lost_and_found_again() -> None:
    with ServerProcess() as server, PeerChannel(server.address, timeout_s=LONG_S) as channel:
        stream = channel.stream(StreamCall("m", 1), credit=65536)
        next(stream)
        server.signal(signal.SIGSTOP)
        try:
            channel.timeout_s = 0.5  # only their time-out ends these calls
            for ask in (channel.hello, lambda: next(stream)):
                with pytest.raises(PeerLostError):
                    ask()
        finally:
            server.signal(signal.SIGCONT)
        assert channel.hello(timeout_s=LONG_S).name == "alpha"


def test_close_ends_calls_that_wait() -> None:
    with ServerProcess() as server:
        channel = PeerChannel(server.address, timeout_s=LONG_S)
        stream = channel.stream(StreamCall("m", 1), credit=65536)
        next(stream)
        server.signal(signal.SIGSTOP)
        try:
            raised: list[BaseException] = []

            def ask(call: Any) -> None:
                try:
                    call()
                except BaseException as error:
                    raised.append(error)

            threads = [
                threading.Thread(target=ask, args=(call,))
                for call in (channel.hello, lambda: next(stream))
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda: all(map(is_in_grpc, threads)))
            channel.close()
            for thread in threads:
                thread.join(LONG_S)
            assert [type(error) for error in raised] == [ClosedError, ClosedError]
        finally:
            server.signal(signal.SIGCONT)
        with pytest.raises(ClosedError):
            channel.hello()
        channel.close()
        assert "closed" in repr(channel)


def test_a_channel_from_before_a_fork_says_so(channel: PeerChannel) -> None:
    channel._pid -= 1
    with pytest.raises(PeerError, match="fork"):
        channel.hello()
    channel._pid += 1


# ---- Limits


def test_streams_leave_threads_to_other_calls(service: Service) -> None:
    limits = Limits(threads=1, streams=3)
    with (
        PeerServer(service, limits=limits) as server,
        PeerChannel(server.address, timeout_s=LONG_S) as channel,
    ):
        streams = [channel.stream(StreamCall("m", 1), credit=65536) for _ in range(3)]
        for stream in streams:
            next(stream)
        one_more = channel.stream(StreamCall("m", 1), credit=65536)
        with pytest.raises(PeerRefusedError, match="all 3 streams are taken"):
            next(one_more)
        assert channel.hello().name == "alpha"
        streams[0].close()
        wait_until(lambda: service.closed == 1)
        wait_until(lambda: server._slots._value == 1)
        assert next(channel.stream(StreamCall("m", 1), credit=65536)).leaf == 0


def test_calls_above_the_limit_are_told_to_come_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    service.figures = lambda: {"waited": release.wait(LONG_S)}  # type: ignore[method-assign]
    with (
        PeerServer(service, limits=Limits(threads=2, streams=1, calls=3)) as server,
        PeerChannel(server.address, timeout_s=LONG_S) as channel,
        PeerChannel(server.address, timeout_s=LONG_S) as other,
    ):
        threads = [threading.Thread(target=channel.figures) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server._server._state.active_rpc_count == 3)

        def ask_again_and_again() -> None:
            while True:
                with suppress(PeerLostError):  # the refusal did not even come in that time
                    other.hello(timeout_s=1.0)

        with pytest.raises(PeerRefusedError, match="too many calls"):
            ask_again_and_again()
        tried = count_calls(monkeypatch, _Tries, "after")
        found: list[str] = []
        threads.append(threading.Thread(target=lambda: found.append(other.hello().name)))
        threads[-1].start()
        wait_until(lambda: len(tried) > 2)
        release.set()
        for thread in threads:
            thread.join(LONG_S)
        assert found == ["alpha"]


@pytest.mark.parametrize("has_tls", [False, True])
def test_idle_connections_do_not_keep_a_peer_out(service: Service, has_tls: bool) -> None:
    """A peer has opened all connections that there may be, answers pings, and says nothing."""
    authority = Authority()
    node = authority.sign()
    tls = TLS(node.cert, node.key, authority.cert) if has_tls else None
    limits = Limits(connections=3, idle_s=0.5)
    with ExitStack() as stack:
        server = stack.enter_context(PeerServer(service, tls=tls, token=TOKEN, limits=limits))
        for _ in range(limits.connections):
            options = [("grpc.use_local_subchannel_pool", 1)]
            credentials = grpc.ssl_channel_credentials(authority.cert, node.key, node.cert)
            raw = (
                grpc.secure_channel(server.address, credentials, options)
                if has_tls
                else grpc.insecure_channel(server.address, options)
            )
            stack.callback(raw.close)
            grpc.channel_ready_future(raw).result(LONG_S)
        channel = PeerChannel(server.address, tls=tls, token=TOKEN, timeout_s=LONG_S)
        assert stack.enter_context(channel).hello().name == "alpha"


def test_a_channel_that_was_idle_connects_again(service: Service) -> None:
    with (
        PeerServer(service) as server,
        PeerChannel(server.address, limits=Limits(idle_s=0.1), timeout_s=LONG_S) as channel,
    ):
        channel.hello()
        states: list[Any] = []
        channel._quick.subscribe(states.append)
        wait_until(lambda: grpc.ChannelConnectivity.IDLE in states)
        assert channel.hello().name == "alpha"


def test_a_message_above_the_limit_is_refused(service: Service) -> None:
    with (
        PeerServer(service, limits=Limits(message_bytes=2 * CHUNK_BYTES)) as server,
        PeerChannel(server.address) as channel,
    ):
        with pytest.raises(PeerError, match="larger than max"):
            channel.query(QueryCall("visits", tuple(bytes(60_000) for _ in range(40))))
        assert channel.hello().name == "alpha"


# ---- The server itself


def test_health_is_what_probes_expect(service: Service) -> None:
    with PeerServer(service, token=TOKEN) as server, grpc.insecure_channel(server.address) as raw:
        health = health_pb2_grpc.HealthStub(raw)
        request = health_pb2.HealthCheckRequest()
        assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        server.is_serving = False
        assert health.Check(request).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_unix_socket_is_for_its_owner_only(service: Service, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/peer"
    with PeerServer(service, address) as server, PeerChannel(address) as channel:
        assert server.address == address
        assert channel.hello().name == "alpha"
        assert stat.S_IMODE((tmp_path / "peer").stat().st_mode) == 0o600


def test_ipv6_loopback_is_served(service: Service) -> None:
    try:
        server = PeerServer(service, "[::1]:0")
    except ArgumentError:
        pytest.skip("no IPv6 here")
    with server, PeerChannel(server.address) as channel:
        assert server.address.startswith("[::1]:")
        assert channel.hello().name == "alpha"


def test_a_port_that_is_taken_is_refused(server: PeerServer, service: Service) -> None:
    before = threading.active_count()
    with pytest.raises(ArgumentError, match="can listen"):
        PeerServer(service, server.address)
    wait_until(lambda: threading.active_count() <= before)


def test_a_closed_server_leaves_no_thread_behind(service: Service) -> None:
    before = set(threading.enumerate())
    server = PeerServer(service)
    with PeerChannel(server.address) as channel:
        channel.hello()
        next(channel.stream(StreamCall("m", 1), credit=65536))
        server.close(0)
        server.close()
    wait_until(lambda: not {t for t in threading.enumerate() if "statekit" in t.name} - before)
    assert "closed" in repr(server)


def test_every_error_class_has_a_code() -> None:
    assert all(hasattr(errors, name) for name in wire._CLASSES)
