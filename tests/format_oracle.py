"""A second reader of checkpoints, written from docs/format.md alone: the oracle of the format.

It shares no code with statekit: struct, json, the xxhash package and a CRC32C made here. It is
slow, trusts nothing it can check, and says what is wrong with FormatError.
"""

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

_POLYNOMIAL = 0x82F63B78  # CRC32C, reflected
KINDS = dict(enumerate(("i64", "f64", "bytes", "list", "map", "nested", "timers"), 1))


class FormatError(Exception):
    """The files are not what docs/format.md says."""


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def expect(is_good: bool, what: str) -> None:
    if not is_good:
        raise FormatError(what)


class Block(NamedTuple):
    leaf: int
    leaf_bits: int
    kind: str
    is_delta: bool
    name: str
    key_type: str
    rows: list[tuple[bytes, Any, int | None]]  # key, value (None: deleted), stamp


# ---- Manifest


def read_manifest(name: str, data: bytes) -> dict[str, Any]:
    magic, checksum, version, size, number, groups, subgroups, packs, segments, described, zero = (
        struct.unpack_from("<8sIIQQIIIIQQ", data)
    )
    expect(magic == b"SKMANIF1" and version == 1 and zero == 0, "header of the manifest")
    expect(size == len(data) and checksum == crc32c(data[12:]), "checksum of the manifest")
    expect(name == f"{number:012d}.manifest", "name of the manifest")
    at = 64 + described
    description = json.loads(data[64:at])
    expect(list(description) == sorted(description), "keys are sorted")
    expect(not any(data[at : at + -at % 8]), "padding")
    at += -at % 8
    expect(size == at + 32 * packs + 32 * segments, "size of the manifest")
    pack_rows = [struct.unpack_from("<16sQQ", data, at + 32 * i) for i in range(packs)]
    at += 32 * packs
    segment_rows = [struct.unpack_from("<IIQQII", data, at + 32 * i) for i in range(segments)]
    expect([row[0] for row in segment_rows] == sorted(row[0] for row in segment_rows), "order")
    return {
        **description,
        "number": number,
        "key_group_count": groups,
        "subgroups": subgroups,
        "packs": pack_rows,
        "segments": segment_rows,
    }


# ---- Packs


def read_pack(name: str, data: bytes, number: int) -> dict[int, Block]:
    """The blocks of a pack by the offset of their frames; every rule of packs is checked."""
    magic, pack_id, version, checksum, found = struct.unpack_from("<8s16sIIQ", data)
    expect(magic == b"SKPACK1\0" and version == 1, "header of the pack")
    expect(checksum == crc32c(data[:28]) and not any(data[40:64]), "header of the pack")
    expect(found == number and name == pack_id.hex() + ".pack", "name of the pack")
    blocks = {}
    digest = b""
    at = 64
    while at < len(data):
        size = struct.unpack_from("<Q", data, at + 8)[0]
        expect(size % 8 == 0 and at + size <= len(data), f"size of the frame at {at}")
        frame = data[at : at + size]
        plain = crc32c(frame[8:])
        mix = xxhash.xxh64_intdigest(pack_id + struct.pack("<Q", at), 0) & 0xFFFFFFFF
        expect(struct.unpack_from("<I", frame, 4)[0] == plain ^ mix, f"checksum at {at}")
        digest += struct.pack("<QI", size, plain)
        blocks[at] = read_block(_inside(frame))
        at += size
    ids = (xxhash.xxh64_intdigest(digest, seed) for seed in (2 * number, 2 * number + 1))
    expect(struct.pack("<QQ", *ids) == pack_id, "id of the pack")
    return blocks


def _inside(frame: bytes) -> bytes:
    """The block in a frame."""
    if frame[:4] == b"SKB1":
        return frame
    expect(frame[:4] == b"SKZ1", "magic of a frame")
    inside, length, codec = struct.unpack_from("<QQB", frame, 16)
    expect(not any(frame[33:40]) and not any(frame[40 + length :]), "zeros in a frame")
    payload, squeezed = frame[40 : 40 + length], inside
    if codec in (3, 4):
        (squeezed,) = struct.unpack_from("<Q", payload)
        payload = payload[8:]
    if codec in (1, 3):
        import zstandard

        block = zstandard.ZstdDecompressor().decompress(payload)
    else:
        expect(codec in (2, 4), "codec")
        import lz4.block

        block = lz4.block.decompress(payload, uncompressed_size=squeezed)
    expect(len(block) == squeezed, "size of what was compressed")
    if codec in (3, 4):
        block = _restored(block)
    expect(len(block) == inside and not any(block[4:8]), "block inside a frame")
    return block


def _restored(data: bytes) -> bytes:
    """The block that was squeezed, without the rest of its header's checks."""
    n, key_bytes, value_bytes = struct.unpack_from("<QQQ", data, 16)
    kind, flags, key_width = KINDS[data[45]], data[46], data[47]
    head = 56 + data[49] + data[50]
    key_type = data[56 + data[49] : head].decode()
    at = head + -head % 8
    out, letter = bytearray(data[:at]), "Q" if flags & 2 else "I"

    def taken(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    def joined(width: int) -> list[int]:
        planes = taken(width * n)
        return [int.from_bytes(planes[i::n], "little") for i in range(n)]

    def offsets() -> list[int]:
        ends = [0]
        for length in joined(4):
            ends.append(ends[-1] + length)
        return ends if n else []

    def put(column: bytes) -> None:
        out.extend(column + bytes(-len(column) % 8))

    def put_numbers(letter: str, numbers: list[int]) -> None:
        put(struct.pack(f"<{len(numbers)}{letter}", *numbers))

    if key_width:
        keys = struct.pack(f"<{n}Q", *joined(8))
        ends = [8 * i for i in range(n + 1)]
    else:
        ends = offsets()
        keys = taken(key_bytes)
    hashes = [key_hash(key_type, keys[start:stop]) for start, stop in pairwise(ends)]
    put_numbers("Q", hashes)
    if not key_width:
        put_numbers(letter, ends)
    put(keys)
    if flags & 1:
        put(taken(n))
    if flags & 4:
        put_numbers("Q", joined(8))
    if kind in ("i64", "f64"):
        put_numbers("Q", joined(8))
    else:
        put_numbers(letter, offsets())
        put(taken(value_bytes))
    expect(at == len(data), "end of a squeezed block")
    return bytes(out)


# ---- Blocks


def read_block(data: bytes) -> Block:
    size, n, key_bytes, value_bytes, leaf, leaf_bits, kind_number, flags, key_width, version = (
        struct.unpack_from("<QQQQIBBBBB", data, 8)
    )
    expect(data[:4] == b"SKB1" and version == 1 and size == len(data), "header of a block")
    name_length, key_type_length = data[49], data[50]
    expect(not any(data[51:56]), "zeros in a block")
    name = data[56 : 56 + name_length].decode()
    key_type = data[56 + name_length : 56 + name_length + key_type_length].decode()
    expect(key_width == (8 if key_type == "i" else 0), "key width")
    kind = KINDS[kind_number]
    columns = _Columns(data, 56 + name_length + key_type_length, "Q" if flags & 2 else "I")
    hashes = columns.numbers("Q", n)
    if key_width:
        expect(key_bytes == 8 * n, "length of int keys")
        whole = columns.take(key_bytes)
        keys = [whole[8 * i : 8 * i + 8] for i in range(n)]
    else:
        keys = columns.pieces(n, key_bytes)
    marks = columns.numbers("B", n) if flags & 1 else [0] * n
    stamps: list[Any] = columns.numbers("q", n) if flags & 4 else [None] * n
    values: list[Any]
    if kind in ("i64", "f64"):
        expect(value_bytes == 8 * n, "length of numbers")
        values = columns.numbers("q" if kind == "i64" else "d", n)
    else:
        values = columns.pieces(n, value_bytes)
    columns.end()
    expect(hashes == [key_hash(key_type, key) for key in keys], "hashes of keys")
    order = list(zip(hashes, keys, strict=True))
    expect(order == sorted(set(order)), "order of entries")
    expect(all(h >> 64 - leaf_bits == leaf for h in hashes) or leaf_bits == 0, "leaf of entries")
    rows = [
        (key, None if mark else value, stamp)
        for key, mark, stamp, value in zip(keys, marks, stamps, values, strict=True)
    ]
    return Block(leaf, leaf_bits, kind, bool(flags & 1), name, key_type, rows)


class _Columns:
    """Takes columns from a block, each at a multiple of 8 with zeros before it."""

    def __init__(self, data: bytes, at: int, offset_code: str) -> None:
        self.data = data
        self.at = at
        self.offset_code = offset_code

    def take(self, length: int) -> bytes:
        expect(not any(self.data[self.at : self.at + -self.at % 8]), "padding in a block")
        self.at += -self.at % 8
        expect(self.at + length <= len(self.data), "length of a column")
        self.at += length
        return self.data[self.at - length : self.at]

    def numbers(self, code: str, count: int) -> list[Any]:
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))

    def pieces(self, count: int, length: int) -> list[bytes]:
        offsets = self.numbers(self.offset_code, count + 1)
        expect(offsets[0] == 0 and offsets[-1] == length, "offsets of a column")
        whole = self.take(length)
        return [whole[offsets[i] : offsets[i + 1]] for i in range(count)]

    def end(self) -> None:
        self.take(0)
        expect(self.at == len(self.data), "size of a block")


def key_hash(key_type: str, key: bytes) -> int:
    """XXH64 with seed 42; of a tuple, each part's hash is the seed of the next."""
    if key_type[0] != "(":
        return xxhash.xxh64_intdigest(key, 42)
    seed = 42
    at = 0
    for part in key_type[1:-1]:
        length = 8
        if part != "i":
            length = struct.unpack_from("<I", key, at)[0]
            at += 4
        seed = xxhash.xxh64_intdigest(key[at : at + length], seed)
        at += length
    return seed


# ---- Checkpoints

Rows = dict[str, dict[bytes, tuple[Any, int | None]]]


def read_checkpoint(folder: Path, number: int) -> tuple[dict[str, Any], dict[int, Rows]]:
    """The manifest, and the rows of all leaves: by state and key, value and stamp."""
    name = f"{number:012d}.manifest"
    manifest = read_manifest(name, (folder / name).read_bytes())
    packs = []
    for pack_id, size, wrote in manifest["packs"]:
        data = (folder / f"{pack_id.hex()}.pack").read_bytes()
        expect(len(data) == size, "size of a pack")
        packs.append((read_pack(f"{pack_id.hex()}.pack", data, wrote), data))
    leaves: dict[int, Rows] = {}
    before = None
    for leaf, pack, offset, length, flags, zero in manifest["segments"]:
        expect(zero == 0 and flags == (leaf == before), "flags of a segment")
        before = leaf
        blocks, data = packs[pack]
        at = offset
        while at < offset + length:
            block = blocks[at]
            expect(block.leaf == leaf, "leaf of a block")
            _apply(leaves.setdefault(leaf, {}), block)
            at += struct.unpack_from("<Q", data, at + 8)[0]
        expect(at == offset + length, "end of a segment")
    return manifest, {
        leaf: {state: rows for state, rows in states.items() if rows}
        for leaf, states in leaves.items()
    }


def _apply(states: Rows, block: Block) -> None:
    if not block.is_delta:
        states[block.name] = {}
    rows = states.setdefault(block.name, {})
    for key, value, stamp in block.rows:
        if value is None:
            rows.pop(key, None)
        else:
            rows[key] = (value, stamp)
