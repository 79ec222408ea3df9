"""The fault proxy and the relay do to a toy service exactly what they say."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest
from proxy import Direction, Fault, Proxy, Rule
from relay import Relay, Way
from remote_util import wait_until

REQUEST, REPLY = Direction
LONG = 120.0  # a time-out that is not meant to run out

_STATUS = grpc.StatusCode


class Toy(grpc.GenericRpcHandler):
    """echo: a message; count: n -> n messages; sum: many -> one; talk: as they come."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._change = threading.Condition()
        pool = ThreadPoolExecutor(16)
        self.server = grpc.server(pool, (self,), options=(("grpc.so_reuseport", 0),))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return {
            "/toy/Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "/toy/Count": grpc.unary_stream_rpc_method_handler(self.count),
            "/toy/Talk": grpc.stream_stream_rpc_method_handler(self.talk),
        }.get(details.method)

    def note(self, message: bytes) -> None:
        with self._change:
            self.got.append(message)
            self._change.notify_all()

    def wait_got(self, count: int) -> None:
        with self._change:
            assert self._change.wait_for(lambda: len(self.got) >= count, LONG), self.got

    def echo(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        self.note(message)
        self.may_answer.wait(LONG)
        if message == b"fail":
            context.set_trailing_metadata((("why", "because"), ("raw-bin", b"\x00\x01")))
            context.abort(_STATUS.FAILED_PRECONDITION, "asked to")
        said = dict(context.invocation_metadata()).get("say", "")
        return b"%s %d %s" % (message, len(self.got), str(said).encode())

    def count(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self.note(message)
        yield from (b"%d" % number for number in range(int(message)))

    def talk(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            self.note(message)
            yield message.upper()


@pytest.fixture
def toy() -> Iterator[Toy]:
    toy = Toy()
    yield toy
    toy.server.stop(None).wait()


@pytest.fixture
def proxy(toy: Toy) -> Iterator[Proxy]:
    streamed = {"streamed_requests": ("Talk",), "streamed_replies": ("Count", "Talk")}
    with Proxy(toy.address, **streamed) as proxy:
        yield proxy


class Client:
    def __init__(self, address: str) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        self.channel = grpc.insecure_channel(address, options=options)
        self._echo = self.channel.unary_unary("/toy/Echo")

    def echo(self, message: bytes, **metadata: str) -> bytes:
        answer: bytes = self._echo(message, timeout=LONG, metadata=[*metadata.items()])
        return answer

    def begin(self, message: bytes) -> "grpc.Future[bytes]":
        """The same, without waiting for the answer."""
        return self._echo.future(message, timeout=LONG)

    def count(self, number: int, seconds: float = LONG) -> list[bytes]:
        return [*self.channel.unary_stream("/toy/Count")(b"%d" % number, timeout=seconds)]

    def talk(self, *messages: bytes, seconds: float = LONG) -> list[bytes]:
        return [*self.channel.stream_stream("/toy/Talk")(iter(messages), timeout=seconds)]


@pytest.fixture
def client(proxy: Proxy) -> Iterator[Client]:
    client = Client(proxy.address)
    yield client
    client.channel.close()


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    code: grpc.StatusCode = error.value.code()
    return code


def test_all_kinds_of_calls_pass_and_are_logged(proxy: Proxy, client: Client) -> None:
    assert client.echo(b"a", say="x") == b"a 1 x"
    assert client.count(3) == [b"0", b"1", b"2"]
    assert client.talk(b"a", b"bc") == [b"A", b"BC"]
    assert [each.number for each in proxy.log] == [*range(1, len(proxy.log) + 1)]
    assert proxy.kinds()[:3] == [("Echo", REQUEST), ("Echo", REPLY), ("Count", REQUEST)]
    assert proxy.count("Count", REPLY) == 3
    assert [each.size for each in proxy.log if each[2:4] == ("Talk", REQUEST)] == [1, 2]
    assert (proxy.count("Talk"), proxy.count(direction=REPLY), proxy.faults()) == (4, 6, 0)


def test_errors_of_the_server_pass_with_what_they_carry(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as error:
        client.echo(b"fail")
    assert code_of(error) is _STATUS.FAILED_PRECONDITION
    assert error.value.details() == "asked to"
    trailing = dict(error.value.trailing_metadata())
    assert (trailing["why"], trailing["raw-bin"]) == ("because", b"\x00\x01")
    with pytest.raises(grpc.RpcError) as error:
        client.channel.unary_unary("/toy/None")(b"", timeout=LONG)
    assert code_of(error) is _STATUS.UNIMPLEMENTED


def test_a_server_that_is_gone_is_unavailable_at_once(toy: Toy, client: Client) -> None:
    client.echo(b"a")
    toy.server.stop(None).wait()
    with pytest.raises(grpc.RpcError) as error:
        client.echo(b"a")
    assert code_of(error) is _STATUS.UNAVAILABLE


@pytest.mark.parametrize(("direction", "arrived"), [(REQUEST, 0), (REPLY, 1)])
def test_a_dropped_message_is_silence_until_the_caller_gives_up(
    direction: Direction, arrived: int, toy: Toy, proxy: Proxy, client: Client
) -> None:
    rule = proxy.arm(Rule(Fault.DROP, 1, "Echo", direction))
    call = client.begin(b"a")
    assert rule.wait_reached()
    assert client.echo(b"b") == b"b %d " % (arrived + 1)
    assert not call.done()
    call.cancel()  # as its time-out would do
    assert len(toy.got) == arrived + 1


@pytest.mark.parametrize(("direction", "arrived"), [(REQUEST, 0), (REPLY, 1)])
def test_a_broken_connection_is_told_at_once(
    direction: Direction, arrived: int, toy: Toy, proxy: Proxy, client: Client
) -> None:
    proxy.arm(Rule(Fault.BREAK, 1, "Echo", direction))
    with pytest.raises(grpc.RpcError) as error:
        client.echo(b"a")
    assert code_of(error) is _STATUS.UNAVAILABLE
    assert len(toy.got) == arrived


def test_in_a_stream_what_follows_a_dropped_message_is_held_too(
    proxy: Proxy, client: Client
) -> None:
    rule = proxy.arm(Rule(Fault.DROP, 2, "Count", REPLY))
    call = client.channel.unary_stream("/toy/Count")(b"5", timeout=LONG)
    assert next(call) == b"0"
    assert rule.wait_reached()
    client.echo(b"other calls are not held")
    assert proxy.count("Count", REPLY) == 2
    call.cancel()


def test_a_duplicate_reaches_the_server_twice(toy: Toy, proxy: Proxy, client: Client) -> None:
    proxy.arm(Rule(Fault.DUPLICATE, 1, "Echo", REQUEST))
    assert client.echo(b"a") == b"a 2 "  # the second answer
    proxy.arm(Rule(Fault.DUPLICATE, 1, "Echo", REPLY))
    assert client.echo(b"b") == b"b 3 "  # the first one
    assert toy.got == [b"a", b"a", b"b", b"b"]
    proxy.arm(Rule(Fault.DUPLICATE, 1, "Count", REQUEST), Rule(Fault.DUPLICATE, 2, "Count", REPLY))
    assert client.count(3) == [b"0", b"1", b"1", b"2"]
    assert toy.got[4:] == [b"3", b"3"]
    proxy.arm(Rule(Fault.DUPLICATE, 2, "Talk", REQUEST))
    assert client.talk(b"x", b"y") == [b"X", b"Y", b"Y"]


def test_a_late_request_arrives_when_its_caller_is_gone(
    toy: Toy, proxy: Proxy, client: Client
) -> None:
    rule = proxy.arm(Rule(Fault.DELAY, 1, "Echo", REQUEST))
    call = client.begin(b"late")
    assert rule.wait_reached()
    call.cancel()
    assert client.echo(b"next") == b"next 1 "
    rule.release.set()
    toy.wait_got(2)
    assert toy.got == [b"next", b"late"]


def test_a_delay_ends_by_itself(proxy: Proxy, client: Client) -> None:
    proxy.arm(Rule(Fault.DELAY, 1, "Echo", REPLY, seconds=0.05))
    assert client.echo(b"a") == b"a 1 "


def test_reordered_calls_arrive_in_the_other_order(toy: Toy, proxy: Proxy, client: Client) -> None:
    rule = proxy.arm(Rule(Fault.REORDER, 1, "Echo", REQUEST))
    first = client.channel.unary_unary("/toy/Echo").future(b"first", timeout=LONG)
    assert rule.wait_reached()
    client.echo(b"second")
    first.result()
    assert toy.got == [b"second", b"first"]


def test_reordered_messages_of_a_stream(proxy: Proxy, client: Client) -> None:
    proxy.arm(Rule(Fault.REORDER, 2, "Count", REPLY))
    assert client.count(4) == [b"0", b"2", b"1", b"3"]
    proxy.arm(Rule(Fault.REORDER, 4, "Count", REPLY, seconds=0.05))  # the last: nothing follows
    assert client.count(4) == [b"0", b"1", b"2", b"3"]
    proxy.arm(Rule(Fault.REORDER, 1, "Talk", REQUEST), Rule(Fault.REORDER, 3, "Talk", REQUEST))
    assert client.talk(b"a", b"b", b"c", b"d") == [b"B", b"A", b"D", b"C"]


def test_damaged_messages(toy: Toy, proxy: Proxy, client: Client) -> None:
    proxy.arm(Rule(Fault.CORRUPT, 1, "Echo", REQUEST, at=0))
    client.echo(b"abcd")
    proxy.arm(Rule(Fault.CORRUPT, 1, "Echo", REQUEST))
    client.echo(b"abcd")
    proxy.arm(Rule(Fault.TRUNCATE, 1, "Echo", REQUEST))
    client.echo(b"abcd")
    flipped = [bytes([byte ^ 0x55]) for byte in b"ac"]
    assert toy.got == [flipped[0] + b"bcd", b"ab" + flipped[1] + b"d", b"ab"]


@pytest.mark.parametrize(
    ("fault", "direction", "got"),
    [
        (Fault.HOLD, REQUEST, 0),
        (Fault.HOLD_AFTER, REQUEST, 1),
        (Fault.HOLD, REPLY, 1),
        (Fault.HOLD_AFTER, REPLY, 1),
    ],
)
def test_a_call_is_held_at_a_message_until_released(
    fault: Fault, direction: Direction, got: int, toy: Toy, proxy: Proxy, client: Client
) -> None:
    rule = proxy.arm(Rule(fault, 1, "Echo", direction))
    call = client.channel.unary_unary("/toy/Echo").future(b"a", timeout=LONG)
    assert rule.wait_reached()
    toy.wait_got(got)
    assert not call.done()
    rule.release.set()
    assert call.result() == b"a 1 "


def test_frozen_and_partitioned_networks_go_on_when_healed(
    toy: Toy, proxy: Proxy, client: Client
) -> None:
    proxy.freeze()
    calls = [client.begin(b"a"), client.begin(b"b")]
    wait_until(lambda: proxy.count("Echo", REQUEST) == 2)
    calls[1].cancel()
    assert toy.got == []
    proxy.heal()
    assert calls[0].result().startswith(b"a ")
    toy.wait_got(2)  # including the call that was given up
    proxy.partition(REPLY)
    call = client.begin(b"c")
    toy.wait_got(3)  # (an answer to the one that was given up may be on its way too)
    assert toy.got[2:] == [b"c"]
    assert not call.done()
    proxy.heal()
    assert call.result() == b"c 3 "


def test_random_mixes_come_from_the_seed(toy: Toy) -> None:
    def run(seed: int) -> list[Fault | None]:
        with Proxy(toy.address, streamed_replies=("Count",), seed=seed) as proxy:
            proxy.mix({Fault.BREAK: 0.2, Fault.DUPLICATE: 0.3, Fault.DELAY: 0.2}, 0.001)
            client = Client(proxy.address)
            for _ in range(30):
                with suppress(grpc.RpcError):
                    client.count(3)
            client.channel.close()
            return [each.fault for each in proxy.log]

    first = run(1)
    assert first == run(1) != run(2)
    assert {None, Fault.BREAK, Fault.DUPLICATE, Fault.DELAY} == {*first}


# ---- Bytes


@pytest.fixture
def relay(toy: Toy) -> Iterator[Relay]:
    with Relay(toy.address) as relay:
        yield relay


@pytest.fixture
def far(relay: Relay) -> Iterator[Client]:
    client = Client(relay.address)
    client.echo(b"hello")
    yield client
    client.channel.close()


def test_a_relay_cuts_connections(toy: Toy, relay: Relay, far: Client) -> None:
    """A call that is on its way fails then; later calls use another connection."""
    toy.may_answer.clear()
    call = far.begin(b"a" * 100)
    toy.wait_got(2)  # whichever bytes come next, gRPC's own or the answer, they cut this call
    relay.cut_after(Way.DOWN, 5)
    toy.may_answer.set()
    with pytest.raises(grpc.RpcError) as error:
        call.result()
    assert code_of(error) is _STATUS.UNAVAILABLE
    assert relay.is_cut.wait(LONG)
    grpc.channel_ready_future(far.channel).result(LONG)
    assert far.echo(b"a") == b"a 3 "


def test_a_relay_holds_one_way(toy: Toy, relay: Relay, far: Client) -> None:
    relay.partition(Way.DOWN)
    call = far.channel.unary_unary("/toy/Echo").future(b"a", timeout=LONG)
    toy.wait_got(2)
    assert not call.done()
    relay.heal()
    assert call.result() == b"a 2 "


def test_a_relay_changes_a_byte(toy: Toy, relay: Relay, far: Client) -> None:
    size = 4096  # a frame header before it, so the byte is in the message
    relay.corrupt_at(Way.UP, size // 2)
    far.echo(b"a" * size)
    assert len(toy.got[1]) == size
    assert sum(byte != ord("a") for byte in toy.got[1]) == 1


def test_a_slow_link_still_delivers(relay: Relay, far: Client) -> None:
    relay.limit(100_000)
    before = relay.passed[Way.UP]
    assert far.echo(b"a" * 20_000).startswith(b"aaa")
    assert relay.passed[Way.UP] - before >= 20_000
