"""connect(): another process' state, read as if it were here."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from remote_util import TOKEN, Service

import statekit as sk
from statekit.errors import (
    ClosedError,
    KeyTypeError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    SchemaError,
)
from statekit.keys import key_codec
from statekit.protocol.calls import PeerHello, QueryCall, QueryReply
from statekit.remote.query import Remote, connect
from statekit.remote.server import PeerServer


@dataclasses.dataclass
class Order:
    item: str
    count: int = 1


@dataclasses.dataclass
class LargerOrder:
    item: str
    count: int = 1
    note: str = "none"


class Point(NamedTuple):
    x: int
    y: float


class Live(Service):
    """Answers from a provider."""

    def __init__(self, kv: Any) -> None:
        super().__init__()
        self.kv = kv

    def _schemas(self) -> tuple[Any, ...]:
        return tuple(declared.schema for declared in self.kv._declared.values())

    def hello(self) -> PeerHello:
        return PeerHello("live", "i", 1, 128, 16, (range(128),), self._schemas(), "0.1.0")

    def query(self, call: QueryCall) -> QueryReply:
        self.asked.append(call)
        schema = next(schema for schema in self._schemas() if schema.name == call.state)
        raw = next(raw for raw in self.kv._residence.store.states() if raw.name == call.state)
        decode = key_codec(schema.key).decode
        return QueryReply(schema, tuple(raw.get_encoded(decode(key)) for key in call.keys))


@pytest.fixture
def kv() -> Iterator[Any]:
    with sk.open("memory:") as kv:
        kv.value("visits", int)["alice"] = -7
        kv.value("ratio", float, key=int)[3] = 0.5
        kv.value("orders", Order, key=tuple[str, int])[("alice", 1)] = Order("tea", 2)
        kv.value("points", Point)["a"] = Point(1, 2.5)
        kv.value("names", str)["alice"] = "Алиса"
        kv.list("clicks", str)["alice"].extend(["/a", "/b"])
        kv.map("carts", str, int)["alice"].update({"tea": 1, "milk": 2})
        kv.state("tags", set[str])["alice"].update({"x", "y"})
        kv.state("nested", dict[str, list[int]])["alice"]["a"].extend([1, 2])
        kv.value("timed", int, ttl=3600)["alice"] = 5
        yield kv


@pytest.fixture
def remote(kv: Any) -> Iterator[Remote]:
    with PeerServer(Live(kv), token=TOKEN) as server, connect(server.address, token=TOKEN) as found:
        yield found


def test_values_of_all_kinds_are_read_as_they_are(remote: Remote) -> None:
    assert remote.value("visits", int).get("alice") == -7
    assert remote.value("ratio", float, key=int).get(3) == 0.5
    assert remote.value("orders", Order, key=tuple[str, int])[("alice", 1)] == Order("tea", 2)
    assert remote.value("points", Point)["a"] == Point(1, 2.5)
    assert remote.value("names", str)["alice"] == "Алиса"
    assert remote.list("clicks", str).get("alice") == ["/a", "/b"]
    assert remote.map("carts", str, int)["alice"] == {"tea": 1, "milk": 2}
    assert remote.state("tags", set[str])["alice"] == {"x", "y"}
    assert remote.state("nested", dict[str, list[int]])["alice"] == {"a": [1, 2]}
    assert remote.state("visits", int)["alice"] == -7
    assert remote.value("timed", int)["alice"] == 5


def test_missing_keys_give_defaults_as_they_do_at_home(kv: Any, remote: Remote) -> None:
    for visits in (remote.value("visits", int), kv.value("visits", int)):
        assert visits.get("bob") is None
        assert visits.get("bob", 3) == 3
        assert "bob" not in visits
        assert "alice" in visits
        with pytest.raises(KeyError, match="bob"):
            visits["bob"]
    counted = remote.value("visits", int, default=0)
    assert (counted["bob"], counted.get("bob"), counted.get("bob", 9)) == (0, 0, 9)
    assert remote.list("clicks", str).get("bob", []) == []


def test_a_default_is_not_changed_by_who_reads_it(remote: Remote) -> None:
    points = remote.value("orders", Order, key=tuple[str, int], default=Order("none"))
    points[("x", 1)].item = "changed"
    assert points[("x", 1)] == Order("none")
    with pytest.raises(SchemaError, match="default"):
        remote.value("visits", int, default="no")  # type: ignore[arg-type]


def test_many_keys_are_asked_for_together(kv: Any, remote: Remote) -> None:
    keys = [f"k{i}" for i in range(3000)]
    kv.value("visits", int).put_many(keys, list(range(3000)))
    assert remote.value("visits", int).get_many([*keys, "nobody"]) == [*range(3000), None]
    assert remote.value("visits", int, default=9).get_many(["nobody"]) == [9]
    assert remote.value("visits", int).get_many([]) == []


def test_what_is_read_is_live(kv: Any, remote: Remote) -> None:
    visits = remote.value("visits", int)
    for n in range(5):
        kv.value("visits", int)["alice"] = n
        assert visits["alice"] == n
    kv.value("later", int)["x"] = 1
    assert remote.value("later", int)["x"] == 1


def test_types_may_be_read_as_what_they_may_become(remote: Remote) -> None:
    assert remote.value("visits", float)["alice"] == -7.0
    assert type(remote.value("visits", float)["alice"]) is float
    larger = remote.value("orders", LargerOrder, key=tuple[str, int])
    assert larger[("alice", 1)] == LargerOrder("tea", 2, "none")


@pytest.mark.parametrize(
    "ask",
    [
        lambda remote: remote.value("visits", str),
        lambda remote: remote.value("visits", int, key=int),
        lambda remote: remote.list("visits", int),
        lambda remote: remote.value("clicks", list[str]),
        lambda remote: remote.list("clicks", int),
        lambda remote: remote.map("carts", str, str),
        lambda remote: remote.value("ratio", int, key=int),
    ],
)
def test_another_type_than_the_stored_one_is_refused(remote: Remote, ask: Any) -> None:
    with pytest.raises(SchemaError, match="is stored as"):
        ask(remote)


def test_a_state_that_is_not_there_is_named_with_those_that_are(remote: Remote) -> None:
    with pytest.raises(SchemaError, match=r"no state 'visit'.*'visits', 'ratio'"):
        remote.value("visit", int)


def test_a_key_of_another_type_is_refused_here(remote: Remote) -> None:
    with pytest.raises(KeyTypeError, match="state 'visits'"):
        remote.value("visits", int).get(7)


def test_a_value_that_is_none_is_the_peers_fault(kv: Any) -> None:
    service = Live(kv)
    with PeerServer(service) as server, connect(server.address) as remote:
        visits, names = remote.value("visits", int), remote.value("names", str)
        service.query = lambda call: QueryReply(  # type: ignore[method-assign]
            next(schema for schema in service._schemas() if schema.name == call.state), (b"xx",)
        )
        for state in (visits, names):
            with pytest.raises(PeerError, match="is no"):
                state.get("alice")


def test_what_a_process_has_is_told(kv: Any, remote: Remote) -> None:
    assert remote.name == "live"
    assert remote.key_groups == (range(128),)
    assert {schema.name for schema in remote.schemas} == set(kv._declared)
    assert remote.metrics()["entries"] == 1
    assert repr(remote) == f"<Remote 'live' at {remote.address}: 10 states, 128 of 128 key-groups>"
    visits = remote.value("visits", int)
    assert repr(visits) == f"<RemoteState 'visits' at {remote.address}: str -> int>"


def test_nothing_can_be_written(remote: Remote) -> None:
    visits: Any = remote.value("visits", int)
    with pytest.raises(TypeError):
        visits["alice"] = 1
    assert not hasattr(visits, "put")


@pytest.mark.parametrize("use", [list, iter, lambda state: [*state], lambda state: "x" in [*state]])
def test_a_state_cannot_be_gone_through_and_says_what_to_use(remote: Remote, use: Any) -> None:
    with pytest.raises(TypeError, match=r"'visits'.*get_many\(keys\)"):
        use(remote.value("visits", int))


def test_nobody_is_connected_in_vain(kv: Any) -> None:
    with PeerServer(Live(kv), token=TOKEN) as server:
        with pytest.raises(PeerRefusedError):
            connect(server.address)
        remote = connect(server.address, token=TOKEN)
        remote.close()
        with pytest.raises(ClosedError):
            remote.schemas  # noqa: B018
    with pytest.raises(PeerLostError):
        connect("127.0.0.1:1", timeout_s=0.2)
