"""TEMPORARY: what statekit/store/frames.py will be, in Python. Goes when that is merged."""

from struct import Struct, unpack_from
from typing import Any

from statekit.store.digest import crc32c, xxh64

_HEAD = Struct("<4sIQ")


class Frames:
    def __init__(self) -> None:
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data)

    def append(self, data: Any) -> None:
        self._data += data

    def view(self) -> memoryview:
        return memoryview(self._data)


def _mix(id_: bytes, offset: int) -> int:
    return xxh64(id_ + offset.to_bytes(8, "little")) & 0xFFFFFFFF


def _size(frames: Any, at: int) -> int:
    if len(frames) - at < 16:
        return 0
    magic, _, size = _HEAD.unpack_from(frames, at)
    least = {b"SKB1": 56, b"SKZ1": 40}.get(magic, 1 << 63)
    return size if least <= size <= len(frames) - at and size % 8 == 0 else 0


def bind(frames: Any, id_: bytes, offset: int) -> None:
    at = 0
    while at < len(frames):
        size = _size(frames, at)
        assert size
        found = unpack_from("<I", frames, at + 4)[0] ^ _mix(id_, offset + at)
        frames[at + 4 : at + 8] = found.to_bytes(4, "little")
        at += size


def verify(frames: Any, id_: bytes, offset: int) -> int | None:
    at = 0
    while at < len(frames):
        size = _size(frames, at)
        if not size:
            return at
        crc = crc32c(memoryview(frames)[at + 8 : at + size])
        if unpack_from("<I", frames, at + 4)[0] != crc ^ _mix(id_, offset + at):
            return at
        at += size
    return None


def digest(frames: Any) -> bytes:
    out = b""
    at = 0
    while at < len(frames):
        size = _size(frames, at)
        assert size
        out += bytes(frames[at + 8 : at + 16]) + bytes(frames[at + 4 : at + 8])
        at += size
    return out


def seal(frames: Any) -> None:
    at = 0
    while at < len(frames):
        size = _size(frames, at)
        assert size
        if not any(frames[at + 4 : at + 8]):
            crc = crc32c(memoryview(frames)[at + 8 : at + size])
            frames[at + 4 : at + 8] = crc.to_bytes(4, "little")
        at += size
