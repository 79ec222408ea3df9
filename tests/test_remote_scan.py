"""Scan: all that a process has at one moment, while it goes on. Oracles: dicts, a plain service."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from remote_util import Service, cut, wait_until
from test_residence import home as home  # a fixture

import statekit as sk
from statekit.errors import NotOwnedError, PeerError, PeerLostError, PeerRefusedError
from statekit.native import Block
from statekit.protocol.calls import CHUNK_BYTES, Piece, PieceKind, ScanCall
from statekit.remote import wire
from statekit.remote.channel import PeerChannel
from statekit.remote.server import PeerServer
from statekit.residence.loading import Loading

ALL = ScanCall((range(128),))
LEAVES = {3: b"x" * 100, 5: b"", 700: b"y" * (2 * CHUNK_BYTES + 1), 2047: b"z"}


def entries(channel: PeerChannel, call: ScanCall = ALL) -> dict[str, dict[bytes, Any]]:
    found: dict[str, dict[bytes, Any]] = {}
    for leaf, blocks in channel.scan(call):
        for block in Block.each(blocks):
            assert (block.leaf, block.is_delta) == (leaf, False)
            rows = found.setdefault(block.name, {})
            assert not rows.keys() & dict(block).keys()
            rows.update(block)
    return found


def fill(kv: sk.KVProvider) -> dict[str, dict[bytes, Any]]:
    keys = [f"user-{number}" for number in range(3000)]
    kv.value("visits", int).put_many(keys, list(range(3000)))
    kv.value("names", str).put_many(keys[:7], ["ä"] * 7)
    encoded = [key.encode() for key in keys]
    return {
        "visits": dict(zip(encoded, range(3000), strict=True)),
        "names": dict.fromkeys(encoded[:7], b"\xa2\xc3\xa4"),
    }


# ---- Providers


def test_a_scan_of_a_provider_in_memory(tmp_path: Path) -> None:
    with sk.open("memory:") as kv:
        expected = fill(kv)
        kv.advance_watermark(77)
        with kv.serve() as server, PeerChannel(server.address) as channel:
            assert channel.hello().watermark == 77
            assert entries(channel) == expected
            half = entries(channel, ScanCall((range(64),)))["visits"]
            others = entries(channel, ScanCall((range(64, 128),)))["visits"]
            assert {**half, **others} == expected["visits"]
            assert len(half) + len(others) == 3000
            assert entries(channel, ScanCall(())) == {}


def test_a_scan_of_a_home_has_what_is_not_in_memory_and_not_declared(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/home"
    with sk.open(url) as kv:
        expected = fill(kv)
    with sk.open(url) as kv, kv.serve() as server, PeerChannel(server.address) as channel:
        assert entries(channel) == expected
        kv.value("visits", int)["user-3"] = -1  # in memory, over what is at home
        del kv["visits"]["user-4"]
        expected["visits"][b"user-3"] = -1
        del expected["visits"][b"user-4"]
        assert entries(channel) == expected


def test_states_that_are_stored_and_not_declared_can_be_asked_about(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/home"
    with sk.open(url) as kv:
        fill(kv)
    with sk.open(url) as kv, kv.serve() as server, sk.connect(server.address) as remote:
        visits = remote.value("visits", int)
        assert visits.get_many(["user-3", "nobody"]) == [3, None]
        assert kv.value("visits", int)["user-4"] == 4  # it can be declared afterwards as usual
        assert kv.metrics().states["visits"].fetches >= 2


def test_a_scan_of_what_is_still_being_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sk.open("memory:") as kv:
        expected = fill(kv)
        kv.checkpoint(tmp_path)
    monkeypatch.setattr(Loading, "start", lambda self: None)  # nothing comes by itself
    with sk.restore(tmp_path) as kv, kv.serve() as server:
        kv.value("visits", int)["user-3"] = -1
        expected["visits"][b"user-3"] = -1
        with PeerChannel(server.address) as channel:
            assert entries(channel) == expected


def test_a_scan_is_of_one_moment(home: Any) -> None:
    """A writer goes through the keys over and over, so at any moment it is at one place."""
    keys = [f"key-{number}" for number in range(500)]
    for url in ("memory:", "testdict:t?memory=4MiB"):
        with sk.open(url, key_groups=16, subgroups=4) as kv:
            rounds = kv.value("rounds", int)
            rounds.put_many(keys, [0] * len(keys))
            over = threading.Event()

            def write(rounds: Any = rounds, over: threading.Event = over) -> None:
                number = 1
                while not over.is_set():
                    for key in keys:
                        rounds[key] = number
                    number += 1

            writer = threading.Thread(target=write)
            writer.start()
            try:
                with kv.serve() as server, PeerChannel(server.address) as channel:
                    channel.hello()
                    for _ in range(20):
                        found = entries(channel, ScanCall((range(16),)))["rounds"]
                        order = [found[key.encode()] for key in keys]
                        assert order == sorted(order, reverse=True)
                        assert order[0] - order[-1] <= 1
            finally:
                over.set()
                writer.join()


def test_a_scan_of_what_was_handed_over_is_refused() -> None:
    with sk.open("memory:") as kv, sk.open("memory:", owned=()) as other:
        fill(kv)
        with kv.serve() as server, PeerChannel(server.address) as channel:
            other.fetch_from(server.address, key_groups=range(64)).wait()
            with pytest.raises(NotOwnedError, match="key-groups 0-63 are not here"):
                entries(channel)
            entries(channel, ScanCall((range(64, 128),)))


def test_closing_early_lets_go_of_the_state() -> None:
    with sk.open("memory:") as kv:
        fill(kv)
        with kv.serve() as server, PeerChannel(server.address) as channel:
            scan = channel.scan(ALL)
            next(scan)
            scan.close()
            wait_until(lambda: not kv._residence._frozen)


# ---- What comes over the wire


@pytest.fixture
def service() -> Service:
    return Service(dict(LEAVES))


@pytest.fixture
def channel(service: Service) -> Iterator[PeerChannel]:
    with PeerServer(service) as server, PeerChannel(server.address) as channel:
        yield channel


def test_leaves_of_all_sizes_come_as_they_are(service: Service, channel: PeerChannel) -> None:
    call = ScanCall((range(3), range(40, 50)))
    assert dict(channel.scan(call)) == LEAVES
    assert service.asked == [call]
    assert service.closed == 1


@pytest.mark.parametrize(
    "pieces",
    [
        [*cut(3, 0, b"x"), *cut(3, 0, b"x")],
        [*cut(3, 0, b"x"), Piece(PieceKind.NEVER, 4, 0)],
        [Piece(PieceKind.HERE, 3, 0, b"x", is_last=False, bytes_total=2)],
        [Piece(PieceKind.HERE, 3, 0, b"x", is_last=False, bytes_total=2), *cut(4, 0, b"x")],
        [Piece(PieceKind.HERE, 3, 0, b"x", bytes_total=2)],
        [Piece(PieceKind.HERE, 5000, 0, b"x", bytes_total=1)],
    ],
    ids=["twice", "not there", "half", "half and another", "too short", "no such leaf"],
)
def test_what_cannot_be_is_refused(
    service: Service, channel: PeerChannel, pieces: list[Piece]
) -> None:
    channel.hello()
    service.scan = lambda call: iter(pieces)  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="which cannot be"):
        list(channel.scan(ALL))


def test_a_scan_that_breaks_off_is_an_error_and_not_the_half(
    service: Service, channel: PeerChannel
) -> None:
    def half(call: ScanCall) -> Iterator[Piece]:
        yield from cut(3, 0, b"x")
        raise RuntimeError("out of order")

    service.scan = half  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="key-groups 0-127"):
        list(channel.scan(ALL))


def test_a_peer_that_is_lost_meanwhile_is_an_error(service: Service) -> None:
    is_lost = threading.Event()

    def stuck(call: ScanCall) -> Iterator[Piece]:
        yield from cut(3, 0, b"x")
        is_lost.wait()

    service.scan = stuck  # type: ignore[method-assign]
    server = PeerServer(service)
    with PeerChannel(server.address) as channel:
        scan = channel.scan(ALL)
        next(scan)
        closing = threading.Thread(target=lambda: server.close(0))
        closing.start()
        try:
            with pytest.raises((PeerLostError, PeerRefusedError)):
                list(scan)
        finally:
            is_lost.set()
            closing.join()


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(wire.WireError, match="key-groups"):
        wire.read_scan(wire.put_scan(ScanCall((range(5, 9), range(2, 4)))))
    with pytest.raises(wire.WireError, match="key-groups"):
        wire.read_scan(wire.put_scan(ALL), 64)
