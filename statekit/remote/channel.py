"""PeerChannel: makes the calls of PeerService to another process.

Every call may be repeated. So a call is repeated, with the same request, until it is answered or
`timeout_s` have passed. Then PeerLostError names the peer, what it was asked, and for how long. (If
nobody listens at that address, PeerLostError comes at once: there is nothing to wait for. But if
somebody has answered there before, the call is repeated.) A peer that refuses this process is not
asked again (PeerRefusedError). An error that the other process raised is raised here, with the same
class.

A channel has two connections. Bulk (streams, large leaves) has a connection of its own, because
nothing can overtake what is already in the buffers of a connection: a leaf that somebody waits for
must not stand behind megabytes that nobody waits for.

Threads may share a channel. Processes may not: gRPC does not survive fork(), so a child makes its
own channels (and is better started with spawn).
"""

import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar

from statekit import remote
from statekit.assignment import show_groups
from statekit.errors import (
    ClosedError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    StateKitError,
)
from statekit.native.buffers import unpinned
from statekit.protocol.calls import (
    CHUNK_BYTES,
    PROTOCOL,
    BeginCall,
    BeginReply,
    CopyCall,
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
    ShadeCall,
    ShadeReply,
    StreamCall,
)
from statekit.remote import wire
from statekit.remote.security import (
    TLS,
    TOKEN_KEY,
    bearer,
    check_client,
    check_token,
    parse_address,
)
from statekit.remote.watch import Watch

try:
    import grpc
except ImportError as error:
    raise remote.missing_package(error) from error

TIMEOUT_S = 10.0
_PAUSE_S, _PAUSE_S_MAX = 0.02, 0.5  # between two attempts: doubled each time, half of it random
_SLAMMED_MAX = 4  # a restart of the server may look like a refusal once or twice, but not so often
_RECONNECT_MS, _RECONNECT_MS_MAX = 50, 500
_NOBODY = ("Connection refused", "No such file or directory")  # signs that nobody listens
# The least average size of a leaf's pieces, if there are several: they are held until all are here.
_PIECE_BYTES_MIN = 4096
_METHOD = "/statekit.v1.Peer/"
T = TypeVar("T")

_UNAVAILABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # by a Watch, here or there
)
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
# gRPC reports a failed handshake as "unavailable", and only its text tells it from a peer that is
# down. A certificate that is wrong will be wrong the next time, too.
_HANDSHAKE = (
    "CERTIFICATE_VERIFY_FAILED",
    "certificate required",
    "CERTIFICATE_REQUIRED",
    "unknown ca",
    "UNKNOWN_CA",
    "bad certificate",
    "BAD_CERTIFICATE",
    "CERTIFICATE_UNKNOWN",
    "certificate expired",
    "CERTIFICATE_EXPIRED",
    "Peer name",
    "Hostname Verification",
    "WRONG_VERSION_NUMBER",
    "HANDSHAKE_FAILURE",
)


class PeerChannel:
    """Another process that can be called.

    address     as PeerServer.address gives it
    tls         for a server with TLS; tls.ca signed the server's certificate
    timeout_s   for each call, with all its attempts
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TLS | None = None,
        token: str | None = None,
        limits: Limits | None = None,
        timeout_s: float = TIMEOUT_S,
        insecure: bool = False,
    ) -> None:
        parsed = parse_address(address)
        check_client(parsed, tls, check_token(token), insecure)
        self.address = str(parsed)
        self.timeout_s = timeout_s
        self.limits = (limits or Limits()).check()
        self._metadata = ((TOKEN_KEY, bearer(token)),) if token else None
        self._has_tls = tls is not None
        self._leaves = wire.LEAVES_MAX
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._was_reached = False  # somebody has answered at that address before
        self._connect: Callable[[], Any] = lambda: _open(
            self.address, tls, self.limits, self.timeout_s
        )
        self._quick = self._connect()
        self._bulk: Any = None
        self._watch: Watch | None = None  # for calls with many messages
        self._methods = {
            name: self._quick.unary_unary(_METHOD + name)
            for name in (
                "Hello", "Begin", "Fetch", "Pick", "Shade", "Installed", "GiveBack", "Propose",
                "Query", "Figures",
            )
        }  # fmt: skip

    # ---- The calls

    def hello(self, *, timeout_s: float | None = None) -> PeerHello:
        """Who answers there. PeerRefusedError if it speaks another protocol."""
        data = self._ask("Hello", wire.put_hello_request(), "who it is", timeout_s)
        hello = self._read(wire.read_hello, data)
        if hello.protocol != PROTOCOL:
            raise PeerRefusedError(
                f"the peer at {self.address} speaks protocol {hello.protocol}, this process "
                f"protocol {PROTOCOL}. Update the older one of the two."
            )
        self._leaves = hello.key_groups * hello.subgroups
        return hello

    def begin(self, call: BeginCall, *, timeout_s: float | None = None) -> BeginReply:
        what = f"to begin migration {call.migration!r}"
        reply = self._read(
            wire.read_begin_reply,
            self._ask("Begin", wire.put_begin(call), what, timeout_s),
            self.limits.leaf_bytes,
        )
        self._leaves = reply.key_groups * reply.subgroups
        return reply

    def fetch(self, call: FetchCall, *, timeout_s: float | None = None) -> Iterator[Piece]:
        """The pieces of the leaves, in the order of the leases.

        The pieces of a leaf are given only when all of them are here. So if the connection breaks
        and a leaf is asked for again, the caller never sees a piece twice.
        """
        if 0 < len(call.leases) <= wire.ITEMS_MAX:
            return self._fetch(call, timeout_s)
        parts = _parts(call) if call.leases else iter(())
        return chain.from_iterable(self._fetch(part, timeout_s) for part in parts)

    def _fetch(self, call: FetchCall, timeout_s: float | None) -> Iterator[Piece]:
        leaf = call.leases[0][0]
        data = self._ask("Fetch", wire.put_fetch(call), f"for leaf {leaf}", timeout_s, leaf)
        pieces, more = self._read_pieces(data)
        answers = _Answers(self.address, call, self.limits.leaf_bytes)
        for piece in pieces:
            yield from answers.add(piece)
        if more:
            if answers.is_midway:
                raise _nonsense(self.address, "a part of a leaf in the answer to Fetch")
            yield from self._fetch_long(call, answers, timeout_s)
        answers.check_end()

    def _fetch_long(
        self, call: FetchCall, answers: "_Answers", timeout_s: float | None
    ) -> Iterator[Piece]:
        """The leaves that are left. Each message has timeout_s; a call that breaks is repeated."""
        tries = _Tries(self, timeout_s)
        while (leaf := answers.leaf) is not None:
            request = wire.put_fetch(call._replace(leases=answers.rest))
            messages = self._many("FetchLong", iter((request,)))
            try:
                while answers.leaf is not None:
                    data = self._next(messages, tries.limit_s)
                    if data is None:
                        raise _nonsense(self.address, f"nothing about leaf {answers.leaf}")
                    for piece in self._read_pieces(data)[0]:
                        yield from answers.add(piece)
                    tries.restart()
            except grpc.RpcError as error:
                answers.forget_midway()
                tries.after(error, f"for leaf {leaf}", leaf)
            finally:
                messages.cancel()

    def pick(self, call: PickCall, *, timeout_s: float | None = None) -> PickReply:
        """Single entries of leaves."""
        leaf = call.leases[0][0]
        what = f"for entries of leaf {leaf} and others"
        data = self._ask("Pick", wire.put_pick(call), what, timeout_s, leaf)
        return self._read(wire.read_pick_reply, data, self._leaves)

    def stream(self, call: StreamCall, *, credit: int = 0) -> "PeerStream":
        """Opens the background stream; credit: bytes of blocks that may come at once."""
        return PeerStream(self, call, credit)

    def shade(self, call: ShadeCall, *, timeout_s: float | None = None) -> ShadeReply:
        """PeerRefusedError if the peer is of a version that knows no shadows."""
        what = f"for a shadow of key-groups {show_groups(call.key_groups)}"
        reply = self._read(
            wire.read_shade_reply, self._ask("Shade", wire.put_shade(call), what, timeout_s)
        )
        self._leaves = reply.key_groups * reply.subgroups
        return reply

    def copy(
        self,
        call: CopyCall,
        *,
        is_over: Callable[[], bool] = lambda: False,
        timeout_s: float | None = None,
    ) -> Iterator[Piece]:
        """The pieces of one round, as they come. Never repeated: the next round brings the rest.

        Each message has timeout_s. What the source may send is not limited here: whoever reads
        stops when it has had enough. is_over: looked at with each message; a source that sends
        nothing for a while sends empty ones.
        """
        what = f"for round {call.round} of shadow {call.shadow!r}"
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        messages = self._many("Copy", iter((wire.put_copy(call),)))
        began = time.monotonic()
        try:
            while (data := self._next(messages, limit_s)) is not None and not is_over():
                yield from self._read_pieces(data)[0]
                began = time.monotonic()
        except grpc.RpcError as error:
            failed = self.fail(error, what)
            seconds = time.monotonic() - began
            raise failed or _given_up(self.address, what, seconds, error) from None
        finally:
            messages.cancel()

    def installed(
        self, call: InstalledCall, *, timeout_s: float | None = None
    ) -> tuple[tuple[int, int], ...]:
        """The leases that are released."""
        released: list[tuple[int, int]] = []
        for part in _parts(call):
            what = f"to release {len(part.leases)} leaves"
            data = self._ask("Installed", wire.put_leases(part), what, timeout_s)
            released += self._read(wire.read_released, data, self._leaves)
        return tuple(released)

    def give_back(self, call: GiveBackCall, *, timeout_s: float | None = None) -> None:
        for part in _parts(call):
            what = f"to take {len(part.leases)} leaves back"
            self._ask("GiveBack", wire.put_leases(part), what, timeout_s)

    def propose(self, call: ProposeCall, *, timeout_s: float | None = None) -> None:
        what = f"to fetch key-groups from {call.address}"
        self._ask("Propose", wire.put_propose(call), what, timeout_s)

    def query(self, call: QueryCall, *, timeout_s: float | None = None) -> QueryReply:
        data = self._ask("Query", wire.put_query(call), f"about state {call.state!r}", timeout_s)
        return self._read(wire.read_query_reply, data, len(call.keys))

    def scan(
        self, call: ScanCall, *, timeout_s: float | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """Leaves and their blocks, as they are at one moment. Leaves without entries are left out.

        Once something has come, the call is not repeated: a second answer would be of another
        moment.
        """
        what = f"for all of key-groups {show_groups(call.key_groups)}"
        tries = _Tries(self, timeout_s)
        is_seen = bytearray(self._leaves)
        while True:
            answers: _Answers | None = None  # of the leaf that is coming
            messages = self._many("Scan", iter((wire.put_scan(call),)))
            try:
                while (data := self._next(messages, tries.limit_s)) is not None:
                    for piece in self._read_pieces(data)[0]:
                        if answers is None:
                            if is_seen[piece.leaf] or piece.kind is not PieceKind.HERE:
                                raise _nonsense(self.address, f"leaf {piece.leaf} twice, or not")
                            is_seen[piece.leaf] = 1
                            lease = FetchCall("", 0, ((piece.leaf, 0),))
                            answers = _Answers(self.address, lease, self.limits.leaf_bytes)
                        if pieces := answers.add(piece):
                            answers = None
                            yield piece.leaf, b"".join(bytes(one.blocks) for one in pieces)
                if answers is not None:
                    answers.check_end()
                return
            except grpc.RpcError as error:
                if not any(is_seen):
                    tries.after(error, what, None)
                    continue
                failed = self.fail(error, what)
                raise failed or _given_up(self.address, what, tries.limit_s, error) from None
            finally:
                messages.cancel()

    def figures(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        return self._read(
            wire.read_figures, self._ask("Figures", b"", "for its figures", timeout_s)
        )

    # ---- Ending it

    def rest(self) -> None:
        """Nobody uses it for now. Whether somebody answered before does not matter then."""
        self._was_reached = False

    def close(self) -> None:
        """Ends the connections, and all calls that run: they raise ClosedError."""
        self._closed.set()
        if self._pid != os.getpid():
            return  # the connections belong to the parent
        with self._lock:
            bulk, watch = self._bulk, self._watch
            self._bulk = self._watch = None
        self._quick.close()
        if bulk is not None:
            bulk.close()
        if watch is not None:
            watch.close()

    def __enter__(self) -> "PeerChannel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PeerChannel to {self.address}{', closed' if self._closed.is_set() else ''}>"

    # ---- One call

    def _ask(
        self,
        method: str,
        request: bytes,
        what: str,
        timeout_s: float | None,
        leaf: int | None = None,
    ) -> bytes:
        call = self._methods[method]
        tries: _Tries | None = None
        left = self.timeout_s if timeout_s is None else timeout_s
        while True:
            self._check()
            began = time.monotonic()
            try:
                reply: bytes = call(request, left, self._metadata)
                self._was_reached = True
                return reply
            except grpc.RpcError as error:
                tries = tries or _Tries(self, timeout_s, began)
                left = tries.after(error, what, leaf)
            except ValueError:  # the channel was closed in between
                raise self._was_closed() from None

    def _check(self) -> None:
        if self._closed.is_set():
            raise self._was_closed()
        if self._pid != os.getpid():
            raise PeerError(
                f"the channel to {self.address} was made before fork(), and gRPC does not survive "
                "that. Make another PeerChannel in the child, or start children with spawn."
            )

    def _was_closed(self) -> ClosedError:
        return ClosedError(f"the channel to {self.address} is closed. Make another one.")

    def _read(self, read: Callable[..., T], data: bytes, *args: Any) -> T:
        try:
            return read(data, *args)
        except wire.WireError as error:
            raise _nonsense(self.address, str(error)) from None

    def _read_pieces(self, data: bytes) -> tuple[list[Piece], bool]:
        return self._read(wire.read_pieces, data, self._leaves, self.limits.leaf_bytes)

    def fail(self, error: Any, what: str) -> StateKitError | None:
        """What to raise for an error of gRPC; None if the next attempt may succeed."""
        if self._closed.is_set():
            return self._was_closed()
        for key, value in error.trailing_metadata() or ():
            if key == wire.ERROR_KEY:
                told = wire.read_error(value)
                told.add_note(f"(raised by the peer at {self.address}, asked {what})")
                return told
        code, details = error.code(), error.details() or ""
        if code in _REFUSED:
            return PeerRefusedError(
                f"the peer at {self.address} refuses this process: {details}. Give the token that "
                "the server was started with."
            )
        if code in _UNAVAILABLE:
            if any(sign in details for sign in _HANDSHAKE):
                return PeerRefusedError(
                    f"there is no secure connection to the peer at {self.address}: {details}. "
                    "Check ca, cert, key and server_name of TLS, and whether both sides use TLS."
                )
            return None
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in details:
            return None  # too many calls at once
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return PeerRefusedError(
                f"the peer at {self.address} does not know what it was asked: {what} ({details}). "
                "It is another program, or an older statekit: update it."
            )
        return PeerError(
            f"the peer at {self.address} could not do what it was asked: {what} "
            f"({code.name if code else 'no code'}: {details}). Look into its log."
        )

    def is_nobody(self, error: Any) -> bool:
        """Nobody listens at that address, and nobody has answered there before.

        A peer that has answered before may be about to come back, so it is waited for.
        """
        details = error.details() or ""
        return not self._was_reached and any(sign in details for sign in _NOBODY)

    def is_slammed(self, error: Any) -> bool:
        """The peer accepted the connection, and closed it before it said anything.

        In TLS 1.3 the client has finished the handshake before the server looks at the client's
        certificate. If the server rejects the certificate, a closed connection is all that the
        client learns. (A server that closes the connection during the handshake has too many
        connections at the moment: then it is tried again.)
        """
        details = error.details() or ""
        return (
            self._has_tls
            and "failed to connect" in details
            and ("Socket closed" in details or "reset by peer" in details)
            and "Handshake read failed" not in details
        )

    # ---- Many messages

    def _many(self, method: str, requests: Iterator[bytes]) -> Any:
        self._check()
        with self._lock:
            if self._bulk is None:
                self._bulk = self._connect()
                self._watch = Watch(self.timeout_s, "channel")
            bulk = self._bulk
        try:
            return bulk.stream_stream(_METHOD + method)(requests, metadata=self._metadata)
        except ValueError:
            raise self._was_closed() from None

    def _next(self, messages: Any, limit_s: float) -> bytes | None:
        """The next message, or None at the end. If none comes in time, the call is cancelled."""
        watch = self._watch
        if watch is None:
            raise self._was_closed()
        wait = watch.begin(messages.cancel, limit_s)
        try:
            message: bytes = next(messages)
            return message
        except StopIteration:
            return None
        finally:
            watch.end(wait)


class _Tries:
    """The attempts at one call: whether there is time for another, and the pause before it."""

    def __init__(
        self, channel: PeerChannel, timeout_s: float | None, began: float | None = None
    ) -> None:
        self._channel = channel
        self.limit_s = channel.timeout_s if timeout_s is None else timeout_s
        self._began = time.monotonic() if began is None else began
        self._pause_s = _PAUSE_S
        self._slammed = 0  # how many attempts in a row ended with a closed connection

    def restart(self) -> None:
        """Something has come: the time begins anew."""
        self._began = time.monotonic()
        self._pause_s = _PAUSE_S

    def after(self, error: Any, what: str, leaf: int | None) -> float:
        """Waits, and returns how long the next attempt may take. Raises if there is to be none."""
        failed = self._channel.fail(error, what)
        if failed is not None:
            raise failed from None
        if self._channel.is_nobody(error):
            raise PeerLostError(
                f"nobody listens at {self._channel.address} ({error.details()}); it was asked "
                f"{what}. Check the address, and that the process which serves there has started.",
                peer=self._channel.address,
                leaf=leaf,
                seconds=time.monotonic() - self._began,
            ) from None
        self._slammed = self._slammed + 1 if self._channel.is_slammed(error) else 0
        if self._slammed == _SLAMMED_MAX:
            raise PeerRefusedError(
                f"the peer at {self._channel.address} closes each connection as soon as it is made "
                f"({error.details()}). It does not accept this process' certificate, or wants "
                "one: check cert and key of TLS."
            ) from None
        pause = self._pause_s * (0.5 + random.random() / 2)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
        left = self._began + self.limit_s - time.monotonic() - pause
        if left <= 0:
            seconds = time.monotonic() - self._began
            raise _given_up(self._channel.address, what, seconds, error, leaf) from None
        self._channel._closed.wait(pause)
        return left


def _given_up(
    address: str, what: str, seconds: float, error: Any, leaf: int | None = None
) -> StateKitError:
    """The exception for a peer that was asked in vain for `seconds`."""
    details = error.details() or "no reason given"
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return PeerRefusedError(
            f"the peer at {address} has had too many calls for {seconds:.1f} s, and was not free "
            f"for this one: {what} ({details}). Ask less at once, or raise its Limits."
        )
    return PeerLostError(
        f"the peer at {address} was asked {what} and has not answered for {seconds:.1f} s "
        f"({details}). Check that it runs there, that the network lets this process reach it, and "
        "that both or neither use TLS.",
        peer=address,
        leaf=leaf,
        seconds=seconds,
    )


def _nonsense(address: str, what: str) -> PeerError:
    return PeerError(
        f"the peer at {address} sent {what}, which cannot be. Check its version and its log."
    )


def _parts(call: Any) -> Iterator[Any]:
    """A call about many leases as several calls, each of which fits into a message."""
    for start in range(0, max(len(call.leases), 1), wire.ITEMS_MAX):
        yield call._replace(leases=call.leases[start : start + wire.ITEMS_MAX])


class _Answers:
    """The answers to a FetchCall: held until a leaf is complete. Leaves must come in order."""

    def __init__(self, address: str, call: FetchCall, leaf_bytes: int) -> None:
        self._address = address
        self._leaf_bytes = leaf_bytes
        self._leases = call.leases
        self._at = 0  # the index of the lease whose turn it is
        self._held: list[Piece] = []
        self._bytes = 0

    @property
    def rest(self) -> tuple[tuple[int, int], ...]:
        """The leases that are not answered yet."""
        return self._leases[self._at :]

    @property
    def leaf(self) -> int | None:
        """The leaf whose turn it is; None: all are here."""
        return self._leases[self._at][0] if self._at < len(self._leases) else None

    @property
    def is_midway(self) -> bool:
        return bool(self._held)

    def add(self, piece: Piece) -> list[Piece]:
        """All pieces of the leaf if this is its last one; else []."""
        if piece.leaf != self.leaf:
            raise _nonsense(self._address, f"leaf {piece.leaf}, out of turn")
        self._bytes += len(piece.blocks)
        most = piece.bytes_total or self._leaf_bytes
        if self._bytes > min(most, self._leaf_bytes):
            raise _nonsense(self._address, f"more than {most} bytes of leaf {piece.leaf}")
        if not piece.is_last:
            self._held.append(piece._replace(blocks=unpinned(piece.blocks)))
            if len(self._held) > 1 + self._bytes // _PIECE_BYTES_MIN:
                raise _nonsense(self._address, f"leaf {piece.leaf} in {len(self._held)} pieces")
            return []
        self._held.append(piece)
        if self._bytes < piece.bytes_total:
            raise _nonsense(self._address, f"less than {most} bytes of leaf {piece.leaf}")
        found = self._held
        self._at += 1
        self.forget_midway()
        return found

    def forget_midway(self) -> None:
        self._held, self._bytes = [], 0

    def check_end(self) -> None:
        if self.leaf is not None or self._held:
            raise _nonsense(self._address, "not all of what it was asked for")


class PeerStream:
    """The background stream of a migration: iterate over its pieces, and grant how much may come.

    It ends when the source has sent everything, or raises: PeerLostError after timeout_s without
    any sign of life, PeerError if more comes than was granted. It does not reopen by itself,
    because only the caller knows which leaves it has by then. One thread iterates; any thread may
    call grant() and close().
    """

    def __init__(self, channel: PeerChannel, call: StreamCall, credit: int) -> None:
        self._channel = channel
        self._migration = call.migration
        self._grants: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._granted = credit
        self._received = self._count = 0  # bytes of blocks, pieces
        self._lock = threading.Lock()
        self._is_closed = False
        self._pieces: Iterator[Piece] = iter(())
        self._messages = channel._many("Stream", self._requests(wire.put_stream(call), credit))

    def _requests(self, opening: bytes, credit: int) -> Iterator[bytes]:
        """Runs in a thread of gRPC. Repeats the credit now and then: see _credits in server.py."""
        yield opening
        beat_s = min(self._channel.timeout_s, self._channel.limits.call_s) / 3
        total = credit
        while True:
            yield wire.put_credit(total)
            try:
                granted = self._grants.get(timeout=beat_s)
            except queue.Empty:
                continue
            if granted is None:
                return
            total = max(total, granted)

    def grant(self, bytes_total: int) -> None:
        """Bytes of blocks that may come in all. A smaller number than before changes nothing."""
        with self._lock:
            if bytes_total <= self._granted:
                return
            self._granted = bytes_total
        self._grants.put(bytes_total)

    def __iter__(self) -> "PeerStream":
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces, None)
        while piece is None:
            self._pieces = iter(self._receive())
            piece = next(self._pieces, None)
        return piece

    def _receive(self) -> list[Piece]:
        channel = self._channel
        began = time.monotonic()
        what = f"for the rest of migration {self._migration!r}"
        try:
            if self._is_closed:
                raise StopIteration
            data = channel._next(self._messages, channel.timeout_s)
        except grpc.RpcError as error:
            if self._is_closed:
                raise StopIteration from None
            self.close()
            failed = channel.fail(error, what)
            if failed is None:
                failed = _given_up(channel.address, what, time.monotonic() - began, error)
            raise failed from None
        if data is None:
            self.close()
            raise StopIteration
        pieces = channel._read_pieces(data)[0]
        self._check(pieces)
        return pieces

    def _check(self, pieces: list[Piece]) -> None:
        """The source must not make this process hold more than it has granted.

        There is room for one message more, which may come twice. The number of pieces is limited,
        too: a leaf comes once, in pieces of CHUNK_BYTES. With empty pieces, or pieces of one byte,
        there could be very many for the same credit.
        """
        self._received += sum(len(piece.blocks) for piece in pieces)
        self._count += len(pieces)
        limit = self._granted + self._channel.limits.message_bytes
        most = 2 * self._channel._leaves + self._received // CHUNK_BYTES
        if self._received > limit or self._count > most:
            self.close()
            raise _nonsense(
                self._channel.address,
                f"{self._received} bytes in {self._count} pieces of migration "
                f"{self._migration!r}, {self._granted} bytes of which it was asked for",
            )

    def close(self) -> None:
        """Nothing more is wanted: the source stops, and iterating ends."""
        self._is_closed = True
        self._grants.put(None)
        self._messages.cancel()

    def __enter__(self) -> "PeerStream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._is_closed else ""
        return f"<PeerStream of {self._migration!r} from {self._channel.address}{closed}>"


def _open(address: str, tls: TLS | None, limits: Limits, timeout_s: float) -> Any:
    """Opens a connection of its own, not one that gRPC shares between channels."""
    alive_ms = min(max(1000, int(timeout_s * 250)), 10_000)
    options = [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),  # peers are reached directly, whatever the environment says
        ("grpc.enable_retries", 0),  # we retry ourselves, since we know the deadline
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS_MAX),
        ("grpc.min_reconnect_backoff_ms", alive_ms),  # how long an attempt to connect may take
        # An idle connection is closed before the server does so, which gRPC would report on stderr.
        # (gRPC takes a second at least.)
        ("grpc.client_idle_timeout_ms", max(1000, int(limits.idle_s * 500))),
        # Pings find a peer that has vanished without closing its connection.
        ("grpc.keepalive_time_ms", alive_ms),
        ("grpc.keepalive_timeout_ms", alive_ms),
        ("grpc.http2.max_pings_without_data", 0),  # without limit
    ]
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    found = tls.read()
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))  # type: ignore[arg-type]
    credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.cert)
    return grpc.secure_channel(address, credentials, options=options)
