"""Every exception statekit raises, and the one table from native status codes to them.

All derive from StateKitError. Most also derive from the built-in exception that a Python
programmer would catch for the same mistake (TypeError, OverflowError, MemoryError, ...).
Messages say what went wrong, in which state and at which key, and what to do about it.
"""

import reprlib
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, SupportsIndex

from statekit._native import ffi, lib

__all__ = [
    "ArgumentError",
    "BadValueError",
    "ChangedDuringIterationError",
    "CheckpointCancelledError",
    "CheckpointError",
    "ClosedError",
    "ColumnError",
    "CommitError",
    "CorruptBlockError",
    "DamagedError",
    "EngineError",
    "FencedError",
    "HomeError",
    "HomeLockedError",
    "KeyTypeError",
    "KindError",
    "LeaseError",
    "MemoryLimitError",
    "MigrationError",
    "MissingFileError",
    "MissingPackageError",
    "NoCheckpointError",
    "NotOwnedError",
    "OccupiedError",
    "OverflowStateError",
    "PathError",
    "PeerError",
    "PeerLostError",
    "PeerRefusedError",
    "SchemaError",
    "SnapshotOverrunError",
    "StateKitError",
    "StorageError",
    "StoreMemoryError",
    "UnknownEntryError",
]

_REPR_CHARS_MAX = 60
_CONTAINERS = (list, tuple, dict, set, frozenset, bytearray)


class StateKitError(Exception):
    """The root of all statekit exceptions.

    `state` names the state concerned, `key` is the Python key and `record` the position in a
    batch; each is None where there is none. `status` is the native code, 0 if none. A batch that
    failed half-way has `statuses`, one byte per record: records with 0 took effect. If a batch has
    several records of one key, the ones that took effect are the first ones.
    """

    status: int = 0
    state: str | None = None
    key: object = None
    record: int | None = None
    statuses: bytes | None = None


class ClosedError(StateKitError, ValueError):
    """The store, snapshot or detached leaves were closed or given away."""


class StoreMemoryError(StateKitError, MemoryError):
    """The system has no more memory. The store is as it was before the call."""


class MemoryLimitError(StoreMemoryError):
    """The store's own limit (bytes_max) would be passed."""


class KeyTypeError(StateKitError, TypeError, ValueError):
    """A key that does not fit the state's key type, or is longer than a key may be."""


class BadValueError(StateKitError, TypeError, ValueError):
    """A value of the wrong type or shape, too large, too deep, or not well-formed MessagePack."""


class PathError(StateKitError, LookupError):
    """A step of a path that does not fit the container it leads into."""


class KindError(StateKitError, TypeError):
    """An operation that this kind of state, or of object, does not have."""


class ArgumentError(StateKitError, ValueError):
    """An argument out of range: a leaf, an epoch, the number of key-groups."""


class OverflowStateError(StateKitError, OverflowError):
    """A number or a sum that does not fit into 64 bits."""


class CorruptBlockError(StateKitError, ValueError):
    """Bytes that are not a block, or a block that was damaged."""


class SchemaError(StateKitError, TypeError):
    """The state exists with another kind or key type, or its type is none that can be stored."""


class OccupiedError(StateKitError):
    """Leaves cannot be attached where leaves of the same numbers have entries."""


class MissingPackageError(StateKitError, ImportError):
    """An optional package is missing, and what was asked for needs it."""


class CheckpointError(StateKitError):
    """A checkpoint that cannot be taken, read or changed as asked."""


class CommitError(StateKitError):
    """A commit or rollback of a provider that has none, or a position that is not one."""


class StorageError(CheckpointError):
    """The storage of checkpoints failed: a disk that is full, a server that does not answer."""


class MissingFileError(StorageError):
    """A file of a checkpoint is not there."""


class NoCheckpointError(CheckpointError, LookupError):
    """There is no checkpoint in that place, or none of that number."""


class CheckpointCancelledError(CheckpointError):
    """The checkpoint was cancelled before it was complete. Nothing of it remains."""


class DamagedError(CheckpointError):
    """Bytes of a checkpoint are not what was written. `file` and `offset` say where.

    `what` is what was found there, without advice; "" if there is only the message.
    """

    def __init__(
        self, message: str, *, file: str = "", offset: int | None = None, what: str = ""
    ) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset
        self.what = what


class HomeError(StateKitError, OSError):
    """The home of the state failed: a file, a server or a peer. What memory holds is safe."""


class HomeLockedError(HomeError):
    """The home is open already, here or in another process, and only one may have it open."""


class PeerError(StateKitError, ConnectionError):
    """Another process gave an answer that cannot be used, or could not do what it was asked."""


class PeerLostError(PeerError):
    """Another process does not answer. What came from it before stays usable.

    `peer` is its address, `leaf` the leaf that was wanted (None: the call was not about a leaf),
    and `seconds` for how long the call was tried.
    """

    def __init__(
        self, message: str, *, peer: str = "", leaf: int | None = None, seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.leaf = leaf
        self.seconds = seconds


class PeerRefusedError(PeerError):
    """Another process does not let this one in: certificate, token, or its limits."""


class FencedError(StateKitError):
    """A later generation has begun, from a checkpoint: this process owns nothing any more."""


class StatefulOpError(StateKitError):
    """A micro-batch of a Spark query that a StatefulOp cannot process, or must not."""


class EngineError(StateKitError):
    """A job of the engine that cannot run as asked, or records that came in an impossible order."""


class MigrationError(StateKitError):
    """A migration that cannot begin, go on or be ended as asked."""


class LeaseError(MigrationError):
    """A leaf that cannot be handed over as asked: it is not this process's to give."""


class NotOwnedError(StateKitError, LookupError):
    """The key's leaf is away or shut: not this store's, and nothing was read or changed here."""


class SnapshotOverrunError(StateKitError, RuntimeError):
    """The snapshot was given up because its reader fell too far behind the writers."""


class ChangedDuringIterationError(StateKitError, RuntimeError):
    """A container gained or lost elements while it was being read page by page."""


class ColumnError(StateKitError, TypeError, ValueError):
    """A column of keys or values of the wrong type or length, or with nulls."""


class UnknownEntryError(StateKitError):
    """The entry is not here, and neither is its whole leaf: only the leaf's home can tell.

    This is not "there is no such key": it says that the answer lies elsewhere, so it is not
    a LookupError. A single-key call has the key in `keys`. A batch call has done all other
    records: `records` are the positions that it could not do, `statuses` has one byte per
    record (0 done, 1 missing, 2 unknown) and `result` is what the call would have returned.
    """

    def __init__(
        self,
        message: str | Callable[[], str],
        *,
        state: str,
        keys: Callable[[], tuple[Any, ...]],
        records: Sequence[int] = (),
        statuses: bytes = b"",
        result: Any = None,
    ) -> None:
        super().__init__(message)
        self.state = state
        self.records = records
        self.statuses = statuses
        self.result = result
        self._keys = keys

    @property
    def keys(self) -> tuple[Any, ...]:
        """The keys concerned, one per record. Made when asked for: there may be millions."""
        return self._keys()

    def __str__(self) -> str:
        # A provider raises and catches this error with every miss, and mostly nobody reads it. So
        # the message is made when it is read.
        message = self.args[0]
        return message if isinstance(message, str) else str(message())


class _Case(NamedTuple):
    error: type[StateKitError]
    what: str
    advice: str
    is_late: bool = False  # found after the work had begun: say that nothing was changed


_CASES: dict[int, _Case] = {
    lib.SK_CHANGED: _Case(
        ChangedDuringIterationError,
        "the container changed size while it was read",
        "Read it again, or read it whole with get().",
    ),
    lib.SK_NO_MEMORY: _Case(
        StoreMemoryError,
        "out of memory",
        "Free memory, evict entries, or move leaves elsewhere.",
        is_late=True,
    ),
    lib.SK_LIMIT: _Case(
        MemoryLimitError,
        "the store's memory limit is reached",
        "Raise the limit (memory= of a provider, bytes_max of a store), or keep less in it.",
        is_late=True,
    ),
    lib.SK_BAD_KEY: _Case(
        KeyTypeError,
        "the key does not fit",
        f"Keys must be of the state's key type and at most {lib.SK_KEY_BYTES_MAX} bytes long.",
    ),
    lib.SK_BAD_VALUE: _Case(
        BadValueError,
        "the value does not fit",
        "Give one well-formed value of the shape that the state's kind asks for.",
    ),
    lib.SK_BAD_PATH: _Case(
        PathError,
        "the path does not fit the value",
        "Use an integer to step into a list and a key to step into a map.",
    ),
    lib.SK_BAD_KIND: _Case(
        KindError,
        "states of this kind have no such operation",
        "Declare the state with the kind that has it.",
    ),
    lib.SK_BAD_ARGUMENT: _Case(
        ArgumentError, "an argument is out of range", "Pass one that exists or is possible."
    ),
    lib.SK_OVERFLOW: _Case(
        OverflowStateError,
        "the result is out of range",
        "Use a float state or a smaller operand.",
        is_late=True,
    ),
    lib.SK_TOO_LARGE: _Case(
        BadValueError,
        "the value is too large",
        f"A value may have {lib.SK_VALUE_BYTES_MAX} bytes; split it over several keys.",
    ),
    lib.SK_TOO_DEEP: _Case(
        BadValueError,
        "the value is nested too deeply",
        f"Containers may be nested {lib.SK_DEPTH_MAX} deep.",
    ),
    lib.SK_CORRUPT: _Case(
        CorruptBlockError,
        "the block is damaged or is not a block of this leaf",
        "Read it again from its source, or use an older checkpoint.",
    ),
    lib.SK_SCHEMA: _Case(
        SchemaError,
        "the state exists with another kind or key type",
        "Use what it was declared with, or another name.",
    ),
    lib.SK_OCCUPIED: _Case(
        OccupiedError,
        "a leaf of that number has entries here",
        "Clear those leaves or mark them absent first.",
    ),
    lib.SK_OVERRUN: _Case(
        SnapshotOverrunError,
        "the snapshot was given up: its reader fell too far behind the writers",
        "Take another one, read it faster, or give it a larger bytes_max.",
    ),
    lib.SK_NOT_OWNED: _Case(
        NotOwnedError,
        "the key belongs to a leaf that is not this store's",
        "Route it to its owner, or attach the leaf first.",
    ),
}


def shorten(value: object) -> str:
    """repr(value), cut to a length that fits a message.

    >>> shorten("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaa'"
    """
    # A huge key is cut before repr() is called, which would build the whole text.
    if isinstance(value, str | bytes) and len(value) > 2 * _REPR_CHARS_MAX:
        value = value[:_REPR_CHARS_MAX] + value[-_REPR_CHARS_MAX:]  # type: ignore[operator]
    # Nor is the whole text of a huge list built. And if repr() fails, that must not hide the error
    # that this text is for.
    try:
        is_long = isinstance(value, _CONTAINERS) and len(value) > 2 * _REPR_CHARS_MAX
        text = reprlib.repr(value) if is_long else repr(value)
    except Exception:
        text = object.__repr__(value)
    if len(text) <= _REPR_CHARS_MAX:
        return text
    half = (_REPR_CHARS_MAX - 3) // 2
    return f"{text[: half + 1]}...{text[-half:]}"


class InProcess:
    """Base of objects that stand for something in this process: they cannot be copied or pickled.

    A copy would go on using what its original has closed or given away.
    """

    __slots__ = ()
    _instead = ""  # what to do instead

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise KindError(
            f"this {type(self).__name__} stands for something in this process, and cannot be "
            f"copied or pickled. {self._instead}"
        )


_NO_KEY = object()


def where(state: str | None, key: object = _NO_KEY, record: int | None = None) -> str:
    """The part of a message that says where: " (state 'visits', key 'alice')"."""
    parts = []
    if state is not None:
        parts.append(f"state {state!r}")
    if key is not _NO_KEY:
        parts.append(f"key {shorten(key)}")
    if record is not None:
        parts.append(f"record {record}")
    return f" ({', '.join(parts)})" if parts else ""


_UNCHANGED = "Nothing was changed. "
_HALF_DONE = "The batch stopped here; `statuses` tells which records took effect (0) before it. "


def native_error(
    status: int, state: str | None = None, key: object = _NO_KEY, record: int | None = None
) -> StateKitError:
    """The exception for a status that the library returned in this thread just now."""
    case = _CASES.get(status)
    if case is None:
        name = ffi.string(lib.sk_status_name(status)).decode()
        raise AssertionError(f"the native store answered {name} where it is no answer")
    reason = ffi.string(lib.sk_reason()).decode(errors="replace")
    detail = f": {reason}" if reason else ""
    outcome = _HALF_DONE if record is not None else _UNCHANGED if case.is_late else ""
    error = case.error(f"{case.what}{detail}{where(state, key, record)}. {outcome}{case.advice}")
    error.status, error.state, error.record = status, state, record
    error.key = None if key is _NO_KEY else key
    return error


def unknown_entry(state: str, key: Any) -> UnknownEntryError:
    """The exception for SK_UNKNOWN from a call about one key."""
    return UnknownEntryError(
        lambda: (
            f"the entry is not in this store, and its leaf is not whole{where(state, key)}. "
            "Ask the leaf's home and install() the answer, then try again."
        ),
        state=state,
        keys=lambda: (key,),
    )


def closed_error(state: str | None = None) -> ClosedError:
    """The exception for using a provider or store that was closed."""
    return ClosedError(f"the provider or store is closed{where(state)}. Open another one.")


def temporary_failed(error: OSError) -> StorageError:
    """The exception for a temporary file that cannot be made, written or read."""
    try:
        place = repr(tempfile.gettempdir())
    except OSError:  # there is no directory that can be written to
        place = "the system's directory for them"
    return StorageError(
        f"a temporary file in {place} cannot be used: {error.strerror or error}. "
        "Free some space there, or name another directory in TMPDIR."
    )


def clear_frames(error: BaseException) -> None:
    """Drops the local variables of the calls that an error, or one of its causes, passed through.

    An error that is kept must not keep alive what those calls worked on. CPython before 3.12.3 may
    even crash when it collects a cycle of frames and memoryviews (gh-77894).
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()  # causes may form a cycle
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]


def package(name: str, what: str) -> Any:
    """An optional package, imported when `what` needs it."""
    try:
        return import_module(name)
    except ImportError as error:
        how = "pip install statekit[arrow]" + (" pandas" if name == "pandas" else "")
        raise MissingPackageError(
            f"{what} needs {name}, which cannot be imported ({error}). Run: {how}"
        ) from error


def unequal_columns(keys: int, others: int, what: str, state: str) -> ColumnError:
    """The exception for a batch whose columns are not equally long."""
    return ColumnError(
        f"there are {keys} keys but {others} {what}{where(state)}. Pass one for each key."
    )


def null_item(at: int) -> ColumnError:
    """The exception for a null in a column."""
    return ColumnError(f"item {at} is null. Drop or fill the nulls first.")
