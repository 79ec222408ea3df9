"""Fault proxy: stands between a gRPC client and its server, and makes things go wrong.

    client ──> Proxy ──> server            messages: this file
    client ──> Relay ──> server            bytes: relay.py. Both in a row if one likes

It accepts any method and passes bytes on as they are, so it needs no .proto: on the wire a unary
call is a stream of one message. Only the faults need to know which methods have streams of requests
or of replies, because a second message of a unary call is no duplicate: it breaks the protocol.

Every message that arrives has a number and is in the log (number, call, method, direction, size). A
test first runs undisturbed and counts, then once for each message and fault:

    with Proxy(server.address) as proxy:
        run(proxy.address)
        for method, direction in proxy.kinds():
            for nth in range(1, proxy.count(method, direction) + 1):
                run(proxy.address, proxy.arm(Rule(Fault.DROP, nth, method, direction)))

Faults are what a network can do to TCP and HTTP/2, as seen from the ends:

- DROP: the call stands still from here on, until its caller gives up.
- BREAK: the caller is told at once that the connection is gone; this message does not arrive.
- DUPLICATE: for a unary request, the whole call reaches the server twice and the second answer
  counts; for a unary reply the same, but the first answer counts. In a stream the message comes
  twice.
- DELAY: it arrives later, even if its caller has given up since: late requests are delivered.
- REORDER: it arrives after the next message of its direction: of its stream, else of any call.
- CORRUPT: one byte is changed. TRUNCATE: only the first half arrives, as if that were all.
- HOLD: it stands still until the test lets it go on. HOLD_AFTER: it arrives, then its call stands
  still.

freeze() holds everything, partition() everything of one direction. Random mixes come from a seed.
"""

import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import Any, NamedTuple

import grpc

HOST = "127.0.0.1"
SECONDS_MAX = 120.0  # of anything that a test waits for
THREADS = 96
MESSAGE_BYTES_MAX = 64 << 20
_GIVEN_UP_SECONDS = 0.05  # counted off a deadline: it takes this long to learn that a call is over
_FOREVER_SECONDS = 1e6  # gRPC's way to say that there is no deadline

_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A server that comes back is found at once.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.so_reuseport", 0),
    # Two proxies of this process never share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)


class Direction(StrEnum):
    REQUEST = "request"
    REPLY = "reply"


class Fault(StrEnum):
    DROP = "drop"
    BREAK = "break"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    TRUNCATE = "truncate"
    HOLD = "hold"
    HOLD_AFTER = "hold after"


class Passed(NamedTuple):
    """A message that came to the proxy."""

    number: int
    call: int
    method: str  # its last part
    direction: Direction
    size: int
    fault: Fault | None


class Rule:
    """What happens to the nth (from 1) message of a kind, counted from when the rule is armed."""

    def __init__(
        self,
        fault: Fault,
        nth: int = 1,
        method: str | None = None,
        direction: Direction | None = None,
        *,
        seconds: float = SECONDS_MAX,
        at: int | None = None,
    ) -> None:
        self.fault = fault
        self.nth = nth
        self.method = method
        self.direction = direction
        self.seconds = seconds  # DELAY: how long; REORDER and HOLD: how long at most
        self.at = at  # CORRUPT: which byte; None: the middle one
        self.is_reached = threading.Event()  # the message is here
        self.release = threading.Event()  # DELAY, HOLD: go on now
        self.is_over = threading.Event()  # it has happened: the message has arrived, or never will
        self._seen = 0

    def matches(self, method: str, direction: Direction) -> bool:
        """Whether this is the message. To be called once for each message."""
        if self.method not in (None, method) or self.direction not in (None, direction):
            return False
        self._seen += 1
        return self._seen == self.nth

    def wait_reached(self, seconds: float = SECONDS_MAX) -> bool:
        return self.is_reached.wait(seconds)

    def wait_over(self, seconds: float = SECONDS_MAX) -> bool:
        """Waits until even a late message has arrived, if it was reached at all."""
        return not self.is_reached.is_set() or self.is_over.wait(seconds)

    def __repr__(self) -> str:
        kind = f"{self.method or 'any'} {self.direction or 'message'}"
        return f"<{self.fault} of {kind} {self.nth}>"


class _Broken(Exception):
    """The connection is gone, as far as the caller can see."""


class _Call:
    """One call on its way through."""

    def __init__(self, number: int, path: str, context: grpc.ServicerContext) -> None:
        self.number = number
        self.path = path
        self.method = path.rpartition("/")[2]
        self.context = context
        self.is_over = threading.Event()
        self.request = b""  # of a unary request
        self.rule: Rule | None = None  # what happens to a unary request
        self.gate: Rule | None = None  # what holds the replies
        self._on_end: list[Callable[[], object]] = []
        if not context.add_callback(self._end):
            self.is_over.set()

    @property
    def metadata(self) -> list[tuple[str, Any]]:
        return [
            (name, value)
            for name, value in self.context.invocation_metadata()
            if not name.startswith((":", "grpc-", "user-agent"))
        ]

    def at_end(self, function: Callable[[], object]) -> None:
        self._on_end.append(function)
        if self.is_over.is_set():
            function()

    def _end(self) -> None:
        self.is_over.set()
        for function in self._on_end:
            function()


class Proxy(grpc.GenericRpcHandler):
    """A context manager: stops when it is left, and ends every call that is held."""

    def __init__(
        self,
        upstream: str,
        *,
        streamed_requests: Collection[str] = (),
        streamed_replies: Collection[str] = (),
        seed: int = 0,
    ) -> None:
        self.upstream = upstream
        self._streamed_requests = frozenset(streamed_requests)
        self._streamed_replies = frozenset(streamed_replies)
        self._random = random.Random(seed)
        self._rates: dict[Fault, float] = {}
        self._random_seconds = 0.0
        self._lock = threading.Condition()
        self._rules: list[Rule] = []
        self._log: list[Passed] = []
        self._calls = 0
        self._unanswered = 0  # calls that the server has not answered at all
        self._delivered = Counter[Direction]()
        self._blocked: set[Direction] = set()
        self._is_stopped = threading.Event()
        self._channel = grpc.insecure_channel(upstream, options=_OPTIONS)
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="proxy"), (self,), options=_OPTIONS
        )
        self.port = self._server.add_insecure_port(f"{HOST}:0")
        self.address = f"{HOST}:{self.port}"
        self._server.start()

    # ---- What a test says

    def arm(self, *rules: Rule) -> Rule:
        """Arms rules from now on. Each acts once. Returns the first."""
        with self._lock:
            self._rules.extend(rules)
        return rules[0]

    def mix(self, rates: dict[Fault, float], seconds: float) -> None:
        """Faults at random from the seed, each with its probability; delays up to `seconds`."""
        with self._lock:
            self._rates, self._random_seconds = dict(rates), seconds

    def reset(self) -> None:
        """No rules, no log, nothing held."""
        self.heal()
        with self._lock:
            for rule in self._rules:
                rule.release.set()
            self._rules, self._log, self._rates = [], [], {}

    def freeze(self) -> None:
        """Nothing gets through, either way."""
        self.partition(*Direction)

    def partition(self, *directions: Direction) -> None:
        """Nothing gets through this way."""
        with self._lock:
            self._blocked.update(directions)

    def heal(self) -> None:
        """Messages that were held go on (thaw)."""
        with self._lock:
            self._blocked.clear()
            self._lock.notify_all()

    def wait_answered(self, seconds: float = SECONDS_MAX) -> bool:
        """Until no call is on its way to the server, nor being worked on there."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._unanswered, seconds)

    @property
    def log(self) -> list[Passed]:
        with self._lock:
            return [*self._log]

    def kinds(self) -> list[tuple[str, Direction]]:
        """The kinds of messages that came by, in the order of the first of each."""
        return [*dict.fromkeys((each.method, each.direction) for each in self.log)]

    def count(self, method: str | None = None, direction: Direction | None = None) -> int:
        return sum(
            method in (None, each.method) and direction in (None, each.direction)
            for each in self.log
        )

    def faults(self) -> int:
        return sum(each.fault is not None for each in self.log)

    def stop(self) -> None:
        self._is_stopped.set()
        self.reset()
        self._server.stop(None).wait()
        self._channel.close()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ---- A call

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        path = details.method

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._lock:
                self._calls += 1
                call = _Call(self._calls, path, context)
            return self._relay(call, requests)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _relay(self, call: _Call, requests: Iterator[bytes]) -> Iterator[bytes]:
        try:
            if call.method in self._streamed_requests:
                upward: Iterable[bytes] = self._stream_of_requests(call, requests)
            else:
                call.request = self._one_request(call, next(requests))
                upward = (call.request,)
            # A message with a fault arrives late, if at all, even if its caller is gone by then.
            seconds = self._seconds_left(call) if call.rule is None else SECONDS_MAX
            with self._lock:
                self._unanswered += 1
            replies = self._open(call, upward, seconds)
            yield from self._through(
                call,
                Direction.REPLY,
                self._answered(call, replies),
                call.method in self._streamed_replies,
            )
            call.context.set_trailing_metadata(replies.trailing_metadata() or ())
        except _Broken:
            call.context.abort(grpc.StatusCode.UNAVAILABLE, "the proxy broke the connection")
        except StopIteration:
            call.context.abort(grpc.StatusCode.CANCELLED, "no request came")
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):  # from the caller's side: it is over
                return
            call.context.set_trailing_metadata(error.trailing_metadata() or ())
            call.context.abort(error.code(), error.details() or "")

    def _answered(self, call: _Call, replies: Any) -> Iterator[bytes]:
        """Replies as they are; the first is proof that the request has arrived."""
        try:
            first = next(replies, None)
        finally:
            with self._lock:
                self._unanswered -= 1
            self._is_delivered(Direction.REQUEST)
            if call.rule is not None:
                call.rule.is_over.set()
            call.at_end(replies.cancel)  # not earlier: nobody could tell what the call has done
        if first is not None:
            yield first
            yield from replies

    def _seconds_left(self, call: _Call) -> float | None:
        seconds = call.context.time_remaining()
        return seconds if seconds is not None and seconds < _FOREVER_SECONDS else None

    def _open(self, call: _Call, requests: Iterable[bytes], seconds: float | None) -> Any:
        method = self._channel.stream_stream(call.path)
        return method(iter(requests), timeout=seconds, metadata=call.metadata)

    def _again(self, call: _Call, request: bytes) -> None:
        """Delivers a unary request once more, and takes no interest in the answer."""
        with suppress(grpc.RpcError):
            for _ in self._open(call, (request,), SECONDS_MAX):
                if self._is_stopped.is_set():
                    return

    def _one_request(self, call: _Call, message: bytes) -> bytes:
        """A unary request. Its rule is over when it was answered (_answered), or here if it never
        is.
        """
        rule = call.rule = self._arrived(call, Direction.REQUEST, len(message))
        if rule is not None and rule.fault is Fault.DUPLICATE:
            self._again(call, message)
        try:
            passed = self._delayed(call, Direction.REQUEST, message, rule)
            left = self._seconds_left(call)
            if call.is_over.is_set() or (left is not None and left < _GIVEN_UP_SECONDS):
                # The caller gave up while the message was on its way. The server does not know it.
                self._again(call, passed)
                raise _Broken
        except BaseException:
            if rule is not None:
                rule.is_over.set()
            raise
        if rule is not None and rule.fault is Fault.HOLD_AFTER:
            call.gate = rule
            rule.is_reached.set()
        return passed

    def _stream_of_requests(self, call: _Call, requests: Iterator[bytes]) -> Iterator[bytes]:
        # This is a thread of gRPC: an exception here would only be logged.
        try:
            yield from self._through(call, Direction.REQUEST, requests, True)
        except _Broken:
            call.context.cancel()
        except grpc.RpcError:
            return
        except Exception:
            if not call.is_over.is_set():  # else: the iterator's way to say that the call is over
                raise

    def _through(
        self, call: _Call, direction: Direction, messages: Iterator[bytes], is_stream: bool
    ) -> Iterator[bytes]:
        """Messages of one direction of one call, as they are to arrive."""
        while (message := next(messages, None)) is not None:
            rule = self._arrived(call, direction, len(message))
            fault = None if rule is None else rule.fault
            if direction is Direction.REPLY and call.gate is not None:
                self._wait(call, call.gate)
            try:
                if fault is Fault.REORDER and is_stream:
                    assert rule is not None
                    # gRPC does not close the iterator of a call that is over: it just drops it.
                    call.at_end(rule.is_over.set)
                    messages = ahead = _Ahead(messages)
                    later = ahead.wait(rule.seconds)
                    if later is not None:
                        yield self._overtaking(call, direction, later)
                elif fault is Fault.DUPLICATE and is_stream:
                    yield message
                elif fault is Fault.DUPLICATE:
                    self._again(call, call.request)
                if not (is_stream and fault is Fault.REORDER):
                    message = self._delayed(call, direction, message, rule)
            finally:
                if rule is not None:
                    rule.is_over.set()
            yield message
            self._is_delivered(direction)
            if fault is Fault.HOLD_AFTER:
                assert rule is not None
                rule.is_reached.set()
                self._wait(call, rule)

    def _overtaking(self, call: _Call, direction: Direction, message: bytes) -> bytes:
        """A message that overtakes another. It has a number, too, and may have a fault."""
        return self._delayed(call, direction, message, self._arrived(call, direction, len(message)))

    # ---- A message

    def _arrived(self, call: _Call, direction: Direction, size: int) -> Rule | None:
        """Notes a message, and says what is to become of it."""
        with self._lock:
            found = None
            for rule in self._rules:
                if rule.matches(call.method, direction):
                    found = found or rule
            found = found or self._at_random()
            fault = None if found is None else found.fault
            number = len(self._log) + 1
            self._log.append(Passed(number, call.number, call.method, direction, size, fault))
        if found is not None and found.fault is not Fault.HOLD_AFTER:
            found.is_reached.set()
        with self._lock:
            # A frozen network delivers later, even messages that the caller no longer waits for.
            self._lock.wait_for(lambda: direction not in self._blocked)
        return found

    def _at_random(self) -> Rule | None:
        drawn = self._random.random()
        for fault, rate in self._rates.items():
            if drawn < rate:
                return Rule(fault, seconds=self._random.random() * self._random_seconds)
            drawn -= rate
        return None

    def _delayed(
        self, call: _Call, direction: Direction, message: bytes, rule: Rule | None
    ) -> bytes:
        """The message as it is to arrive, when it is to arrive. _Broken if it is not to."""
        fault = None if rule is None else rule.fault
        if rule is None or fault in (Fault.DUPLICATE, Fault.HOLD_AFTER):
            return message
        if fault is Fault.BREAK:
            raise _Broken
        if fault is Fault.DROP:
            call.at_end(rule.release.set)
            rule.release.wait()
            raise _Broken
        if fault in (Fault.DELAY, Fault.HOLD):
            rule.release.wait(rule.seconds)  # also if the caller is gone: it arrives all the same
        elif fault is Fault.REORDER:
            with self._lock:
                before = self._delivered[direction]
                self._lock.wait_for(
                    lambda: self._delivered[direction] > before or self._is_stopped.is_set(),
                    rule.seconds,
                )
        elif fault is Fault.TRUNCATE:
            return message[: len(message) // 2]
        elif message:  # CORRUPT
            at = len(message) // 2 if rule.at is None else rule.at % len(message)
            return message[:at] + bytes([message[at] ^ 0x55]) + message[at + 1 :]
        return message

    def _is_delivered(self, direction: Direction) -> None:
        with self._lock:
            self._delivered[direction] += 1
            self._lock.notify_all()

    def _wait(self, call: _Call, rule: Rule) -> None:
        call.at_end(rule.release.set)
        rule.release.wait(rule.seconds)


class _Ahead:
    """An iterator that is read by a thread, so that one can wait for the next item with a limit."""

    _END = object()

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self._queue: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._read, name="proxy-ahead", daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._messages:
                self._queue.put(message)
        except Exception as error:
            self._queue.put(error)
        else:
            self._queue.put(self._END)

    def wait(self, seconds: float) -> bytes | None:
        """The next one, if one comes in time."""
        try:
            found = self._queue.get(timeout=seconds)
        except queue.Empty:
            return None
        if not isinstance(found, bytes):
            self._queue.put(found)  # the end is the last in the queue
            return None
        return found

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        found = self._queue.get()
        if isinstance(found, bytes):
            return found
        self._queue.put(found)
        if isinstance(found, Exception):
            raise found
        raise StopIteration
