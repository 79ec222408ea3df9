"""Encoded blocks, read in place: one state's entries in one leaf (csrc/block.h has the layout).

>>> from statekit import Store, leaf_of
>>> store = Store()
>>> visits = store.state("visits", "i64")
>>> visits.put("alice", 7)
>>> (block,) = Block.each(store.encode_leaf(leaf_of(str, "alice")))
>>> block.name, block.kind, block.entries, block.find("alice")
('visits', 'i64', 1, 7)
>>> list(block)
[(b'alice', 7)]
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from struct import Struct
from typing import Any, TypeAlias

from statekit._native import ffi, lib
from statekit.errors import ArgumentError, native_error, shorten
from statekit.keys import KEY_FAULTS, KeyCodec, key_codec, key_error
from statekit.kinds import KIND_NAMES, KINDS
from statekit.native.buffers import empty_buffer, native_text, push_buffer, readable

_NUMBERS = {name: Struct(f"<{row.code}") for name, row in KINDS.items() if row.code}


class Block:
    """One block at the start of a buffer. Views of its columns share the buffer's memory."""

    __slots__ = ("_data", "_info", "_native", "codec", "kind", "name")

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        """Reads the header and checks that the columns lie inside; check() does the rest."""
        info = ffi.new("sk_block_info *")
        view = memoryview(data).cast("B")
        native = readable(data)
        status = lib.sk_block_read(native, len(view), info)
        if status:
            raise native_error(status)
        self._info = info
        self._data = view[: info.size]
        self._native = native
        self.name: str = native_text(info.name)
        self.kind: str = KIND_NAMES[info.kind]
        self.codec: KeyCodec = key_codec(native_text(info.key_type))

    @classmethod
    def each(cls, data: bytes | bytearray | memoryview) -> Iterator["Block"]:
        """The blocks that lie one after the other in a buffer."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            block = cls(view[at:])
            yield block
            at += block.size

    def __repr__(self) -> str:
        delta = " delta" if self.is_delta else ""
        return f"<Block{delta} of {self.name!r}, leaf {self.leaf}, {self.entries} entries>"

    # ---- The header

    @property
    def size(self) -> int:
        """Bytes, header included."""
        return int(self._info.size)

    @property
    def entries(self) -> int:
        return int(self._info.entries)

    def __len__(self) -> int:
        return self.entries

    @property
    def leaf(self) -> int:
        return int(self._info.leaf)

    @property
    def leaves(self) -> int:
        """The number of leaves of the store it was made in."""
        return 1 << int(self._info.leaf_bits)

    @property
    def is_delta(self) -> bool:
        """True if it holds only changes, including deletions, rather than all entries."""
        return bool(self._info.is_delta)

    @property
    def is_timed(self) -> bool:
        """True if its state is timed: then it has stamps."""
        return bool(self._info.is_timed)

    # ---- Columns

    def _column(self, start: int, size: int, code: Any = "B") -> memoryview:
        return self._data[start : start + size].cast(code)

    def _offsets(self, start: int) -> memoryview:
        width = self._info.offset_width
        return self._column(start, width * (self.entries + 1), "I" if width == 4 else "Q")

    @property
    def hashes(self) -> memoryview:
        """Routing hashes, ascending."""
        return self._column(self._info.hashes, 8 * self.entries, "Q")

    @property
    def key_column(self) -> memoryview:
        """All encoded keys, one after the other; 'q' if they are ints."""
        code = "q" if self._info.key_width else "B"
        return self._column(self._info.keys, self._info.key_bytes, code)

    @property
    def key_offsets(self) -> memoryview | None:
        """Key r is key_column[key_offsets[r]:key_offsets[r + 1]]; None if the keys are ints."""
        return self._offsets(self._info.key_offsets) if self._info.key_offsets else None

    @property
    def value_column(self) -> memoryview:
        """All values: 'q' or 'd' for numbers, else bytes, one after the other."""
        code = KINDS[self.kind].code or "B"
        return self._column(self._info.values, self._info.value_bytes, code)

    @property
    def value_offsets(self) -> memoryview | None:
        """Value r is value_column[value_offsets[r]:value_offsets[r + 1]]; None for numbers."""
        return self._offsets(self._info.value_offsets) if self._info.value_offsets else None

    @property
    def marks(self) -> memoryview | None:
        """In a delta, one byte per entry: 1 for a deletion."""
        return self._column(self._info.marks, self.entries) if self._info.marks else None

    @property
    def stamps(self) -> memoryview | None:
        """In a block of a timed state, when each entry was last touched, in ms ('q').

        -2**63: before the first watermark. 0 for a deletion.
        """
        if not self._info.stamps:
            return None
        return self._column(self._info.stamps, 8 * self.entries, "q")

    # ---- Entries

    def find(self, key: Any, *, missing: Any = None, deleted: Any = None) -> Any:
        """The value of one key by binary search, decoding nothing else.

        `missing` if the block does not have the key, `deleted` if it has a deletion of the key.
        """
        try:
            k = self.codec.encode(key)
        except KEY_FAULTS:
            raise key_error(self.codec, key, self.name) from None
        buffer = empty_buffer()
        status = lib.sk_block_find(self._native, self.size, k, len(k), buffer.ptr)
        length = buffer.length
        if status == lib.SK_MISSING:
            push_buffer(buffer)
            return deleted if length else missing
        if status:
            raise native_error(status, self.name, key)
        data = buffer.take(length)
        number = _NUMBERS.get(self.kind)
        return number.unpack(data)[0] if number else data

    def key_list(self) -> list[bytes]:
        """The encoded keys, in the order of their routing hashes."""
        return _pieces(self.key_column, self.key_offsets)

    def value_list(self) -> list[Any]:
        """The values, in the order of the keys; deletions have the value None."""
        offsets = self.value_offsets
        column = self.value_column
        values: list[Any] = column.tolist() if offsets is None else _pieces(column, offsets)
        marks = self.marks
        if marks is None or 1 not in marks:
            return values
        return [None if mark else value for value, mark in zip(values, marks, strict=True)]

    def __iter__(self) -> Iterator[tuple[bytes, Any]]:
        """(encoded key, value), as key_list() and value_list() have them."""
        return zip(self.key_list(), self.value_list(), strict=True)

    # ---- Integrity

    def check(self) -> None:
        """Checks order, offset, hash, leaf and value of every entry. CorruptBlockError if bad."""
        self._expect(lib.sk_block_check(self._native, self.size))

    def verify(self, seed: int = 0) -> None:
        """Checks the checksum that seal() wrote with this seed. CorruptBlockError if it differs."""
        self._expect(lib.sk_block_verify(self._native, self.size, seed))

    def _expect(self, status: int) -> None:
        if status:
            raise native_error(status, self.name)


def seal(block: bytearray | memoryview, seed: int = 0) -> None:
    """Writes CRC32C XOR seed of the block into it. The seed can bind it to a place in a file."""
    native = ffi.from_buffer("uint8_t[]", block, require_writable=True)
    status = lib.sk_block_seal(native, len(native), seed)
    if status:
        raise native_error(status)


def rewrite(
    block: bytes | bytearray | memoryview,
    *,
    leaf: int | None = None,
    leaves: int | None = None,
    kind: str | None = None,
    timed: bool | None = None,
    as_delta: bool = False,
) -> bytes:
    """Makes the block at the start of a buffer anew, for another place or type; None: as it is.

    The result has only the entries of `leaf` of `leaves`. i64 may become f64, entries may get
    stamps (not known yet) or lose them. as_delta: a full block becomes a delta. If no entry is
    left, the result is empty for a delta; otherwise it is a full block without entries. Entries of
    that leaf are checked as by check(). SchemaError if the kinds do not fit.

    >>> from statekit import Store
    >>> store = Store(key_groups=1, subgroups=1)
    >>> store.state("n", "i64", int).put_many([1, 2, 3], [10, 20, 30])
    >>> data = store.encode_leaf(0)
    >>> [Block(rewrite(data, leaf=i, leaves=2, kind="f64")).value_list() for i in range(2)]
    [[30.0], [10.0, 20.0]]
    """
    was = Block(block)
    leaves = was.leaves if leaves is None else leaves
    bits = leaves.bit_length() - 1
    row = KINDS.get(was.kind if kind is None else kind)
    if row is None or leaves <= 0 or leaves != 1 << bits:
        raise ArgumentError(
            f"no block has kind {shorten(kind)} in a store of {shorten(leaves)} leaves. "
            f"Use one of {', '.join(KINDS)} and a power of two."
        )
    flags = lib.SK_TIMED if (was.is_timed if timed is None else timed) else 0
    buffer = empty_buffer()
    status = lib.sk_block_rewrite(
        was._native,
        was.size,
        was.leaf if leaf is None else leaf,
        bits,
        row.number,
        flags,
        as_delta,
        buffer.ptr,
    )
    if status:
        push_buffer(buffer)
        raise native_error(status, was.name)
    return buffer.take(buffer.length)


Types: TypeAlias = Mapping[str, tuple[str, bool]]  # of states, by name: kind, timed


def fit_blocks(blocks: bytes, types: Types) -> bytes:
    """Blocks as a store with these types takes them: older blocks may have other types."""
    parts: list[bytes | memoryview] = []
    is_changed = False
    for block, piece in block_pieces(blocks):
        kind, timed = types.get(block.name, (block.kind, block.is_timed))
        if (kind, timed) == (block.kind, block.is_timed):
            parts.append(piece)
        else:
            is_changed = True
            parts.append(rewrite(bytes(piece), kind=kind, timed=timed))
    return b"".join(parts) if is_changed else blocks


def block_pieces(blocks: bytes | memoryview) -> Iterator[tuple[Block, memoryview]]:
    """The blocks that lie one after the other, and the bytes of each."""
    view, at = memoryview(blocks), 0
    for block in Block.each(blocks):
        yield block, view[at : at + block.size]
        at += block.size


def _pieces(data: memoryview, offsets: memoryview | None) -> list[bytes]:
    """The items of a column, as bytes."""
    whole = data.tobytes()  # slices of bytes are faster than of a view
    if offsets is None:
        return [whole[at : at + 8] for at in range(0, len(whole), 8)]
    return [whole[start:end] for start, end in pairwise(offsets.tolist())]
