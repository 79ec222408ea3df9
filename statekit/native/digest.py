"""The two public checksums of csrc: CRC32C for integrity, XXH64 for routing."""

from typing import Any

from statekit._native import lib
from statekit.native.buffers import readable


def crc32c(data: Any, seed: int = 0) -> int:
    """CRC32C of a buffer; seed is the CRC32C of the bytes before it.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    >>> crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789")
    True
    """
    native = readable(data)
    return int(lib.sk_crc32c(native, len(native), seed))


def xxh64(data: Any, seed: int = 0) -> int:
    """XXH64 of a buffer.

    >>> hex(xxh64(b""))
    '0xef46db3751d8e999'
    """
    native = readable(data)
    return int(lib.sk_xxh64(native, len(native), seed))
