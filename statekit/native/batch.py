"""Batches: one native call for a column of keys, and its results as views of native memory."""

from array import array
from itertools import compress
from typing import Any, Literal, NamedTuple, Protocol

from statekit._native import ffi, lib
from statekit.errors import (
    UnknownEntryError,
    closed_error,
    native_error,
    unequal_columns,
    where,
)
from statekit.keys import KeyCodec
from statekit.native.buffers import owned_view
from statekit.native.columns import Column, column, key_column


class Owner(Protocol):
    """What a batch must know of its state (states.State)."""

    _ptr: Any
    _id: int
    name: str
    codec: KeyCodec


# Tables for bytes.translate: one pass in C over a batch's status bytes.
_IS_OK = bytes(status == lib.SK_OK for status in range(256))
_IS_UNKNOWN = bytes(status == lib.SK_UNKNOWN for status in range(256))


class Numbers(NamedTuple):
    """Values of format 'q' or 'd'; found[r] is 1 if there is a value, else 0, as is the value."""

    values: "memoryview[Any]"
    found: memoryview

    def to_list(self) -> list[Any]:
        """The values, None where there is none."""
        return [
            value if there else None for value, there in zip(self.values, self.found, strict=True)
        ]


class Blobs(NamedTuple):
    """Value r is data[offsets[r]:offsets[r + 1]]; found[r] is 1 if there is one."""

    data: memoryview
    offsets: memoryview
    found: memoryview

    def to_list(self) -> list[bytes | None]:
        """The values, None where there is none."""
        data, ends = self.data, self.offsets.tolist()
        return [
            bytes(data[ends[r] : ends[r + 1]]) if there else None
            for r, there in enumerate(self.found)
        ]


class Batch(NamedTuple):
    """What a batch call wrote."""

    statuses: bytearray
    out: "memoryview[Any] | None"
    offsets: memoryview | None
    data: memoryview | None

    def done(self) -> memoryview:
        """One byte per record: 1 where the status is SK_OK."""
        return memoryview(self.statuses.translate(_IS_OK))

    def blobs(self) -> Blobs:
        assert self.data is not None
        assert self.offsets is not None
        return Blobs(self.data, self.offsets, self.done())

    def result(self) -> Any:
        """What the caller of the batch method would have got."""
        if self.data is not None:
            return self.blobs()
        return self.done() if self.out is None else Numbers(self.out, self.done())


def run_batch(
    state: Owner,
    op: int,
    keys: Any,
    *,
    values: Any = None,
    want: str = "*",
    map_keys: Any = None,
    raw: bool = False,
    numbers: dict[str, Any] | None = None,
    out_format: Literal["q", "d"] | None = None,
    wants_bytes: bool = False,
) -> Batch:
    """Runs a batch.

    want: the letter of the values' column (columns.py). raw: bytes are bytes, not MessagePack.
    numbers: fields of sk_batch_args. out_format, wants_bytes: the results that the operation has.
    """
    ptr = state._ptr  # read once: another thread may close the store
    if ptr is None:
        raise closed_error(state.name)
    key_col = key_column(keys, state.codec, f"the keys for state {state.name!r}")
    n = key_col.n
    args = ffi.new("sk_batch_args *")
    args.n = n
    key_col.fill(args.keys)
    keep = [key_col]
    for source, letter, field in ((values, want, "values"), (map_keys, "*", "map_keys")):
        if source is None:
            continue
        col = column(source, letter, f"the {field} for state {state.name!r}")
        if col.n != n:
            raise unequal_columns(n, col.n, field.replace("_", " "), state.name)
        col.fill(getattr(args, field), raw=raw)
        keep.append(col)
    for field, number in (numbers or {}).items():
        setattr(args, field, number)

    statuses = bytearray(n)
    args.status = native_statuses = ffi.from_buffer("uint8_t[]", statuses)
    out = offsets = native_out = native_offsets = None
    if out_format is not None:
        out = memoryview(bytearray(8 * n)).cast(out_format)
        args.out = native_out = ffi.from_buffer(out)
    buf = ffi.new("sk_buf *")
    if wants_bytes:
        offsets = memoryview(bytearray(8 * (n + 1))).cast("q")
        args.out_offsets = native_offsets = ffi.from_buffer("int64_t[]", offsets)
        args.buf = buf
    status = lib.sk_batch(ptr, state._id, op, args)
    data = owned_view(buf) if wants_bytes else None
    del keep, native_statuses, native_out, native_offsets  # they held memory for C until here

    if status:
        record = args.failed
        if record < 0:  # the arguments were refused as a whole
            raise native_error(status, state.name)
        key = state.codec.show(key_col.encoded(record))
        error = native_error(status, state.name, key, record)
        error.statuses = bytes(statuses)
        raise error
    batch = Batch(statuses, out, offsets, data)
    if args.unknown:
        raise _unknown(state, key_col, batch)
    return batch


def _unknown(state: Owner, keys: Column, batch: Batch) -> UnknownEntryError:
    n = len(batch.statuses)
    records = array("q", compress(range(n), batch.statuses.translate(_IS_UNKNOWN)))
    show = state.codec.show
    return UnknownEntryError(
        f"{len(records)} of {n} entries are not in this store, and their leaves are not whole"
        f"{where(state.name, record=records[0])}. Ask the leaves' homes and install() the "
        "answers, then do these records again; the others are done.",
        state=state.name,
        keys=lambda: tuple(show(keys.encoded(record)) for record in records),
        records=records,
        statuses=bytes(batch.statuses),
        result=batch.result(),
    )
