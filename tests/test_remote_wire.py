"""Calls to bytes and back: nothing is lost, and nothing that breaks a rule gets through."""

import tempfile
from array import array
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc
from hypothesis import given, settings
from hypothesis import strategies as st

from statekit import errors
from statekit.errors import ArgumentError, PeerError, StateKitError
from statekit.protocol import calls
from statekit.protocol.calls import (
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
    ShadeCall,
    ShadeReply,
    StreamCall,
)
from statekit.protocol.messages import Grant, Offer
from statekit.remote import peer_pb2 as pb
from statekit.remote import wire
from statekit.remote.wire import WireError
from statekit.schema import StateSchema

ROOT = Path(__file__).resolve().parent.parent
VISITS = StateSchema("visits", "value", "s", "int")
LOGS = StateSchema("логи", "list", "(si)", ["list", "str"], "event")
U63 = 2**63 - 1

names = st.text("abz09./:- éжß漢🙂", min_size=1, max_size=40)
numbers = st.integers(0, U63)
leaf_numbers = st.integers(0, wire.LEAVES_MAX - 1)


def ranges(most: int) -> st.SearchStrategy[tuple[range, ...]]:
    def paired(ends: list[int]) -> tuple[range, ...]:
        ends.sort()
        return tuple(map(range, ends[: len(ends) // 2 * 2 : 2], ends[1::2]))

    return st.lists(st.integers(0, most), unique=True, max_size=8).map(paired)


leases = st.lists(
    st.tuples(leaf_numbers, numbers), max_size=8, unique_by=lambda lease: lease[0]
).map(tuple)
begins = st.builds(
    BeginCall, names, numbers, names, ranges(wire.KEY_GROUPS_MAX), numbers,
    st.sampled_from((b"", bytes(range(32)))), numbers, numbers, st.just("") | names, leases,
)  # fmt: skip
shades = st.builds(ShadeCall, names, numbers, names, ranges(wire.KEY_GROUPS_MAX), st.booleans())
copies = st.builds(CopyCall, names, numbers, leases, numbers, numbers)
proposals = st.builds(ProposeCall, names, numbers, names, ranges(wire.KEY_GROUPS_MAX), names)
state_names = names
fetches = st.builds(FetchCall, names, numbers, leases)
picks = st.builds(
    PickCall,
    names,
    numbers,
    leases,
    st.lists(
        st.tuples(state_names, st.lists(st.binary(max_size=20), max_size=4).map(tuple)),
        max_size=3,
        unique_by=lambda one: one[0],
    ).map(tuple),
)
flags = st.booleans()
absent = st.sampled_from([PieceKind.IN_TRANSIT, PieceKind.NEVER])
pieces = st.lists(
    st.builds(
        lambda *fields: Piece(PieceKind.HERE, *fields),
        leaf_numbers, numbers, st.binary(max_size=300), flags, flags, flags, numbers,
    )
    | st.builds(lambda kind, leaf, epoch: Piece(kind, leaf, epoch), absent, leaf_numbers, numbers)
    | st.builds(lambda leaf, to: Piece(PieceKind.MOVED, leaf, 1, to=to), leaf_numbers, names)
    | st.builds(lambda at, n: Piece(PieceKind.FENCED, at, 1, generation=n), leaf_numbers, numbers),
    max_size=12,
)  # fmt: skip


# ---- There and back


@settings(max_examples=60, deadline=None)
@given(shades, copies)
def test_calls_about_shadows_come_back_as_they_were(shade: ShadeCall, copy: CopyCall) -> None:
    assert wire.read_shade(wire.put_shade(shade)) == shade
    assert wire.read_copy(wire.put_copy(copy)) == copy
    assert pb.CopyRequest.FromString(wire.put_copy(copy)).pace == copy.pace


def test_the_answer_about_a_shadow_comes_back_as_it_was() -> None:
    reply = ShadeReply("alpha", 3, 128, 16, (VISITS,), 1 << 40)
    assert wire.read_shade_reply(wire.put_shade_reply(reply)) == reply


@settings(max_examples=60, deadline=None)
@given(begins, proposals, fetches, picks, leases)
def test_calls_come_back_as_they_were(
    begin: BeginCall, propose: ProposeCall, fetch: FetchCall, pick: PickCall, some: Any
) -> None:
    assert wire.read_begin(wire.put_begin(begin)) == begin
    assert wire.read_propose(wire.put_propose(propose)) == propose
    assert wire.read_fetch(wire.put_fetch(fetch)) == fetch
    assert wire.read_pick(wire.put_pick(pick)) == pick
    for kind in (InstalledCall, GiveBackCall):
        call: Any = kind("m", 1, some)
        assert wire.read_leases(wire.put_leases(call), kind) == call
    assert wire.read_released(wire.put_released(some)) == some


@settings(max_examples=100, deadline=None)
@given(pieces, st.booleans())
def test_pieces_come_back_as_they_were(some: list[Piece], more: bool) -> None:
    found, found_more = wire.read_pieces(wire.put_pieces(some, more))
    assert (found, found_more) == (some, more)
    assert all(type(piece) is Piece and type(piece.is_last) is bool for piece in found)


@settings(max_examples=60, deadline=None)
@given(pieces)
def test_pieces_are_what_protobuf_writes_and_reads(some: list[Piece]) -> None:
    message = pb.Pieces.FromString(wire.put_pieces(some))
    assert list(message.blocks) == [piece.blocks for piece in some]
    assert list(message.leaf) == [piece.leaf for piece in some]
    assert list(message.bytes_total) == [piece.bytes_total for piece in some]
    assert wire.read_pieces(message.SerializeToString()) == (some, False)


@settings(max_examples=60, deadline=None)
@given(fetches, picks, leases, st.binary(max_size=300), st.lists(st.none() | st.binary()), numbers)
def test_what_is_written_without_protobuf_is_what_protobuf_writes_and_reads(
    fetch: FetchCall, pick: PickCall, some: Any, blocks: bytes, values: Any, number: int
) -> None:
    def as_protobuf(data: bytes, kind: Any) -> bytes:
        message = kind.FromString(data)
        message.DiscardUnknownFields()
        again: bytes = message.SerializeToString()
        assert sorted(again) == sorted(data), "the same fields, in whatever order"
        return again

    data = as_protobuf(wire.put_fetch(fetch), pb.FetchRequest)
    assert wire.read_fetch(data) == fetch
    assert pb.FetchRequest.FromString(data).migration == fetch.migration
    data = as_protobuf(wire.put_pick(pick), pb.PickRequest)
    assert wire.read_pick(data) == pick
    assert pb.PickRequest.FromString(data).state == [state for state, _ in pick.keys]
    for kind in (InstalledCall, GiveBackCall):
        call: Any = kind("m", number, some)
        assert wire.read_leases(as_protobuf(wire.put_leases(call), pb.LeasesRequest), kind) == call
    assert wire.read_released(as_protobuf(wire.put_released(some), pb.LeasesReply)) == some
    picked = PickReply(blocks, tuple(leaf for leaf, _ in some))
    assert wire.read_pick_reply(as_protobuf(wire.put_pick_reply(picked), pb.PickReply)) == picked
    stream = StreamCall("m", number, picked.refused)
    assert wire.read_stream(as_protobuf(wire.put_stream(stream), pb.StreamRequest)) == stream
    assert wire.read_credit(as_protobuf(wire.put_credit(number), pb.StreamRequest)) == number
    query = QueryCall("visits", tuple(value for value in values if value is not None))
    assert wire.read_query(as_protobuf(wire.put_query(query), pb.QueryRequest)) == query
    answer = QueryReply(LOGS, tuple(values))
    data = as_protobuf(wire.put_query_reply(answer), pb.QueryReply)
    assert wire.read_query_reply(data, len(values)) == answer


def test_what_is_sent_all_the_time_does_without_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    """protobuf would trim the heap now and then: see fields.py."""

    def refuse(*_args: Any, **_fields: Any) -> Any:
        raise AssertionError("protobuf is used")

    monkeypatch.setattr(wire, "_put", refuse)
    monkeypatch.setattr(wire, "_parse", refuse)
    some = ((1, 2), (3, 4))
    wire.read_fetch(wire.put_fetch(FetchCall("m", 1, some)))
    wire.read_pick(wire.put_pick(PickCall("m", 1, some, (("s", (b"k",)),))))
    wire.read_pick_reply(wire.put_pick_reply(PickReply(b"x", (1,))))
    wire.read_pieces(wire.put_pieces([Piece(PieceKind.HERE, 1, 1, b"x", bytes_total=1)]))
    wire.read_stream(wire.put_stream(StreamCall("m", 1)))
    wire.read_credit(wire.put_credit(1))
    wire.read_leases(wire.put_leases(InstalledCall("m", 1, some)), InstalledCall)
    wire.read_released(wire.put_released(some))
    wire.read_query(wire.put_query(QueryCall("s", (b"k",))))
    wire.read_query_reply(wire.put_query_reply(QueryReply(VISITS, (b"x", None))), 2)
    with pytest.raises(AssertionError):
        wire.put_hello_request()


def test_hello_begin_reply_stream_query_and_figures_come_back() -> None:
    hello = PeerHello("a", "b", 3, 128, 16, (range(3), range(9, 10)), (VISITS, LOGS), "0.1")
    assert wire.read_hello(wire.put_hello(hello)) == hello
    assert wire.read_hello_request(wire.put_hello_request()) == calls.PROTOCOL
    grants = (
        Grant(range(7, 9), 5, 1), Grant(range(9, 10), 5, 2), Grant(range(3, 4), 5, 2),
        Grant(range(4, 5), 6, 2),
    )  # fmt: skip
    reply = BeginReply(
        Offer("m", 2, 1, "a", grants), 4, (VISITS, LOGS), 4, 8, -7, (range(1, 2),),
        array("Q", [1, 2, 3, 4, 2**64 - 1]), True,
    )  # fmt: skip
    assert wire.read_begin_reply(wire.put_begin_reply(reply)) == reply
    message = pb.BeginReply.FromString(wire.put_begin_reply(reply))
    assert list(message.leaves) == [2, 1, 1, 1]
    for watermark in (None, 0):
        one = reply._replace(watermark=watermark)
        assert wire.read_begin_reply(wire.put_begin_reply(one)).watermark == watermark
    stream = StreamCall("m", 1, (5, 3, 4))
    assert wire.read_stream(wire.put_stream(stream)) == stream
    assert wire.read_credit(wire.put_credit(U63)) == U63
    picked = PickReply(b"blocks", (3, 5))
    assert wire.read_pick_reply(wire.put_pick_reply(picked)) == picked
    query = QueryCall("visits", (b"a", b""))
    assert wire.read_query(wire.put_query(query)) == query
    answer = QueryReply(LOGS, (b"", None, b"abc"))
    assert wire.read_query_reply(wire.put_query_reply(answer), 3) == answer
    figures = {"a": 1, "b": {"c": [1.5, None, "x"]}}
    assert wire.read_figures(wire.put_figures(figures)) == figures


def test_what_cannot_be_sent_is_the_callers_mistake() -> None:
    with pytest.raises(ArgumentError, match="FetchRequest cannot be sent"):
        wire.put_fetch(FetchCall("m", -1, ((1, 1),)))
    with pytest.raises(ArgumentError, match="cannot be sent"):
        wire.put_begin(BeginCall("\ud800", 1, "t", (), 0))


# ---- Rules


def fetch_bytes(**fields: Any) -> bytes:
    return pb.FetchRequest(
        **{"migration": "m", "leaf": [1], "epoch": [1], **fields}
    ).SerializeToString()


@pytest.mark.parametrize(
    "fields",
    [
        {"migration": ""},
        {"migration": "m" * 257},
        {"migration": "a\nb"},
        {"generation": 2**63},
        {"leaf": [1, 2]},
        {"leaf": [2048]},
        {"leaf": [1, 1], "epoch": [1, 1]},
        {"epoch": [2**64 - 1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_fetch_that_breaks_a_rule_is_refused(fields: Any) -> None:
    assert wire.read_fetch(fetch_bytes(), 2048)
    with pytest.raises(WireError):
        wire.read_fetch(fetch_bytes(**fields), 2048)


@pytest.mark.parametrize(
    "fields",
    [
        {"migration": ""},
        {"generation": 2**63},
        {"leaf": [2048]},
        {"state": [""]},
        {"state": ["x" * 256]},
        {"state": ["a\0b"]},
        {"state": ["a"] * 1025, "keys": [0] * 1025, "key_bytes": [], "key_data": b""},
        {"state": ["a", "b"]},
        {"state": ["s", "s"], "keys": [1, 0]},
        {"keys": [2]},
        {"keys": [2**32 - 1]},
        {"key_bytes": []},
        {"key_bytes": [2]},
        {"key_bytes": [2**32 - 1]},
        {"key_data": b""},
        {"key_bytes": [65537], "key_data": b"x" * 65537},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_pick_that_breaks_a_rule_is_refused(fields: Any) -> None:
    good = {
        "migration": "m", "leaf": [1], "epoch": [1], "state": ["s"], "keys": [1], "key_bytes": [1],
        "key_data": b"k",
    }  # fmt: skip
    assert wire.read_pick(pb.PickRequest(**good).SerializeToString(), 2048)
    with pytest.raises(WireError):
        wire.read_pick(pb.PickRequest(**{**good, **fields}).SerializeToString(), 2048)


@pytest.mark.parametrize("refused", [[2048], [1] * 2049])
def test_a_pick_reply_that_breaks_a_rule_is_refused(refused: list[int]) -> None:
    with pytest.raises(WireError):
        wire.read_pick_reply(pb.PickReply(refused=refused).SerializeToString(), 2048)


def test_more_leases_than_a_message_may_have_are_refused() -> None:
    n = wire.ITEMS_MAX
    assert len(wire.read_fetch(fetch_bytes(leaf=range(n), epoch=[1] * n)).leases) == n
    with pytest.raises(WireError):
        wire.read_fetch(fetch_bytes(leaf=range(n + 1), epoch=[1] * (n + 1)))


@pytest.mark.parametrize(
    "ends", [[1], [2, 2], [3, 2], [0, 5, 4, 6], [0, 129], [5, 6, 0, 1], [0, 2**32 - 1]], ids=str
)
def test_ranges_out_of_order_are_refused(ends: list[int]) -> None:
    data = pb.BeginRequest(migration="m", target="t", key_groups=ends).SerializeToString()
    with pytest.raises(WireError):
        wire.read_begin(data, 128)
    data = pb.ProposeRequest(
        migration="m", address="a:1", strategy="s", key_groups=ends
    ).SerializeToString()
    with pytest.raises(WireError):
        wire.read_propose(data, 128)


@pytest.mark.parametrize("size", [1, 31, 33, 1000])
def test_a_base_that_is_no_digest_is_refused(size: int) -> None:
    data = pb.BeginRequest(migration="m", target="t", base=bytes(size)).SerializeToString()
    with pytest.raises(WireError):
        wire.read_begin(data)


def test_ranges_that_touch_are_accepted() -> None:
    data = pb.BeginRequest(migration="m", target="t", key_groups=[0, 5, 5, 6]).SerializeToString()
    assert wire.read_begin(data, 128).key_groups == (range(5), range(5, 6))


@pytest.mark.parametrize(
    "fields",
    [
        {"head": [0]},
        {"head": [6]},
        {"head": [64 + 9]},
        {"head": [9, 9]},
        {"leaf": []},
        {"leaf": [2048]},
        {"epoch": [2**63]},
        {"bytes_total": [101]},
        {"blocks": []},
        {"head": [3]},  # in transit, with blocks
        {"head": [2], "blocks": [b""]},  # moved, to nowhere
        {"head": [5], "blocks": [b""]},  # fenced, by nothing
        {"to": ["x"]},
        {"generation": [1]},
    ],
    ids=str,
)
def test_pieces_that_break_a_rule_are_refused(fields: Any) -> None:
    right = {"head": [9], "leaf": [1], "epoch": [1], "bytes_total": [100], "blocks": [b"x"]}
    assert wire.read_pieces(pb.Pieces(**right).SerializeToString(), 2048, 100)
    with pytest.raises(WireError):
        wire.read_pieces(pb.Pieces(**{**right, **fields}).SerializeToString(), 2048, 100)


@pytest.mark.parametrize(
    "data",
    [
        b"\x2a",  # no size
        b"\x2a\xff\xff\xff\xff\x07abc",  # 2 GB, and three bytes
        b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0b\x0c",  # a group
        b"\x09" + bytes(8),  # eight bytes that no field has
        b"\xaa\x01\x00",  # a field of two bytes' number
        b"\x2a\x00" * (3 * wire.ITEMS_MAX + 1),
        b"\x0a\x00" * (3 * wire.ITEMS_MAX + 1),
        b"\x40\x00" * (3 * wire.ITEMS_MAX + 1),
        b"\x0a\xff\xff\x03",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_bytes_that_are_no_pieces_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.read_pieces(data)


def test_pieces_with_padding_are_refused() -> None:
    data = wire.put_pieces([Piece(PieceKind.HERE, 1, 1, bytes(5000), bytes_total=5000)])
    assert wire.read_pieces(data + b"\x7a\x40" + bytes(64))  # a field that it does not know
    with pytest.raises(WireError, match="bytes for 1 pieces"):
        wire.read_pieces(data + b"\x7a\x80\x40" + bytes(8192))


def begin_reply(**fields: Any) -> bytes:
    right = {
        "migration": "m", "source": "s", "first_leaf": [3, 7], "leaves": [2, 1], "epoch": [1, 1],
        "covered": [0, 0], "sizes": [1, 2, 3], "key_groups": 2, "subgroups": 4,
        "description": wire._put_description([VISITS]),
    }  # fmt: skip
    return pb.BeginReply(**{**right, **fields}).SerializeToString()


@pytest.mark.parametrize(
    "fields",
    [
        {"first_leaf": [3]},
        {"leaves": [2, 2]},
        {"leaves": [2, 0]},
        {"leaves": [2**32 - 1, 2**32 - 1]},
        {"first_leaf": [3, 4]},
        {"sizes": [1, 2]},
        {"epoch": [1, 2**63]},
        {"covered": [1, 2**63]},
        {"key_groups": 0},
        {"key_groups": 3},
        {"key_groups": 2**31, "subgroups": 2**31},
        {"description": b"{}"},
        {"description": b"[" * 100_000},
        {"description": b" " * (wire.DESCRIPTION_BYTES_MAX + 1)},
        {"timer_leaves": [0, 9]},
        {"timer_leaves": [0, 2], "timer_dues": [1]},
        {"timer_dues": [1]},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_begin_replies_that_break_a_rule_are_refused(fields: Any) -> None:
    assert len(wire.read_begin_reply(begin_reply()).offer.grants) == 2
    with pytest.raises(WireError):
        wire.read_begin_reply(begin_reply(**fields))


def test_query_replies_fit_the_question() -> None:
    data = wire.put_query_reply(QueryReply(VISITS, (b"x", None)))
    with pytest.raises(WireError):
        wire.read_query_reply(data, 3)
    found = pb.QueryReply(description=wire._put_description([]), found=[False])
    with pytest.raises(WireError, match="0 states"):
        wire.read_query_reply(found.SerializeToString(), 1)
    found = pb.QueryReply(description=wire._put_description([VISITS]), found=[True])
    with pytest.raises(WireError):
        wire.read_query_reply(found.SerializeToString(), 1)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"[" * 100_000, b"1e999999x"])
def test_figures_are_a_json_object(text: bytes) -> None:
    with pytest.raises(WireError):
        wire.read_figures(pb.FiguresReply(figures=text).SerializeToString())


# ---- Errors


@pytest.mark.parametrize("name", sorted(wire._CLASSES))
def test_an_error_arrives_as_the_class_it_was(name: str) -> None:
    cls: Any = getattr(errors, name)
    if cls is errors.UnknownEntryError:
        error = cls("не здесь", state="visits", keys=tuple)
    else:
        error = cls("не здесь")
        error.state = "visits"
    error.record = 7
    found = wire.read_error(wire.put_error(error))
    assert type(found) is cls
    assert (str(found), found.state, found.record) == ("не здесь", "visits", 7)


def test_the_fields_of_an_error_arrive() -> None:
    lost = errors.PeerLostError("gone", peer="h:1", leaf=9, seconds=1.5)
    found: Any = wire.read_error(wire.put_error(lost))
    assert (found.peer, found.leaf, found.seconds) == ("h:1", 9, 1.5)
    damaged: Any = wire.read_error(wire.put_error(errors.DamagedError("d", file="f", offset=3)))
    assert (damaged.file, damaged.offset) == ("f", 3)


def test_a_class_of_the_users_arrives_as_the_nearest_known_one() -> None:
    class Special(errors.LeaseError):
        pass

    assert type(wire.read_error(wire.put_error(Special("x")))) is errors.LeaseError


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"1",
        b'{"class":"SystemExit","message":"x"}',
        b'{"class":["PeerError"],"message":"x"}',
        b'{"class":"PeerError","message":1}',
        b"[" * 5000,
    ],
)
def test_an_error_that_cannot_be_read_is_a_peer_error(data: bytes) -> None:
    assert type(wire.read_error(data)) is PeerError


def test_the_fields_of_an_error_are_of_their_types_or_left_out() -> None:
    data = b'{"class":"PeerLostError","message":"x","leaf":"no","peer":3,"__class__":"x"}'
    found: Any = wire.read_error(data)
    assert (found.leaf, found.peer) == (None, "")


def test_a_long_error_fits_into_metadata() -> None:
    data = wire.put_error(StateKitError("ж" * 100_000))
    assert len(data) < 13_000
    assert str(wire.read_error(data)).endswith("...")


# ---- The schema


def test_peer_pb2_is_what_peer_proto_says() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.desc"
        status = protoc.main([
            "protoc", f"-I{ROOT}", f"--descriptor_set_out={out}",
            str(ROOT / "statekit/remote/peer.proto"),
        ])  # fmt: skip
        assert status == 0
        [written] = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    generated = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(generated)
    for found in (written, generated):
        for message in found.message_type:
            for field in message.field:
                field.ClearField("json_name")
    assert generated == written


def test_no_message_is_inside_another() -> None:
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        assert not message.nested_types
        assert all(field.message_type is None for field in message.fields), message.name


def test_limits_that_no_server_could_work_with_are_refused() -> None:
    assert Limits().check() == Limits()
    for name in Limits._fields:
        with pytest.raises(ArgumentError, match=name):
            Limits()._replace(**{name: 0}).check()
    with pytest.raises(ArgumentError):
        Limits(call_s=float("nan")).check()
