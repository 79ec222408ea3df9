"""Compression of blocks in packs: zstd or lz4, of the extra `compression`, imported when used.

The settings are fixed, so that the same blocks give the same bytes (with the same version of the
compressing library). zstd: level 3, one frame with its content size and without a checksum of its
own, since frames of packs have one. lz4: one raw block in the default mode, no size before it.

A block is squeezed before it is compressed (csrc/squeeze.c), unless it is of a form that cannot be.
Of 20,000 counts under keys of 13 bytes that leaves 103 KB after zstd, and 339 KB without.

Bytes that are read may be anything. A payload is decompressed only if the codec can make the stated
size of so few bytes at all. So a few bytes can never make us allocate all memory.
"""

import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from struct import Struct
from typing import Any, NamedTuple

from statekit.errors import ArgumentError, CheckpointError, shorten
from statekit.native.frames import restore, squeeze

_ZSTD_LEVEL = 3
_ZSTD_RATIO_MAX = 1 << 16  # twice what zstd can reach: 128 KiB of one repeated byte take 4 bytes
_LZ4_RATIO_MAX = 256  # a byte of a match's length stands for 255 bytes
_SQUEEZED = 2  # what is added to the number of a codec if the block was squeezed
_SIZE = Struct("<Q")  # of the squeezed block, before the payload
_LZ4_BLOCK_MAX = 0x7E000000  # larger blocks are not compressed


class Compressor(NamedTuple):
    """One way of compressing. Its functions are pure, and may run in several threads at once."""

    number: int  # in a frame; of a squeezed block, 2 more
    name: str  # in a manifest, and for users
    package: str
    ratio_max: int  # no payload decompresses to more than this many times its length
    compress: Callable[[Any], bytes | None]  # None: the block cannot be compressed
    decompress: Callable[[Any, int], bytes]  # raises what the package raises


class _WrongSize(Exception):  # noqa: N818 - it never leaves this file
    pass


class _Contexts(threading.local):
    """zstd's objects, a pair per thread. Making them costs more than compressing a small block."""

    def __init__(self) -> None:
        zstd = _package(CODECS["zstd"])
        self.packer = zstd.ZstdCompressor(
            level=_ZSTD_LEVEL, write_checksum=False, write_content_size=True
        )
        self.unpacker = zstd.ZstdDecompressor()


@cache
def _contexts() -> _Contexts:
    return _Contexts()


def _zstd_compress(block: Any) -> bytes | None:
    payload: bytes = _contexts().packer.compress(block)
    return payload


def _zstd_decompress(payload: Any, size: int) -> bytes:
    # The size that the payload states is what will be allocated.
    if _package(CODECS["zstd"]).frame_content_size(payload) != size:
        raise _WrongSize
    data: bytes = _contexts().unpacker.decompress(payload, allow_extra_data=False)
    return data


def _lz4_compress(block: Any) -> bytes | None:
    if len(block) > _LZ4_BLOCK_MAX:
        return None
    payload: bytes = _package(CODECS["lz4"]).compress(block, store_size=False)
    return payload


def _lz4_decompress(payload: Any, size: int) -> bytes:
    if size > _LZ4_BLOCK_MAX:
        raise _WrongSize
    data: bytes = _package(CODECS["lz4"]).decompress(payload, uncompressed_size=size)
    return data


CODECS = {
    codec.name: codec
    for codec in (
        Compressor(1, "zstd", "zstandard", _ZSTD_RATIO_MAX, _zstd_compress, _zstd_decompress),
        Compressor(2, "lz4", "lz4.block", _LZ4_RATIO_MAX, _lz4_compress, _lz4_decompress),
    )
}
_BY_NUMBER = {codec.number: codec for codec in CODECS.values()}


def check_compression(name: Any) -> None:
    """Refuses a compression that is not known, or whose package cannot be imported."""
    if name is None:
        return
    if not isinstance(name, str) or name not in CODECS:
        raise ArgumentError(
            f"{shorten(name)} is no compression. Use {' or '.join(map(repr, CODECS))}, or None."
        )
    _package(CODECS[name])


def compress(block: Any, codec: Compressor) -> tuple[int, bytes | None]:
    """What a frame has of a block: the number that says how it is compressed, and the payload."""
    squeezed = squeeze(block)
    if squeezed is None:
        return codec.number, codec.compress(block)
    payload = codec.compress(squeezed)
    if payload is None:
        return codec.number, None
    return codec.number + _SQUEEZED, _SIZE.pack(len(squeezed)) + payload


def decompress(payload: Any, number: int, size: int) -> bytes | bytearray | None:
    """The block that was compressed; None if these are not `size` bytes."""
    if not _SQUEEZED < number <= 2 * _SQUEEZED:
        return _decompress(payload, number, size)
    if len(payload) < _SIZE.size:
        return None
    (squeezed_size,) = _SIZE.unpack_from(payload)
    squeezed = _decompress(payload[_SIZE.size :], number - _SQUEEZED, squeezed_size)
    return None if squeezed is None else restore(squeezed, size)


def _decompress(payload: Any, number: int, size: int) -> bytes | None:
    """The bytes that the codec of this number compressed; None if they are not `size` bytes."""
    codec = _BY_NUMBER.get(number)
    if codec is None or size > codec.ratio_max * len(payload):
        return None
    _package(codec)  # raises if the package is missing, which is no damage
    try:
        data = codec.decompress(payload, size)
    except Exception:  # the packages have exceptions of their own; any means bad bytes
        return None
    return data if len(data) == size else None


def _package(codec: Compressor) -> Any:
    try:
        return import_module(codec.package)
    except ImportError as error:
        raise CheckpointError(
            f"{codec.name} needs the package {codec.package.partition('.')[0]}, which cannot be "
            f"imported ({error}). Run: pip install statekit[compression]"
        ) from error
