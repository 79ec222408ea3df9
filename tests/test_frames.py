"""Frames of packs, Snapshot.fill, rewritten blocks and retyped states."""

import gc
import struct
import threading
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statekit import Store, leaf_of
from statekit.errors import ArgumentError, ClosedError, CorruptBlockError, SchemaError
from statekit.native.block import Block, rewrite
from statekit.native.digest import crc32c, xxh64
from statekit.native.frames import Frames, bind, digest, seal, verify
from statekit.native.kinds import NO_TIME, RESIDENCIES

GROUPS, SUBGROUPS = 8, 4
LEAVES = GROUPS * SUBGROUPS
pack = msgpack.packb


def new_store() -> Store:
    return Store(key_groups=GROUPS, subgroups=SUBGROUPS)


def fill_store(count: int = 500) -> Store:
    store = new_store()
    store.state("n", "i64").put_many([f"key-{i}" for i in range(count)], list(range(count)))
    store.state("b", "bytes", int).put_many(
        list(range(count)), [b"x" * (i % 50) for i in range(count)]
    )
    return store


def small_frames() -> bytearray:
    """A block and an envelope, sealed."""
    store = Store(key_groups=1, subgroups=1)
    store.state("n", "i64", int).put(1, 2)
    envelope = b"SKZ1" + struct.pack("<IQQQB7x", 0, 48, 100, 3, 1) + b"abc" + bytes(5)
    frames = bytearray(store.encode_leaf(0) + envelope)
    seal(frames)
    return frames


def each_frame(frames: Any) -> list[tuple[int, int, int]]:
    """(offset, checksum, size) by the rules of a pack, without using csrc."""
    found, at = [], 0
    while at < len(frames):
        checksum, size = struct.unpack_from("<IQ", frames, at + 4)
        found.append((at, checksum, size))
        at += size
    return found


# ---- Checksums


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**48))
def test_a_bound_checksum_is_that_of_frame_pack_and_place(pack_id: bytes, offset: int) -> None:
    frames = small_frames()
    plain = bytes(frames)
    bind(frames, pack_id, offset)
    for at, checksum, size in each_frame(frames):
        place = xxh64(pack_id + (offset + at).to_bytes(8, "little")) & 0xFFFFFFFF
        assert checksum == crc32c(bytes(frames[at + 8 : at + size])) ^ place
    assert verify(frames, pack_id, offset) is None
    assert verify(bytes(frames), pack_id, offset) is None
    assert verify(frames, pack_id, offset + 8) == 0
    bind(frames, pack_id, offset)
    assert frames == plain


def test_digest_lists_size_and_checksum_of_each_frame() -> None:
    frames = small_frames()
    expected = [struct.pack("<QI", size, checksum) for _, checksum, size in each_frame(frames)]
    assert digest(frames) == b"".join(expected)
    assert digest(b"") == b""


def test_every_flipped_bit_is_found_in_its_frame() -> None:
    frames = small_frames()
    bind(frames, bytes(16), 64)
    second = each_frame(frames)[1][0]
    for bit in range(8 * len(frames)):
        frames[bit // 8] ^= 1 << bit % 8
        assert verify(frames, bytes(16), 64) == (0 if bit // 8 < second else second)
        frames[bit // 8] ^= 1 << bit % 8


def test_what_is_no_row_of_frames_is_refused_and_left_as_it_was() -> None:
    frames = small_frames()
    for bad in (frames[:-1], frames[:20], frames + b"SKB1", bytearray(b"SKB1" + bytes(60))):
        was = bytes(bad)
        for call in (seal, digest, lambda bad: bind(bad, bytes(16), 0)):
            with pytest.raises(CorruptBlockError):
                call(bad)
        assert verify(bad, bytes(16), 0) is not None
        assert bad == was
    with pytest.raises(ArgumentError, match="16"):
        bind(frames, b"short", 0)


# ---- The buffer


def test_frames_grow_and_are_viewed_without_a_copy() -> None:
    frames = Frames()
    assert (len(frames), bytes(frames.view())) == (0, b"")
    frames.append(b"header..")
    frames.append(memoryview(b"body"))
    view = frames.view()
    view[0:1] = b"H"
    assert bytes(frames.view()) == b"Header..body"
    assert len(frames) == 12
    del view
    frames.clear()
    frames.append(bytearray(b"new"))
    assert bytes(frames.view()) == b"new"


def test_viewed_frames_cannot_change_and_a_view_outlives_them() -> None:
    frames = Frames()
    frames.append(b"0123456789")
    part = frames.view()[2:5]  # all views count, also those made from other views
    with pytest.raises(BufferError):
        frames.append(b"x")
    with pytest.raises(BufferError):
        frames.reserve(1 << 20)
    with pytest.raises(BufferError):
        frames.clear()
    snapshot = fill_store(10).snapshot()
    with pytest.raises(BufferError):
        snapshot.fill(frames, 10)
    del frames
    gc.collect()
    assert bytes(part) == b"234"


# ---- Snapshot.fill


@pytest.mark.parametrize("bytes_max", [0, 1, 2000, 1 << 20])
@pytest.mark.parametrize("since", [None, "half"])
def test_fill_appends_what_next_gives(bytes_max: int, since: Any) -> None:
    store = fill_store()
    store.mark(3, 4, "partial")
    if since:
        epoch = store.advance_epoch()
        store.track(epoch)
        since = [epoch if leaf % 2 else 0 for leaf in range(LEAVES)]
        store.state("n", "i64").put_many([f"key-{i}" for i in range(40)], [0] * 40)
    with store.snapshot(since) as one, store.snapshot(since) as other:
        expected = dict(one)
        found = {}
        frames = Frames()
        frames.append(bytes(64))
        while filled := other.fill(frames, bytes_max):
            data = bytes(frames.view())
            for leaf, residency, offset, length, is_delta in filled:
                blocks = data[offset : offset + length]
                for block in Block.each(blocks):
                    block.verify()
                at = each_frame(blocks)
                plain = bytearray(blocks)
                for start, _, _ in at:
                    plain[start + 4 : start + 8] = bytes(4)
                found[leaf] = bytes(plain)
                assert RESIDENCIES[residency] == ("partial" if leaf == 3 else "whole")
                assert is_delta == (leaf == 3 or bool(since and leaf % 2))
        assert found == expected
        assert [RESIDENCIES[r] for r in other.residencies()] == [
            "partial" if leaf == 3 else "whole" for leaf in range(LEAVES)
        ]
    with pytest.raises(ClosedError):
        other.fill(frames, 1)
    with pytest.raises(ClosedError):
        other.residencies()


def test_threads_that_fill_from_one_snapshot_share_its_leaves() -> None:
    store = fill_store(5000)
    with store.snapshot() as snapshot, store.snapshot() as other:
        got: list[list[int]] = [[], [], []]

        def read(mine: list[int]) -> None:
            frames = Frames()
            while filled := snapshot.fill(frames, 2000):
                mine += [record.leaf for record in filled]
                frames.clear()

        threads = [threading.Thread(target=read, args=(mine,)) for mine in got]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(leaf for mine in got for leaf in mine) == sorted(leaf for leaf, _ in other)


def test_closing_waits_for_readers() -> None:
    store = fill_store(20000)
    for _ in range(20):
        snapshot = store.snapshot()
        started = threading.Event()

        def read(snapshot: Any = snapshot, started: threading.Event = started) -> None:
            frames = Frames()
            started.set()
            try:
                while snapshot.fill(frames, 1):
                    frames.clear()
            except ClosedError:
                pass

        thread = threading.Thread(target=read)
        thread.start()
        started.wait()
        snapshot.close()
        thread.join()


# ---- Rewritten blocks

values: dict[Any, st.SearchStrategy[Any]] = {
    "i64": st.integers(-(2**63), 2**63 - 1),
    "bytes": st.binary(max_size=40),
    "list": st.lists(st.integers(-9, 9), max_size=3).map(pack),
}


@given(st.data())
def test_a_rewritten_block_has_the_entries_of_its_leaf_in_its_new_type(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(values)))
    key_type: Any = data.draw(st.sampled_from([str, int]))
    keys = st.text(max_size=30) if key_type is str else st.integers(-(2**63), 2**63 - 1)
    model = data.draw(st.dictionaries(keys, values[kind], min_size=1, max_size=30))
    timed, new_timed = data.draw(st.tuples(st.booleans(), st.booleans()))
    new_kind = "f64" if kind == "i64" and data.draw(st.booleans()) else kind
    as_delta = data.draw(st.booleans())
    leaves = 2 ** data.draw(st.integers(0, 3))
    store = Store(1, 1)
    store.set_time("processing", 7000)
    state = store.state("s", kind, key_type, timed=timed)
    for key, value in model.items():
        state.put(key, value)
    block = store.encode_leaf(0)
    found: dict[Any, Any] = {}
    for leaf in range(leaves):
        new = rewrite(
            block, leaf=leaf, leaves=leaves, kind=new_kind, timed=new_timed, as_delta=as_delta
        )
        here = {k: v for k, v in model.items() if leaf_of(key_type, k, leaves, 1) == leaf}
        if not here and as_delta:
            assert new == b""
            continue
        got = Block(new)
        got.check()
        assert (got.leaf, got.leaves, got.kind, got.name) == (leaf, leaves, new_kind, "s")
        assert (got.is_delta, got.is_timed, got.size) == (as_delta, new_timed, len(new))
        if got.stamps is not None:
            assert set(got.stamps) <= {7000 if timed else NO_TIME}
        entries = {state.codec.decode(k): v for k, v in got}
        assert entries == {k: float(v) if new_kind == "f64" else v for k, v in here.items()}
        found |= entries
    assert len(found) == len(model)
    assert rewrite(block) == block


def test_a_rewrite_that_cannot_be_is_refused() -> None:
    store = Store(1, 1)
    store.state("f", "f64").put("a", 1.5)
    block = store.encode_leaf(0)
    with pytest.raises(SchemaError):
        rewrite(block, kind="i64")
    for leaf, leaves, kind in ((0, 3, "f64"), (0, 0, "f64"), (2, 2, "f64"), (0, 1, "float")):
        with pytest.raises(ArgumentError):
            rewrite(block, leaf=leaf, leaves=leaves, kind=kind)
    with pytest.raises(CorruptBlockError):
        rewrite(block[:-8])


# ---- Retyped states


def test_a_retyped_state_has_its_entries_in_the_new_type() -> None:
    store = new_store()
    keys = ["k" * n for n in range(1, 40)]  # fit a slot with a stamp, only without, or not at all
    store.state("n", "i64").put_many(keys, list(range(39)))
    state = store.retype("n", "f64", timed=True)
    assert state is store.state("n", "f64", timed=True)
    assert [state.get(key) for key in keys] == [float(n) for n in range(39)]
    assert store.retype("n", timed=False).get(keys[5]) == 5.0
    assert store.state("n", "f64").get_many(keys).to_list() == [float(n) for n in range(39)]
    with pytest.raises(SchemaError):
        store.retype("n", "i64")
    with pytest.raises(ArgumentError):
        store.retype("nothing", "f64")
    with pytest.raises(ArgumentError):
        store.retype("n", "float")  # type: ignore[arg-type]
