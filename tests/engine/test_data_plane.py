"""Batches between tasks: who gets which record, frames, sockets. The oracle routes key by key."""

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import statekit as sk
from statekit.engine import channel, frames
from statekit.engine.channel import Incoming, Outgoing, connect, listen
from statekit.engine.items import FIRST, LAST, Barrier, Change, End, Mark, Move, Watermark
from statekit.engine.records import ArrowRecords, Key, Router
from statekit.errors import EngineError

MOVE = Move(7, (Change(frozenset({1, 2, 3, 9}), "a", "b"), Change(frozenset({0}), "b", "a")))
ITEMS = [Watermark(FIRST), Watermark(LAST), Watermark(5), Barrier(1), Barrier((1 << 64) - 1)]
ITEMS += [Mark(MOVE), End()]  # type: ignore[list-item]


def batch_of(rng: random.Random, rows: int) -> pa.RecordBatch:
    words = [f"w{rng.randrange(50)}" for _ in range(rows)]
    return pa.record_batch({"word": words, "n": pa.array(range(rows), pa.int64())})


def group_of(key_type: Any, key: Any, groups: int) -> int:
    return sk.key_hash(key_type, key) >> (64 - (groups.bit_length() - 1))


# ---- Who gets which


@pytest.mark.parametrize("seed", range(20))
def test_each_record_goes_to_the_owner_of_its_key_group_in_order(seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice((1, 8, 128))
    owners = [f"t{rng.randrange(rng.randint(1, 4))}" for _ in range(groups)]
    batch = batch_of(rng, rng.choice((0, 1, 5, 200)))
    expected: dict[str, list[dict[str, Any]]] = {}
    for row in batch.to_pylist():
        expected.setdefault(owners[group_of(str, row["word"], groups)], []).append(row)
    dealt = [*Router(Key(("word",), str, groups), owners).deal(batch)]
    assert {name: part.to_pylist() for name, part in dealt} == expected
    assert len(dealt) == len(expected)


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_split_by_key_groups_in_order(seed: int) -> None:
    rng = random.Random(seed)
    batch = batch_of(rng, 100)
    records = ArrowRecords(batch, Key(("word",), str, 16))
    of = {row["n"]: group_of(str, row["word"], 16) for row in batch.to_pylist()}
    assert records.groups() == {*of.values()}
    chosen = frozenset(rng.sample(range(16), rng.randint(0, 16)))
    some, rest = records.split(chosen)
    for part, is_chosen in ((some, True), (rest, False)):
        found = [] if part is None else part.batch["n"].to_pylist()
        assert found == [n for n in range(100) if (of[n] in chosen) == is_chosen]


def test_keys_of_several_columns_and_of_numbers() -> None:
    batch = pa.record_batch({"a": ["x", "y"], "b": pa.array([1, -2], pa.int64())})
    both = Key(("a", "b"), tuple[str, int], 128).groups_of(batch)
    assert both.tolist() == [group_of(tuple[str, int], key, 128) for key in (("x", 1), ("y", -2))]
    one = Key(("b",), int, 128).groups_of(batch)
    assert one.tolist() == [group_of(int, key, 128) for key in (1, -2)]


def test_a_key_that_is_no_column_says_which_there_are() -> None:
    with pytest.raises(EngineError, match="the key is column 'user', and the records have word, n"):
        Key(("user",), str, 16).groups_of(batch_of(random.Random(1), 3))


# ---- Frames


def body(packed: list[Any]) -> tuple[int, bytes]:
    kind, size = frames.header(packed[0])
    data = bytes(memoryview(packed[1]))
    assert len(data) == size
    return kind, data


@pytest.mark.parametrize("item", ITEMS)
def test_what_is_packed_is_unpacked(item: Any) -> None:
    assert frames.unpack(*body(frames.pack(item))) == item


def test_records_keep_their_schema_and_values() -> None:
    batch = pa.record_batch(
        {"s": ["ä", None], "l": [[1], []], "t": pa.array([1, 2], pa.timestamp("us", "UTC"))}
    )
    schema = frames.unpack_schema(body(frames.pack_schema(batch.schema))[1])
    assert frames.unpack_records(body(frames.pack_records(batch))[1], schema).equals(batch)
    part = batch.slice(1, 1)
    assert frames.unpack_records(body(frames.pack_records(part))[1], schema).equals(part)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HT", b"sk\x02\x01\0\0\0\0", b"sk\x00\0\0\0\0\0", b"sk\x63\0\0\0\0\0",
        b"sk\x02\0\xff\xff\xff\xff", b"sk\x05\0\0\0\0\x01", b"sk\x03\0\x07\0\0\0",
        b"sk\x06\0\x01\0\0\0",
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_is_refused(data: bytes) -> None:
    with pytest.raises(EngineError):
        frames.header(data)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"[1]", b"[0,[]]", b'["1",[]]', b"[1,[[]]]", b'[1,[[[[0,1]],"a"]]]',
        b'[1,[[[[-1,1]],"a","b"]]]', b'[1,[[[[0,99999999999]],"a","b"]]]', b'[1,[[[[0,1]],1,2]]]',
        b'[1,[[[["a",1]],"a","b"]]]', b'[1,[[[[0,2],[1,3]],"a","b"]]]', b"\xff\xfe", b"[1,7]",
    ],
)  # fmt: skip
def test_a_mark_that_is_no_move_is_refused(text: bytes) -> None:
    with pytest.raises(EngineError):
        frames.unpack(frames.MARK, text)


def test_damaged_records_are_an_error_or_records_and_nothing_else() -> None:
    rng = random.Random(5)
    batch = batch_of(rng, 40)
    schema, good = batch.schema, body(frames.pack_records(batch))[1]
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            frames.unpack_records(data, schema).to_pylist()
        except EngineError:
            refused += 1
    assert refused > 300
    with pytest.raises(EngineError, match="before their schema"):
        frames.unpack_records(good, None)
    with pytest.raises(EngineError, match="schema is damaged"):
        frames.unpack_schema(b"nonsense")


def test_a_batch_that_is_too_large_is_refused_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "RECORDS_MAX", 100)
    with pytest.raises(EngineError, match="Make batches smaller"):
        frames.pack_records(batch_of(random.Random(1), 50))


# ---- Sockets


@pytest.fixture(params=["unix", "tcp"])
def pair(request: Any, tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    server = listen(str(tmp_path / "s") if request.param == "unix" else "127.0.0.1:0")
    name = server.getsockname()
    sending = connect(name if isinstance(name, str) else f"127.0.0.1:{name[1]}")
    receiving, _ = server.accept()
    with server, sending, receiving:
        yield sending, receiving


def test_a_channel_keeps_the_order_and_everything(pair: Any) -> None:
    rng = random.Random(3)
    sent: list[Any] = [batch_of(rng, rng.choice((1, 300, 3000))) for _ in range(60)]
    sent += ITEMS[:-1]
    rng.shuffle(sent)
    sent.append(End())

    def send() -> None:
        outgoing = Outgoing(pair[0], "source-0", window=20_000)
        for item in sent:
            if isinstance(item, pa.RecordBatch):
                outgoing.send_records(item)
            else:
                outgoing.send(item)
        outgoing.finish()

    thread = threading.Thread(target=send)
    thread.start()
    incoming = Incoming(pair[1], window=20_000)
    assert incoming.name == "source-0"
    got = []
    while not got or got[-1] != End():
        got.append(incoming.receive())
        incoming.give_credit()
    incoming.close()
    thread.join()
    for one, other in zip(got, sent, strict=True):
        assert one.equals(other) if isinstance(other, pa.RecordBatch) else one == other


def test_a_sender_waits_for_credit_when_it_is_a_window_ahead(pair: Any) -> None:
    """The receiver takes everything from the socket, and gives no credit."""
    batch = batch_of(random.Random(2), 100)
    size = len(body(frames.pack_records(batch))[1])
    outgoing = Outgoing(pair[0], "s", window=3 * size)
    incoming = Incoming(pair[1], window=3 * size)
    for _ in range(3):
        outgoing.send_records(batch)
        assert incoming.receive() is not None
    outgoing.send(Barrier(1))  # needs no credit
    assert incoming.receive() == Barrier(1)
    waiting = threading.Thread(target=outgoing.send_records, args=(batch,))
    waiting.start()
    pair[1].setblocking(False)
    for _ in range(50):  # nothing comes, however often we look
        with pytest.raises(BlockingIOError):
            pair[1].recv(1)
    pair[1].setblocking(True)
    incoming.give_credit()
    assert incoming.receive() is not None
    waiting.join()


@pytest.mark.parametrize("cut", [1, 7, 9, 30])
def test_a_torn_stream_is_an_error(pair: Any, cut: int) -> None:
    batch = batch_of(random.Random(2), 100)
    Outgoing(pair[0], "s")
    incoming = Incoming(pair[1])
    data = b"".join(bytes(memoryview(one)) for one in frames.pack_records(batch))
    pair[0].sendall(data[:cut])
    pair[0].close()
    with pytest.raises(EngineError, match="in the middle of a frame"):
        incoming.receive()


def test_a_stream_that_ends_between_frames_says_so(pair: Any) -> None:
    Outgoing(pair[0], "s").close()
    assert Incoming(pair[1]).receive() is None


@pytest.mark.parametrize("hello", [b"", b"\0", b"\x05ab", b"\x02\xff\xfe"])
def test_a_stranger_is_refused(pair: Any, hello: bytes) -> None:
    pair[0].sendall(hello)
    pair[0].close()
    with pytest.raises(EngineError):
        Incoming(pair[1])


def test_credit_that_was_not_owed_is_an_error(pair: Any) -> None:
    batch = batch_of(random.Random(2), 100)
    outgoing = Outgoing(pair[0], "s", window=1)
    outgoing.send_records(batch)
    channel.write_buffers(pair[1], frames.frame(frames.CREDIT, (1 << 40).to_bytes(8, "little")))
    with pytest.raises(EngineError, match="and was sent"):
        outgoing.send_records(batch)


@pytest.mark.parametrize("address", ["10.0.0.1:80", "127.0.0.1:x", "nothing"])
def test_only_this_machine(address: str) -> None:
    with pytest.raises(EngineError, match="is no address of the engine"):
        listen(address)


def test_nobody_there_and_a_place_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nobody listens at"):
        connect(str(tmp_path / "none"))
    with listen(str(tmp_path / "one")), pytest.raises(EngineError, match="cannot listen at"):
        listen(str(tmp_path / "one"))
