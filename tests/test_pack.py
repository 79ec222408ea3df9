"""Packs: named by their contents, bound to their places, and nothing bad comes out of them."""

import random
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import format_example
import format_oracle
import pytest
import xxhash
from small_checkpoint import LEAVES, Files, Line, dump, fill, new_store

import statekit as sk
from statekit.checkpoint.packs import check_header, read_frames, read_segment, verify_pack
from statekit.errors import (
    ArgumentError,
    CheckpointError,
    CorruptBlockError,
    DamagedError,
    StateKitError,
)
from statekit.format import compression
from statekit.format.manifest import Manifest, PackRef, Segment
from statekit.format.pack import (
    PackBuilder,
    pack_header,
)
from statekit.native.block import Block
from statekit.native.digest import crc32c
from statekit.native.frames import squeeze

SEED = 4
MUTANTS = 10_000
COMPRESSIONS = [None, "zstd", "lz4"]


def blocks() -> list[bytes]:
    """What a small store has in its leaves."""
    store = new_store()
    fill(store, 0, 60)
    return dump(store)


def build(number: int = 1, compressed: str | None = None) -> tuple[Files, PackRef, list[Segment]]:
    builder = PackBuilder(number, compressed)
    for leaf, data in enumerate(blocks()):
        builder.add(leaf, data)
    ref, parts, segments = builder.finish()
    return Files({ref.name: b"".join(parts)}), ref, segments


def plain(data: bytes) -> bytes:
    """Blocks without their checksums."""
    out = bytearray(data)
    at = 0
    for block in Block.each(data):
        out[at + 4 : at + 8] = bytes(4)
        at += block.size
    return bytes(out)


@pytest.mark.parametrize("compressed", COMPRESSIONS)
def test_segments_are_read_as_they_were_added(compressed: str | None) -> None:
    files, ref, segments = build(compressed=compressed)
    assert ref.size == len(files[ref.name])
    for leaf, data in enumerate(blocks()):
        found = read_segment(files.storage(), ref, segments[leaf])
        assert plain(found) == plain(data)
        for block in Block.each(found):
            block.check()


@pytest.mark.parametrize("compressed", COMPRESSIONS)
def test_the_oracle_reads_the_same(compressed: str | None) -> None:
    files, ref, segments = build(number=5, compressed=compressed)
    found = format_oracle.read_pack(ref.name, files[ref.name], 5)
    for leaf, data in enumerate(blocks()):
        there = [block for at, block in found.items() if segments[leaf].offset <= at]
        for block, other in zip(Block.each(data), there, strict=False):
            assert (block.leaf, block.name, block.kind) == (other.leaf, other.name, other.kind)
            assert list(block) == [(key, value) for key, value, _ in other.rows]


@pytest.mark.parametrize("compressed", COMPRESSIONS)
def test_the_same_blocks_and_number_give_the_same_bytes(compressed: str | None) -> None:
    first, second = build(3, compressed), build(3, compressed)
    assert first == second
    other, ref, _ = build(4, compressed)
    assert ref.name not in first[0]
    assert list(other.values()) != list(first[0].values())


def test_an_id_is_made_of_sizes_and_checksums() -> None:
    files, ref, _ = build(number=7)
    data = files[ref.name]
    digest = b""
    at = 64
    while at < len(data):
        size = struct.unpack_from("<Q", data, at + 8)[0]
        digest += struct.pack("<QI", size, crc32c(data[at + 8 : at + size]))
        at += size
    halves = [xxhash.xxh64_intdigest(digest, seed) for seed in (14, 15)]
    assert ref.id == struct.pack("<QQ", *halves)
    assert data[:64] == pack_header(ref.id, 7)


def test_compression_makes_packs_smaller_and_leaves_alone_what_it_cannot() -> None:
    sizes = {name: build(compressed=name)[1].size for name in COMPRESSIONS}
    assert sizes["zstd"] < sizes[None]
    assert sizes["lz4"] < sizes[None]
    store = new_store()
    state: Any = store.states()[0]
    state.put("a", 1)
    (data,) = filter(None, dump(store))
    leaf = next(Block.each(data)).leaf
    frames = []
    for name in COMPRESSIONS:
        builder = PackBuilder(1, name)
        builder.add(leaf, data)
        frames.append(b"".join(builder.finish()[1])[64:])
    assert frames[0][:4] == b"SKB1"


@pytest.mark.parametrize("compressed", COMPRESSIONS)
def test_frames_are_moved_to_another_pack_as_they_are(compressed: str | None) -> None:
    files, ref, segments = build(compressed=compressed)
    builder = PackBuilder(2, compressed)
    for segment in reversed(segments):
        builder.add_frames(segment.leaf, read_frames(files.storage(), ref, segment))
    other, parts, moved = builder.finish()
    files[other.name] = b"".join(parts)
    assert list(verify_pack(files.storage(), other, moved)) == []
    for segment in moved:
        found = read_segment(files.storage(), other, segment)
        assert plain(found) == plain(blocks()[segment.leaf])
    format_oracle.read_pack(other.name, files[other.name], 2)


def test_what_was_read_can_be_added_again() -> None:
    files, ref, segments = build()
    builder = PackBuilder(1)
    for segment in segments:  # checksums in the blocks that are read are bound to the old place
        builder.add(segment.leaf, read_segment(files.storage(), ref, segment))
    again, parts, _ = builder.finish()
    assert again == ref
    assert b"".join(parts) == files[ref.name]


# ---- Damage


def test_a_bad_frame_is_named_with_its_file_offset_leaf_and_checkpoint() -> None:
    files, ref, segments = build()
    frames = list(format_oracle.read_pack(ref.name, files[ref.name], 1))
    for leaf, segment in enumerate(segments):
        inside = [at for at in frames if 0 <= at - segment.offset < segment.length]
        for at in inside:
            broken = bytearray(files[ref.name])
            broken[at + 60] ^= 1
            bad = Files({ref.name: bytes(broken)})
            with pytest.raises(DamagedError, match=f"leaf {leaf} of checkpoint 8 needs") as caught:
                read_segment(bad.storage(), ref, segment, number=8)
            assert caught.value.file == f"dict:/{ref.name}"
            assert caught.value.offset == at


def test_all_damage_of_a_pack_is_found_at_once() -> None:
    files, ref, segments = build()
    frames = list(format_oracle.read_pack(ref.name, files[ref.name], 1))
    assert list(verify_pack(files.storage(), ref, segments)) == []
    assert list(verify_pack(files.storage(), ref)) == []
    rng = random.Random(SEED)
    for _ in range(50):
        hit = sorted(rng.sample(frames, rng.randrange(1, 6)))
        broken = bytearray(files[ref.name])
        for at in hit:
            broken[at + rng.randrange(16, 56)] ^= 1 << rng.randrange(8)  # not the size
        bad = Files({ref.name: bytes(broken)})
        for given in (segments, ()):
            found = list(verify_pack(bad.storage(), ref, given))
            assert [error.offset for error in found] == hit


def test_after_a_bad_size_verifying_goes_on_with_the_next_segment() -> None:
    files, ref, segments = build()
    broken = bytearray(files[ref.name])
    for segment in segments[0], segments[2]:
        broken[segment.offset + 15] = 255  # a size of no end
    bad = Files({ref.name: bytes(broken)})
    found = [error.offset for error in verify_pack(bad.storage(), ref, segments)]
    assert found == [segments[0].offset, segments[2].offset]
    assert len(list(verify_pack(bad.storage(), ref))) == 1  # without segments it is lost


def test_damage_of_header_and_length_is_found() -> None:
    files, ref, segments = build()
    data = files[ref.name]
    for bit in range(64 * 8):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        bad = Files({ref.name: bytes(broken)})
        (error,) = verify_pack(bad.storage(), ref, segments)
        assert error.offset == bit // 8
        with pytest.raises(DamagedError, match="header"):
            check_header(bad.storage(), ref)
    longer = list(verify_pack(Files({ref.name: data + bytes(8)}).storage(), ref, segments))
    assert [error.offset for error in longer] == [len(data), len(data)]
    short = Files({ref.name: data[: segments[-1].offset - 8]})
    found = list(verify_pack(short.storage(), ref, segments))
    assert found[0].offset == segments[-1].offset - 8
    assert "leaf 3" in str(found[-1])
    for end in range(64):
        assert list(verify_pack(Files({ref.name: data[:end]}).storage(), ref, segments))
    (error,) = verify_pack(Files().storage(), ref, segments)
    assert "not there" in str(error)


def test_a_block_with_good_checksum_and_bad_contents_is_found_by_verifying() -> None:
    builder = PackBuilder(1)
    data = bytearray(blocks()[0])
    first = next(Block.each(bytes(data)))
    names = 56 + len(first.name) + len(first.codec.text)
    data[names + -names % 8] ^= 1  # in the first hash
    builder.add(0, data)
    ref, parts, segments = builder.finish()
    files = Files({ref.name: b"".join(parts)})
    (error,) = verify_pack(files.storage(), ref, segments)
    assert (error.offset, "not valid" in str(error)) == (64, True)


def test_blocks_of_another_leaf_and_twice_the_same_state_are_refused() -> None:
    data = blocks()
    builder = PackBuilder(1)
    builder.add(0, data[1])
    builder.add(0, data[0] + data[0])
    ref, parts, segments = builder.finish()
    storage = Files({ref.name: b"".join(parts)}).storage()
    with pytest.raises(DamagedError, match="another leaf"):
        read_segment(storage, ref, segments[0])
    with pytest.raises(DamagedError, match="second block"):
        read_segment(storage, ref, segments[1])
    assert len(list(verify_pack(storage, ref, segments))) == 8


# ---- Compressed frames


def envelope(payload: bytes, inside: int, codec: int, **changes: Any) -> bytes:
    size = 40 + len(payload) + -len(payload) % 8
    head = {"size": size, "inside": inside, "length": len(payload), "codec": codec, **changes}
    numbers = (head["size"], head["inside"], head["length"], head["codec"])
    return struct.pack("<4sIQQQQ", b"SKZ1", 0, *numbers) + payload + bytes(-len(payload) % 8)


def read_crafted(frame: bytes) -> bytes:
    """A frame in a pack of its own, sealed and bound as it should be."""
    builder = PackBuilder(1)
    builder.add(0, frame)
    ref, parts, segments = builder.finish()
    return read_segment(Files({ref.name: b"".join(parts)}).storage(), ref, segments[0])


@pytest.mark.parametrize("is_squeezed", [False, True])
@pytest.mark.parametrize("name", ["zstd", "lz4"])
def test_compressed_frames_are_exactly_what_they_say(name: str, is_squeezed: bool) -> None:
    codec = compression.CODECS[name]
    block = blocks()[0]
    block = plain(block[: next(Block.each(block)).size])
    inside = squeeze(block) if is_squeezed else block
    assert inside is not None
    number = codec.number + 2 * is_squeezed

    def packed(data: bytes) -> bytes:
        head = struct.pack("<Q", len(data)) if is_squeezed else b""
        return head + (codec.compress(data) or b"")

    payload = packed(inside)
    if is_squeezed:
        assert compression.compress(block, codec) == (number, payload)
    assert read_crafted(envelope(payload, len(block), number)) == block
    padded = payload + bytes(8 + -len(payload) % 8)
    bad = {
        "other codec": envelope(payload, len(block), 3 - codec.number),
        "no codec": envelope(payload, len(block), 0),
        "squeezed or not": envelope(payload, len(block), number - 2 if is_squeezed else number + 2),
        "unknown codec": envelope(payload, len(block), 5),
        "zero bytes": envelope(payload, len(block), number | 1 << 40),
        "smaller": envelope(payload, len(block) - 8, number),
        "larger": envelope(payload, len(block) + 8, number),
        "huge": envelope(payload, 2**63, number),
        "gigabytes": envelope(payload, 1 << 34, number),
        "nothing": envelope(payload, 0, number),
        "payload beyond": envelope(payload, len(block), number, length=2**64 - 1),
        "payload short": envelope(payload, len(block), number, length=len(payload) - 1),
        "no payload": envelope(b"", len(block), number),
        "padding": envelope(padded, len(block), number, length=len(payload)),
        "garbage": envelope(bytes(range(64)), len(block), number),
        "two blocks": envelope(packed(inside * 2), 2 * len(block), number),
        "no block": envelope(packed(bytes(400)), 400, number),
        "a sealed block": envelope(packed(inside[:4] + b"1234" + inside[8:]), len(block), number),
        "a tail": envelope(payload + payload, len(block), number),
        "a longer one": envelope(packed(inside + b"x"), len(block), number),
    }
    for frame in bad.values():
        with pytest.raises(DamagedError):
            read_crafted(frame)


def test_unknown_compressions_are_refused() -> None:
    compression.check_compression(None)
    compression.check_compression("zstd")
    for name in ("gzip", "", 1, ["zstd"]):
        with pytest.raises(ArgumentError, match="is no compression"):
            compression.check_compression(name)


def test_a_missing_package_is_said_and_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    files, ref, segments = build(compressed="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CheckpointError, match=r"pip install statekit\[compression\]") as caught:
        read_segment(files.storage(), ref, segments[0])
    assert not isinstance(caught.value, DamagedError)
    with pytest.raises(CheckpointError, match="needs the package zstandard"):
        compression.check_compression("zstd")


# ---- Anything at all


@pytest.mark.parametrize("compressed", COMPRESSIONS)
def test_mutants_with_right_checksums_are_refused_or_decode_to_something_checked(
    compressed: str | None,
) -> None:
    rng = random.Random(SEED)
    files, ref, segments = build(compressed=compressed)
    frames = [bytes(read_frames(files.storage(), ref, segment)) for segment in segments]
    outcomes = {"damaged": 0, "corrupt": 0, "decoded": 0}
    for _ in range(MUTANTS // 3):
        leaf = rng.randrange(LEAVES)
        frame = bytearray(frames[leaf])
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(16, len(frame))
            if rng.random() < 0.3:
                at = 16 + at % 40  # headers matter most
            frame[at] = rng.choice((frame[at] ^ 1 << rng.randrange(8), 0, 255, 8))
        builder = PackBuilder(1)
        try:
            builder.add(leaf, frame)
        except AssertionError:
            continue  # it changed the size of a later frame: nobody can make a pack of that
        other, parts, moved = builder.finish()
        bad = Files({other.name: b"".join(parts)})
        outcomes[outcome(bad, other, moved[0])] += 1
    assert all(outcomes.values()) or compressed is not None, outcomes


def outcome(files: Files, ref: PackRef, segment: Segment) -> str:
    try:
        found = read_segment(files.storage(), ref, segment)
    except DamagedError:
        return "damaged"
    store = new_store()
    before = dump(store)
    try:
        store.decode_leaf(segment.leaf, found)
    except (CorruptBlockError, StateKitError):
        assert dump(store) == before
        return "corrupt"
    for block in Block.each(store.encode_leaf(segment.leaf)):
        block.check()
    return "decoded"


def test_a_pack_in_a_real_directory(tmp_path: Path) -> None:
    from statekit.storage import open_storage

    line = Line()
    line.take(dict(enumerate(blocks())))
    line.files.save(tmp_path)
    storage = open_storage(tmp_path)
    (ref,) = line.packs
    for chain in line.chains.values():
        for segment in chain:
            assert plain(read_segment(storage, ref, segment)) == plain(blocks()[segment.leaf])
    assert list(verify_pack(storage, ref)) == []


def test_the_example_of_the_documentation_is_what_is_written(tmp_path: Path) -> None:
    _, shown, _ = format_example.split_page(format_example.PAGE.read_text())
    assert shown == format_example.example(), "run: python tests/format_example.py --write"
    for files in format_example.checkpoints():
        Files(files).save(tmp_path)
    _, first = format_oracle.read_checkpoint(tmp_path, 1)
    rows: dict[bytes, Any] = {key.encode(): (at, None) for at, key in enumerate("abcde", 1)}
    assert first == {0: {"n": rows}}
    del rows[b"a"]
    rows[b"b"] = (7, None)
    _, second = format_oracle.read_checkpoint(tmp_path, 2)
    assert second == {0: {"n": rows}}


def test_a_provider_writes_the_bytes_of_the_example(tmp_path: Path) -> None:
    with sk.open("memory:", key_groups=1, subgroups=1) as kv:
        state = kv.value("n", int)
        for at, key in enumerate("abcde", 1):
            state[key] = at
        kv.checkpoint(tmp_path)
        del state["a"]
        state["b"] = 7
        kv.checkpoint(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix}
    for name, data in written.items():
        if name.endswith(".manifest"):  # the owner is drawn at random, and the example has none
            described = Manifest.decode(data, name)
            assert described.owner
            assert described.generation == 1
            written[name] = replace(described, owner="", generation=0).encode()
    first, second = format_example.checkpoints()
    assert written == {**first, **second}
