"""Frames: the items of a channel as bytes.

    0   2   "sk"                     so that a stream which is out of step is noticed at once
    2   1   kind
    3   1   0
    4   4   length of what follows, little endian
    8       SCHEMA     an Arrow schema (IPC): of the batches that follow
            RECORDS    an Arrow batch (IPC), without its schema
            WATERMARK  i64, milliseconds
            BARRIER    u64, the number of a checkpoint
            MARK       JSON: [version, [[[[first, stop], ...], old, new], ...]]: key-groups
            END        nothing
            CREDIT     u64, in the other direction: bytes of batches that were taken

Whoever reads trusts nothing: lengths are bounded before anything is allocated, batches are
validated down to their offsets, and nothing is ever unpickled. What is wrong is an EngineError.
"""

import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pyarrow as pa

from statekit.assignment import group_ranges
from statekit.engine.items import Barrier, Change, End, Mark, Move, Watermark
from statekit.errors import EngineError, StateKitError, shorten

HEADER = struct.Struct("<2sBBI")
MAGIC = b"sk"
SCHEMA, RECORDS, WATERMARK, BARRIER, MARK, END, CREDIT = range(1, 8)
NAMES = {
    SCHEMA: "schema", RECORDS: "records", WATERMARK: "watermark", BARRIER: "barrier", MARK: "mark",
    END: "end", CREDIT: "credit",
}  # fmt: skip
RECORDS_MAX = 256 << 20  # bytes of one batch
CONTROL_MAX = 1 << 20  # of anything else
GROUPS_MAX = 1 << 20

_I64, _U64 = struct.Struct("<q"), struct.Struct("<Q")
_LENGTHS = {WATERMARK: 8, BARRIER: 8, END: 0, CREDIT: 8}


def frame(kind: int, data: Any = b"") -> list[Any]:
    """The buffers of a frame."""
    size = memoryview(data).nbytes
    most = RECORDS_MAX if kind == RECORDS else CONTROL_MAX
    if size > most:
        raise EngineError(
            f"{NAMES[kind]} of {size} bytes cannot be sent: {most} is the most. Make batches "
            "smaller."
        )
    return [HEADER.pack(MAGIC, kind, 0, size), data]


def header(data: Any) -> tuple[int, int]:
    """The kind of a frame and its length."""
    magic, kind, zero, size = HEADER.unpack(data)
    if magic != MAGIC or zero or kind not in NAMES:
        raise EngineError(
            f"{bytes(data).hex()} is no header of a frame: what writes here is no task of this job."
        )
    if size > (RECORDS_MAX if kind == RECORDS else CONTROL_MAX):
        raise EngineError(f"a frame says that it has {size} bytes of {NAMES[kind]}: too many.")
    if size != _LENGTHS.get(kind, size):
        raise EngineError(f"a frame of {NAMES[kind]} has {size} bytes, not {_LENGTHS[kind]}.")
    return kind, size


def pack(item: Watermark | Barrier | Mark | End) -> list[Any]:
    if isinstance(item, Watermark):
        return frame(WATERMARK, _I64.pack(item.time))
    if isinstance(item, Barrier):
        return frame(BARRIER, _U64.pack(item.number))
    if isinstance(item, Mark):
        return frame(MARK, msgspec.json.encode(move_to_plain(item.move)))
    return frame(END)


def unpack(kind: int, data: bytes | bytearray) -> Watermark | Barrier | Mark | End:
    """The item of a frame that has neither records nor a schema."""
    if kind == WATERMARK:
        return Watermark(_I64.unpack(data)[0])
    if kind == BARRIER:
        return Barrier(_U64.unpack(data)[0])
    if kind == MARK:
        return Mark(move_from_plain(_checked("mark", lambda: msgspec.json.decode(data))))
    if kind == END:
        return End()
    raise EngineError(f"a frame of {NAMES[kind]} came where none belongs.")


def pack_schema(schema: pa.Schema) -> list[Any]:
    return frame(SCHEMA, schema.serialize())


def unpack_schema(data: Any) -> pa.Schema:
    return _checked("schema", lambda: pa.ipc.read_schema(pa.py_buffer(data)))


def pack_records(batch: pa.RecordBatch) -> list[Any]:
    return frame(RECORDS, batch.serialize())


def unpack_records(data: Any, schema: pa.Schema | None) -> pa.RecordBatch:
    if schema is None:
        raise EngineError("records came before their schema.")

    def read() -> pa.RecordBatch:
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
        batch.validate(full=True)
        return batch

    return _checked("records", read)


def _checked(what: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (pa.ArrowException, msgspec.DecodeError, EOFError, OSError, ValueError) as error:
        raise EngineError(f"a frame of {what} is damaged: {error}") from None


# ---- Moves, for marks and for what the coordinator tells


def move_to_plain(move: Move) -> list[Any]:
    return [
        move.version,
        [[groups_to_plain(groups), old, new] for groups, old, new in move.changes],
    ]


def groups_to_plain(groups: Iterable[int]) -> list[list[int]]:
    return [[part.start, part.stop] for part in group_ranges(groups)]


def groups_from_plain(plain: Any) -> frozenset[int]:
    parts = [range(first, stop) for first, stop in plain]
    if any(part.start < 0 or part.stop > GROUPS_MAX for part in parts):
        raise ValueError("key-groups out of range")
    return frozenset(group for part in group_ranges(parts) for group in part)


def move_from_plain(plain: Any) -> Move:
    """EngineError for anything that is no move."""
    try:
        version, changes = plain
        if type(version) is not int or version <= 0:
            raise ValueError("no version")
        made = []
        for groups, old, new in changes:
            if type(old) is not str or type(new) is not str:
                raise ValueError("no names")
            made.append(Change(groups_from_plain(groups), old, new))
    except (TypeError, ValueError, StateKitError) as error:
        raise EngineError(f"{shorten(plain)} is no move: {error}") from None
    return Move(version, tuple(made))
