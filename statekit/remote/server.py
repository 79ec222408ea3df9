"""PeerServer: answers the calls of other processes.

Whoever calls, it stays within Limits:

    threads   one pool of `threads + streams`, and one more thread for each running Stream or Scan.
              A call that sends many messages needs one of `streams` slots, and is refused if none
              is free: so `threads` threads are always left for the other calls
    time      a peer that sends nothing or takes nothing for `call_s` is cut off (watch.py). When
              many calls wait for their request, those that have waited longest are cut off sooner
    memory    messages above `message_bytes` are refused before they are read. Calls above `calls`
              and connections above `connections` are refused as soon as they come. A connection
              without a call is closed after `idle_s`, so that a peer that holds many connections
              does not keep others out for long
    access    the token is checked before anything of the call is read

All methods are registered as taking a stream of requests; on the wire there is no difference.
gRPC's own methods for single requests would wait for the request in a thread of the pool before
anybody could cancel them. And gRPC is given no (de)serializers or interceptors: it runs Python code
for each of them, and reports what they raise as a failure of its own.
"""

import collections
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from statekit import remote
from statekit.errors import (
    ArgumentError,
    FencedError,
    PeerError,
    PeerRefusedError,
    StateKitError,
)
from statekit.protocol.calls import (
    CHUNK_BYTES,
    PROTOCOL,
    FetchCall,
    GiveBackCall,
    InstalledCall,
    Limits,
    PeerService,
    Piece,
)
from statekit.remote import wire
from statekit.remote.security import (
    TLS,
    Address,
    bearer,
    check_server,
    check_token,
    parse_address,
    shows,
)
from statekit.remote.watch import Watch

try:
    import grpc
    from grpc_health.v1 import health_pb2
except ImportError as error:
    raise remote.missing_package(error) from error

SERVICE = "statekit.v1.Peer"
_HEALTH = "/grpc.health.v1.Health/Check"
_FETCH_BYTES = CHUNK_BYTES  # of blocks in the one message that answers Fetch
_PIECES = 1024  # at most in one message: there may be thousands of small leaves
_BEAT_S = 2.0  # a stream with nothing to send says so this often
_GRACE_S = 0.1  # for calls that are just being answered
_METADATA_BYTES = 16 * 1024
_log = logging.getLogger("statekit.remote")

# The codes for peers that are not written in Python: the code is all that they understand.
_CODES: tuple[tuple[type[StateKitError], Any], ...] = (
    (PeerRefusedError, grpc.StatusCode.PERMISSION_DENIED),
    (FencedError, grpc.StatusCode.FAILED_PRECONDITION),
    (PeerError, grpc.StatusCode.ABORTED),
    (ArgumentError, grpc.StatusCode.INVALID_ARGUMENT),
)

_Context = Any  # grpc.ServicerContext: gRPC comes without types
_Requests = Iterator[bytes]


def options(limits: Limits) -> list[tuple[str, int]]:
    """gRPC's settings for the sizes of messages and of metadata."""
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
    ]


def _server_options(limits: Limits) -> list[tuple[str, int]]:
    call_ms = max(1000, int(limits.call_s * 1000))
    idle_ms = max(1, int(limits.idle_s * 1000))
    return [
        *options(limits),
        ("grpc.so_reuseport", 0),  # else two servers may share a port, and each gets half the calls
        ("grpc.max_concurrent_streams", limits.calls),  # of one connection
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.server_handshake_timeout_ms", min(call_ms, max(idle_ms, 1000))),
        # Pings find a peer that has vanished without closing its connection, in 15 s at most.
        ("grpc.keepalive_time_ms", min(call_ms, 10_000)),
        ("grpc.keepalive_timeout_ms", min(call_ms, 5_000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Pings more often than channels send them are an attack.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 4),
        # The number of connections is limited. A peer that opens all of them and says nothing would
        # keep the others out. A peer that was idle for long opens another in a few milliseconds.
        ("grpc.max_connection_idle_ms", idle_ms),
    ]


class PeerServer:
    """Serves until close(). `address` is where it really listens, with the port.

    service    what answers. It may be called as soon as the server exists
    address    "127.0.0.1:0" (any free port), "[::1]:7000", "unix:/path"; see security.py
    insecure   let it listen outside this machine without TLS and token
    """

    def __init__(
        self,
        service: PeerService,
        address: str = "127.0.0.1:0",
        *,
        tls: TLS | None = None,
        token: str | None = None,
        limits: Limits | None = None,
        insecure: bool = False,
    ) -> None:
        parsed = parse_address(address)
        check_server(parsed, tls, check_token(token), insecure)
        self.limits = limits = (limits or Limits()).check()
        self._service = service
        self._bearer = bearer(token).encode() if token else None
        self._leaves, self._key_groups = wire.LEAVES_MAX, wire.KEY_GROUPS_MAX
        self._slots = threading.BoundedSemaphore(limits.streams)
        self._serving = True
        self._closing = threading.Lock()
        self._is_closed = False
        self._counting = threading.Lock()
        self._figures: collections.Counter[str] = collections.Counter()
        # Calls that wait for their request, and calls that wait for the peer to send or take more.
        self._opening = Watch(limits.call_s, "opening", crowd=limits.threads)
        self._running = Watch(limits.call_s, "running")
        self._handlers = self._make_handlers()
        self._refusal = _handler(self._refuse, is_stream=True)
        self._pool = ThreadPoolExecutor(
            limits.threads + limits.streams, thread_name_prefix="statekit-peer"
        )
        self._server = grpc.server(
            self._pool,
            handlers=[_Router(self)],
            options=_server_options(limits),
            maximum_concurrent_rpcs=limits.calls,
        )
        try:
            self.address = str(_bind(self._server, parsed, tls))
        except BaseException:
            self.address = str(parsed)
            self.close()
            raise
        self._server.start()

    # ---- What it is

    @property
    def is_serving(self) -> bool:
        """What the health service says."""
        return self._serving

    @is_serving.setter
    def is_serving(self, serving: bool) -> None:
        self._serving = bool(serving)

    def figures(self) -> dict[str, int]:
        """How many calls came of each kind, and how many were refused, cut off or failed."""
        with self._counting:
            found = dict(self._figures)
        return {**found, "cut_off": self._opening.expired + self._running.expired}

    def _count(self, name: str) -> None:
        with self._counting:
            self._figures[name] += 1

    def close(self, grace: float = _GRACE_S) -> None:
        """Lets nobody in any more, gives running calls `grace` seconds, and ends."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._serving = False
        self._server.stop(grace).wait()
        self._opening.close()
        self._running.close()
        # Do not wait for the pool: a service that hangs must not make its server hang.
        self._pool.shutdown(wait=False)

    def __enter__(self) -> "PeerServer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._is_closed else ""
        return f"<PeerServer at {self.address}{closed}>"

    # ---- From a call to the function that answers it

    def route(self, method: str, metadata: Iterable[tuple[str, Any]]) -> Any:
        """The handler of a call, chosen before anything of it is read; None: no such method."""
        handler = self._handlers.get(method)
        if handler is None:
            return None
        self._opening.hurry()
        # Health needs no token: it only says yes or no, reads nothing, and probes have no token.
        if self._bearer is None or method == _HEALTH or shows(self._bearer, metadata):
            return handler
        self._count("refused")
        return self._refusal

    def _make_handlers(self) -> dict[str, Any]:
        single: dict[str, Callable[[bytes], bytes]] = {
            "Hello": self._hello,
            "Begin": self._begin,
            "Fetch": self._fetch,
            "Pick": self._pick,
            "Shade": self._shade,
            "Installed": self._installed,
            "GiveBack": self._give_back,
            "Propose": self._propose,
            "Query": self._query,
            "Figures": self._show_figures,
        }
        streams = {
            "FetchLong": self._fetch_long,
            "Stream": self._stream,
            "Scan": self._scan,
            "Copy": self._copy,
        }
        return {
            **{
                f"/{SERVICE}/{name}": _handler(self._answering(name, answer), is_stream=False)
                for name, answer in single.items()
            },
            **{
                f"/{SERVICE}/{name}": _handler(self._streaming(name, answer), is_stream=True)
                for name, answer in streams.items()
            },
            _HEALTH: _handler(self._check_health, is_stream=False),
        }

    def _answering(self, name: str, answer: Callable[[bytes], bytes]) -> Callable[..., bytes]:
        """A call with one request and one reply."""
        opening, running = self._opening, self._running

        def handle(requests: _Requests, context: _Context) -> bytes:
            self._count(name)
            try:
                reply = answer(_receive(opening, requests, context))
            except (StateKitError, wire.WireError) as error:
                self._fail(context, error, name)
            except Exception as error:
                if not context.is_active():
                    raise  # gRPC's own exception for a peer that is gone
                self._fail(context, error, name)
            wait = running.begin(context.cancel)
            if not context.add_callback(lambda: running.end(wait)):
                running.end(wait)
            return reply

        return handle

    def _streaming(
        self, name: str, answer: Callable[[_Requests, _Context], Iterator[bytes]]
    ) -> Callable[..., Iterator[bytes]]:
        """A call with many replies: it takes one of the slots, and gives it back at the end."""
        running = self._running

        def handle(requests: _Requests, context: _Context) -> Iterator[bytes]:
            self._count(name)
            if not self._slots.acquire(blocking=False):
                self._count("refused")
                context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"all {self.limits.streams} streams are taken; come again",
                )
            replies: Iterator[bytes] = iter(())
            try:
                replies = answer(requests, context)
                for reply in replies:
                    wait = running.begin(context.cancel)
                    try:
                        yield reply
                    finally:
                        running.end(wait)
            except (StateKitError, wire.WireError) as error:
                self._fail(context, error, name)
            except Exception as error:
                if not context.is_active():
                    raise
                self._fail(context, error, name)
            finally:
                _close(replies)
                self._slots.release()

        return handle

    def _refuse(self, _requests: _Requests, context: _Context) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "this server wants another token")
        yield b""

    def _fail(self, context: _Context, error: Exception, name: str) -> NoReturn:
        """Tells the peer. A StateKitError is sent as it is; of others only that one happened."""
        if isinstance(error, wire.WireError):
            self._count("bad_requests")
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{name} was sent {error}")
        if isinstance(error, StateKitError):
            code = next((code for cls, code in _CODES if isinstance(error, cls)), None)
            told = wire.put_error(error)
            context.set_trailing_metadata(((wire.ERROR_KEY, told),))
            context.abort(code or grpc.StatusCode.FAILED_PRECONDITION, type(error).__name__)
        self._count("failed")
        number = uuid.uuid4().hex[:12]
        _log.error("%s failed (%s)", name, number, exc_info=error)
        context.abort(grpc.StatusCode.INTERNAL, f"{name} failed: look for {number} in the log")
        raise AssertionError("abort() raises")

    # ---- The calls

    def _check_health(self, _requests: _Requests, _context: _Context) -> bytes:
        status = health_pb2.HealthCheckResponse
        serving = status.SERVING if self._serving else status.NOT_SERVING
        told: bytes = status(status=serving).SerializeToString()
        return told

    def _hello(self, data: bytes) -> bytes:
        protocol = wire.read_hello_request(data)
        if protocol != PROTOCOL:
            raise PeerRefusedError(
                f"the caller speaks protocol {protocol}, this process protocol {PROTOCOL}. "
                "Update the older one of the two."
            )
        hello = self._service.hello()
        self._learn(hello.key_groups, hello.subgroups)
        return wire.put_hello(hello)

    def _begin(self, data: bytes) -> bytes:
        reply = self._service.begin(wire.read_begin(data, self._key_groups, self._leaves))
        self._learn(reply.key_groups, reply.subgroups)
        return wire.put_begin_reply(reply)

    def _learn(self, key_groups: int, subgroups: int) -> None:
        """Learns the geometry from the service's own reply, to check requests more closely."""
        self._key_groups, self._leaves = key_groups, key_groups * subgroups

    def _fetch(self, data: bytes) -> bytes:
        """The leaves that fit into one message, each whole. FetchLong sends the others."""
        call = wire.read_fetch(data, self._leaves)
        taken: list[Piece] = []
        whole = 0  # how many of these pieces are of leaves whose last piece was taken, too
        room = min(_FETCH_BYTES, self.limits.message_bytes // 2)
        pieces = self._service.fetch(call)
        try:
            for piece in pieces:
                # A leaf's first piece tells the leaf's size. So for most leaves that do not fit,
                # this is seen at once.
                is_first = whole == len(taken)
                if max(piece.bytes_total if is_first else 0, len(piece.blocks)) > room:
                    return wire.put_pieces(taken[:whole], more=True)
                room -= len(piece.blocks)
                taken.append(piece)
                if piece.is_last:
                    whole = len(taken)
        finally:
            _close(pieces)
        return wire.put_pieces(taken, more=False)

    def _pick(self, data: bytes) -> bytes:
        reply = self._service.pick(wire.read_pick(data, self._leaves))
        return wire.put_pick_reply(reply)

    def _fetch_long(self, requests: _Requests, context: _Context) -> Iterator[bytes]:
        call = wire.read_fetch(_receive(self._opening, requests, context), self._leaves)
        return self._send_long(call)

    def _send_long(self, call: FetchCall) -> Iterator[bytes]:
        pieces = self._service.fetch(call)
        taken: list[Piece] = []
        size = 0
        try:
            for piece in pieces:
                if taken and (size + len(piece.blocks) > CHUNK_BYTES or len(taken) == _PIECES):
                    yield wire.put_pieces(taken)
                    taken, size = [], 0
                taken.append(piece)
                size += len(piece.blocks)
            if taken:
                yield wire.put_pieces(taken)
        finally:
            _close(pieces)

    def _stream(self, requests: _Requests, context: _Context) -> Iterator[bytes]:
        call = wire.read_stream(_receive(self._opening, requests, context), self._leaves)
        return self._send(self._service.stream(call, _credits(self._running, requests, context)))

    def _scan(self, requests: _Requests, context: _Context) -> Iterator[bytes]:
        call = wire.read_scan(_receive(self._opening, requests, context), self._key_groups)
        return self._send(self._service.scan(call))

    def _shade(self, data: bytes) -> bytes:
        return wire.put_shade_reply(self._service.shade(wire.read_shade(data, self._key_groups)))

    def _copy(self, requests: _Requests, context: _Context) -> Iterator[bytes]:
        call = wire.read_copy(_receive(self._opening, requests, context), self._leaves)
        return self._send(self._service.copy(call))

    def _send(self, pieces: Iterator[Piece]) -> Iterator[bytes]:
        return _Outbox(pieces).messages(min(_BEAT_S, self.limits.call_s / 3), self.limits.call_s)

    def _installed(self, data: bytes) -> bytes:
        call = wire.read_leases(data, InstalledCall, self._leaves)
        return wire.put_released(self._service.installed(call))

    def _give_back(self, data: bytes) -> bytes:
        self._service.give_back(wire.read_leases(data, GiveBackCall, self._leaves))
        return wire.DONE

    def _propose(self, data: bytes) -> bytes:
        self._service.propose(wire.read_propose(data, self._key_groups))
        return wire.DONE

    def _query(self, data: bytes) -> bytes:
        return wire.put_query_reply(self._service.query(wire.read_query(data)))

    def _show_figures(self, _data: bytes) -> bytes:
        return wire.put_figures(self._service.figures())


class _Router(grpc.GenericRpcHandler):  # type: ignore[misc]
    """gRPC asks it for the function that answers a call."""

    def __init__(self, server: PeerServer) -> None:
        self._route = server.route

    def service(self, handler_call_details: Any) -> Any:
        return self._route(handler_call_details.method, handler_call_details.invocation_metadata)


def _handler(function: Callable[..., Any], *, is_stream: bool) -> Any:
    if is_stream:
        return grpc.stream_stream_rpc_method_handler(function)
    return grpc.stream_unary_rpc_method_handler(function)


def _bind(server: Any, address: Address, tls: TLS | None) -> Address:
    """Listens there, and returns the address with its port."""
    try:
        if tls is None:
            port = server.add_insecure_port(str(address))
        else:
            found = tls.read()
            credentials = grpc.ssl_server_credentials(
                [(found.key, found.cert)],
                root_certificates=found.ca,
                require_client_auth=found.ca is not None,
            )
            port = server.add_secure_port(str(address), credentials)
    except ArgumentError:
        raise  # it is about the certificates
    except (RuntimeError, ValueError) as error:
        port, reason = 0, str(error)
    else:
        reason = "no reason given"
    if port == 0:
        raise ArgumentError(
            f"no server can listen at {str(address)!r} ({reason}). Use a port that is free "
            "(port 0 finds one), an address of this machine, and a certificate with its key."
        )
    if address.port is None:
        os.chmod(address.host, 0o600)  # in time: nobody is let in before start()
    return address.at(port)


def _receive(watch: Watch, requests: _Requests, context: _Context) -> bytes:
    """The next request. If the wait ends early, gRPC raises its own exception and handles it."""
    wait = watch.begin(context.cancel)
    try:
        return next(requests)
    except StopIteration:
        raise wire.WireError("no request") from None
    finally:
        watch.end(wait)


def _credits(watch: Watch, requests: _Requests, context: _Context) -> Iterator[int]:
    """How much a stream may send in all: growing numbers. Ends when the peer has gone or closed.

    A channel that has no more credit to give repeats the last number, so that it is not cut off.
    """
    granted = 0
    while True:
        try:
            total = wire.read_credit(_receive(watch, requests, context))
        except (wire.WireError, grpc.RpcError):
            return
        if total > granted:
            granted = total
            yield total


def _close(iterator: Iterator[Any]) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


class _Outbox:
    """Stands between the service, which makes pieces in a thread of its own, and the stream.

    The pieces that are ready when the last message has gone make up the next one. So messages are
    large when the network is the slower side, and nothing waits when the network is the faster
    side. And a service that waits or works for long does not keep the stream from showing that it
    is alive.

    The deque is shared without a lock, because there may be many small leaves. A side that finds it
    empty or full sets its flag (_is_empty, _is_full) before it looks once more. The other side
    checks that flag after each change. So one of the two always notices the other.
    """

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self._queue: collections.deque[Piece] = collections.deque()
        self._made = self._taken = 0  # bytes; each number is written by one side only
        self._change = threading.Condition(threading.Lock())
        self._is_full = self._is_empty = False  # the service waits for room, the stream for pieces
        self._ended = False  # set by the service
        self._closed = False  # set by the stream
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._make, name="statekit-stream", daemon=True)

    def _make(self) -> None:
        try:
            for piece in self._pieces:
                self._queue.append(piece)
                self._made += len(piece.blocks)
                if self._is_empty:
                    self._notify()
                # One message is being sent and one is ready: more would only take memory.
                if self._made - self._taken >= 2 * CHUNK_BYTES or len(self._queue) >= 2 * _PIECES:
                    self._wait_for_room()
                if self._closed:
                    break
        except BaseException as error:
            self._error = error
        finally:
            try:
                _close(self._pieces)
            except Exception:
                _log.exception("a stream of leaves did not end as it should")
            self._ended = True
            self._notify()

    def _notify(self) -> None:
        with self._change:
            self._change.notify_all()

    def _wait_for_room(self) -> None:
        with self._change:
            self._is_full = True
            while not self._closed and (
                self._made - self._taken >= CHUNK_BYTES or len(self._queue) >= _PIECES
            ):
                self._change.wait()
            self._is_full = False

    def messages(self, beat_s: float, patience_s: float) -> Iterator[bytes]:
        self._thread.start()
        try:
            while self._queue or self._wait_for_pieces(beat_s):
                yield wire.put_pieces(self._take())
        finally:
            self._closed = True
            self._notify()
            # The slot is not free before the thread has ended. But a thread that hangs is not
            # waited for longer than this.
            self._thread.join(patience_s)
            self._queue.clear()
        if self._error is not None:
            raise self._error

    def _wait_for_pieces(self, beat_s: float) -> bool:
        """False at the end. True if a piece is there, or none has come for beat_s."""
        until = time.monotonic() + beat_s
        with self._change:
            self._is_empty = True
            while not self._queue and not self._ended:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._change.wait(left)
            self._is_empty = False
            return bool(self._queue) or not self._ended

    def _take(self) -> list[Piece]:
        """The pieces of the next message; [] if no piece is ready."""
        taken: list[Piece] = []
        size = 0
        while self._queue and len(taken) < _PIECES:
            size += len(self._queue[0].blocks)
            if size > CHUNK_BYTES and taken:
                size -= len(self._queue[0].blocks)
                break
            taken.append(self._queue.popleft())
        self._taken += size
        if self._is_full:
            self._notify()
        return taken
