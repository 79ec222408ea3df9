"""The store: an array of leaves, each with one table per state, in native memory."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, compress, count, repeat
from typing import Any, Literal, NamedTuple, TypeAlias, cast, overload

from msgpack import unpackb

from statekit._native import ffi, lib
from statekit.errors import (
    ArgumentError,
    ClosedError,
    InProcess,
    SchemaError,
    StateKitError,
    UnknownEntryError,
    closed_error,
    native_error,
    shorten,
)
from statekit.keys import KeyType, key_codec
from statekit.kinds import KIND_NAMES, KINDS, ContainerKind, EncodedKind, Kind
from statekit.native.block import Block, fit_blocks
from statekit.native.buffers import (
    BufferSlice,
    empty_buffer,
    native_text,
    push_buffer,
    readable,
    span,
)
from statekit.native.columns import column
from statekit.native.containers import ContainerState
from statekit.native.kinds import (
    GATES,
    NO_TIME,
    RESIDENCIES,
    Clock,
    Gate,
    Residency,
    clock_number,
)
from statekit.native.numbers import F64State, I64State
from statekit.native.snapshot import Snapshot
from statekit.native.states import BytesState, State
from statekit.native.timers import TimersState

DecodeMode: TypeAlias = Literal["replace", "under", "under_all", "over"]

_MODES: dict[str, int] = {
    mode: getattr(lib, f"SK_{mode.upper()}") for mode in ("replace", "under", "under_all", "over")
}
_HANDLES: dict[str, type[State]] = {  # of kinds that can do more than bytes
    "i64": I64State,
    "f64": F64State,
    "list": ContainerState,
    "map": ContainerState,
    "nested": ContainerState,
    "timers": TimersState,
}
_IS_TOUCHED = bytes(mark == 1 for mark in range(256))  # for bytes.translate(); see spread()
_EPOCH_MAX = 2**32 - 1


class Stats(NamedTuple):
    """Figures of some leaves and states."""

    entries: int  # live entries that are here
    tombstones: int  # deletions still remembered
    dirty: int  # entries and tombstones not yet written home
    bytes: int  # native memory
    whole: int  # leaves
    partial: int
    absent: int
    away: int  # leaves that are not this store's, and shut ones (their entries and bytes do count)
    flooded: int  # tables that went over to the secret hash
    operations: int  # calls about one key and records of batches so far; 0 if not of all leaves


class Leaves:
    """Leaves taken out of a store, to be attached to a store with the same number of leaves."""

    __slots__ = ("_held", "start", "stop")

    def __init__(self, cell: Any, start: int, stop: int) -> None:
        self._held = [cell]
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        attached = "" if self._held else ", attached"
        return f"<Leaves {self.start} to {self.stop}{attached}>"


class Store(InProcess):
    """Keyed state in native memory. Every method may be called from any thread.

    key_groups, subgroups: powers of two. bytes_max: a limit on native memory, 0 for none.

    >>> store = Store(key_groups=4, subgroups=4)
    >>> visits = store.state("visits", "i64")
    >>> visits.add("alice", 2)
    2
    >>> half = store.detach(0, store.leaves // 2)  # split, without touching entries
    >>> other = Store(key_groups=4, subgroups=4)
    >>> other.attach(half)
    >>> sorted(s.stats().entries for s in (store, other))
    [0, 1]
    """

    __slots__ = (
        "__weakref__",
        "_handles",
        "_native",
        "_numbering",
        "key_groups",
        "leaves",
        "subgroups",
    )
    _instead = "Make one in the other process; encode_leaf() and decode() carry leaves over."

    def __init__(self, key_groups: int = 128, subgroups: int = 16, bytes_max: int = 0) -> None:
        out = ffi.new("sk_store **")
        try:
            status = lib.sk_open(key_groups, subgroups, bytes_max, out)
        except (TypeError, OverflowError):
            raise ArgumentError(
                f"no store has {shorten(key_groups)} key-groups of {shorten(subgroups)} "
                f"sub-groups and {shorten(bytes_max)} bytes. Use powers of two and a size."
            ) from None
        if status:
            raise native_error(status)
        # Native memory is freed when the store and all handles made from it are gone.
        self._native = ffi.gc(out[0], lib.sk_close)
        self._handles: dict[str, State] = {}
        self._numbering: _Numbering | None = None
        self.key_groups = key_groups
        self.subgroups = subgroups
        self.leaves = key_groups * subgroups

    def __repr__(self) -> str:
        if self._native is None:
            return "<Store, closed>"
        return (
            f"<Store of {self.key_groups} key-groups x {self.subgroups} sub-groups, "
            f"{len(self.states())} states, {self.bytes_used} bytes>"
        )

    @property
    def _ptr(self) -> Any:
        if self._native is None:
            raise closed_error()
        return self._native

    def close(self) -> None:
        """Lets go of all entries; from now on the store and its handles raise ClosedError.

        Safe while other threads are inside a call, and open snapshots can still be read: native
        memory is freed with the last of these.
        """
        self._native = None
        for handle in tuple(self._handles.values()):
            handle._ptr = None

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- States

    @overload
    def state(
        self, name: str, kind: Literal["i64"], key_type: KeyType = ..., *, timed: bool = ...
    ) -> I64State: ...
    @overload
    def state(
        self, name: str, kind: Literal["f64"], key_type: KeyType = ..., *, timed: bool = ...
    ) -> F64State: ...
    @overload
    def state(
        self, name: str, kind: EncodedKind, key_type: KeyType = ..., *, timed: bool = ...
    ) -> BytesState: ...
    @overload
    def state(
        self, name: str, kind: ContainerKind, key_type: KeyType = ..., *, timed: bool = ...
    ) -> ContainerState: ...
    @overload
    def state(self, name: str, kind: Literal["timers"], key_type: KeyType = ...) -> TimersState: ...
    def state(
        self, name: str, kind: Kind, key_type: KeyType = str, *, timed: bool = False
    ) -> State:
        """Declares a state, or finds it. SchemaError if it is there with another type.

        timed: entries carry the time of their last change, and can expire; see State.ttl().
        """
        codec = key_codec(key_type)
        row = KINDS.get(kind)
        if row is None:
            raise ArgumentError(f"{shorten(kind)} is no kind. Use one of {', '.join(KINDS)}.")
        native_name = _native_name(name)
        state_id = ffi.new("uint32_t *")
        flags = lib.SK_TIMED if timed else 0
        status = lib.sk_state_add(self._ptr, native_name, row.number, codec.native, flags, state_id)
        if status == lib.SK_SCHEMA:
            raise self._other_schema(name, kind, codec.python, timed)
        if status:
            raise native_error(status, name)
        handle = self._handles.get(name)
        if handle is None:
            handle_type = _HANDLES.get(kind, BytesState)
            made = handle_type(self._ptr, state_id[0], name, kind, codec, bool(timed))
            handle = self._handles.setdefault(name, made)
            if self._native is None:  # closed meanwhile; close() may not have seen this handle
                handle._ptr = None
        return handle

    def _other_schema(self, name: str, kind: str, keys: str, timed: bool) -> SchemaError:
        there = next(state for state in self.states() if state.name == name)
        error = SchemaError(
            f"state {name!r} is here with kind {there.kind}{_timed(there.timed)} and "
            f"{there.codec.python} keys; asked for was kind {kind}{_timed(timed)} with {keys} "
            "keys. Ask for what is here, or use another name."
        )
        error.status, error.state = lib.SK_SCHEMA, name
        return error

    def states(self) -> tuple[State, ...]:
        """All states, those that came with blocks or leaves included, in order of declaration."""
        ptr = self._ptr
        name, key_type = ffi.new("const char **"), ffi.new("const char **")
        kind, flags = ffi.new("int *"), ffi.new("int *")
        found = []
        for state_id in range(lib.sk_state_count(ptr)):
            status = lib.sk_state_info(ptr, state_id, name, kind, key_type, flags)
            if status:
                raise native_error(status)
            handle = self._handles.get(text := native_text(name[0]))
            if handle is None:
                code = native_text(key_type[0])
                timed = bool(flags[0] & lib.SK_TIMED)
                handle = self.state(text, KIND_NAMES[kind[0]], code, timed=timed)  # type: ignore[call-overload]
            found.append(handle)
        return tuple(found)

    def retype(self, name: str, kind: Kind | None = None, timed: bool | None = None) -> State:
        """Changes the type of a state that nobody uses yet: i64 to f64, timed or not.

        None: as it is. Its entries are converted; handles made before must not be used any more.
        Entries that become timed have no stamp yet. SchemaError if the types do not fit.
        """
        there = next((state for state in self.states() if state.name == name), None)
        row = KINDS.get(there.kind if there and kind is None else kind or "")
        if there is None or row is None:
            raise ArgumentError(
                f"no state {shorten(name)} here can become {shorten(kind)}. "
                f"States are {', '.join(state.name for state in self.states()) or 'none'}; "
                f"kinds are {', '.join(KINDS)}."
            )
        timed = there.timed if timed is None else timed
        flags = lib.SK_TIMED if timed else 0
        status = lib.sk_state_retype(self._ptr, _native_name(name), row.number, flags)
        if status:
            raise native_error(status, name)
        self._handles.pop(name, None)
        return self.state(name, KIND_NAMES[row.number], there.codec.text, timed=timed)  # type: ignore[call-overload, no-any-return]

    # ---- Figures

    @property
    def bytes_used(self) -> int:
        """Native memory in use: slots, keys, values, containers."""
        return int(lib.sk_bytes_used(self._ptr))

    def limit(self, bytes_max: int) -> None:
        """Sets the limit on native memory; 0 for none. If more is in use already, it stays."""
        self._expect(lib.sk_bytes_limit(self._ptr, bytes_max))

    def stats(self, state: State | None = None, start: int = 0, stop: int | None = None) -> Stats:
        """Sums over leaves [start, stop) and one state or all."""
        out = ffi.new("sk_stats *")
        stop = self.leaves if stop is None else stop
        self._expect(lib.sk_stats_read(self._ptr, _id(state), *_leaves(start, stop), out))
        whole, partial, absent, away = out.leaves
        return Stats(
            out.entries,
            out.tombstones,
            out.dirty,
            out.bytes,
            whole,
            partial,
            absent,
            away,
            out.flooded,
            out.operations,
        )

    # ---- Time

    def time(self, clock: Clock = "processing") -> int | None:
        """The time in ms. Event time is None until there is a watermark."""
        now = int(lib.sk_time(self._ptr, clock_number(clock)))
        return None if now == NO_TIME else now

    def set_time(self, clock: Clock, ms: int | None) -> None:
        """Sets the watermark ("event"; an older one is ignored), or stops the clock for tests.

        "processing" with None goes back to the system's clock.
        """
        try:
            now = NO_TIME if ms is None else ms
            status = lib.sk_time_set(self._ptr, clock_number(clock), now)
        except (TypeError, OverflowError):
            raise ArgumentError(f"{shorten(ms)} is no time. Give milliseconds.") from None
        self._expect(status)

    def sweep(self, slots_max: int) -> int:
        """Removes expired entries among about slots_max slots, from where the last sweep stopped.
        Returns how many it removed. No call returns expired entries anyway; this frees their
        memory.
        """
        removed: int = lib.sk_sweep(self._ptr, slots_max)
        if removed < 0:
            raise native_error(-removed)
        return removed

    # ---- Leaves

    def residency(self, leaf: int) -> Residency:
        """Whether all entries of a leaf are here ("whole"), some ("partial") or none ("absent").

        "away": the leaf is not this store's, and every call about a key of it is refused.
        """
        (leaf,) = _leaves(leaf)
        answer: int = lib.sk_leaf_residency(self._ptr, leaf)
        if answer < 0:
            raise native_error(-answer)
        return RESIDENCIES[answer]

    def by_leaf(self, state: State, keys: Sequence[bytes]) -> dict[int, list[bytes]]:
        """Encoded keys of a state, by leaf."""
        ptr, number = self._ptr, state._id
        found: dict[int, list[bytes]] = {}
        for key in keys:
            leaf = lib.sk_key_leaf(ptr, number, key, len(key))
            if leaf < 0:
                raise native_error(-leaf, state.name, state.codec.show(key))
            found.setdefault(leaf, []).append(key)
        return found

    def residencies(self, leaves: Any) -> bytes:
        """residency() of many leaves, one byte each, by number (kinds.py).

        leaves: an array of 32-bit ints. It does not wait for a thread that is filling a leaf in.
        """
        out = bytearray(len(leaves))
        native = ffi.from_buffer("uint32_t[]", leaves)
        self._expect(
            lib.sk_leaf_residencies(
                self._ptr, native, len(leaves), ffi.from_buffer("uint8_t[]", out)
            )
        )
        return bytes(out)

    def mark(self, start: int, stop: int, residency: Residency) -> None:
        """Sets the residency of leaves [start, stop); "absent" and "away" drop their entries.

        Their gates are open then. A leaf that is shut cannot be made "whole" or "partial" this way.
        """
        if residency not in RESIDENCIES:
            raise ArgumentError(f"{shorten(residency)} is no residency. Use one of {RESIDENCIES}.")
        number = RESIDENCIES.index(residency)
        self._expect(lib.sk_leaf_mark(self._ptr, *_leaves(start, stop), number))

    def gate(self, leaf: int) -> Gate:
        """Whether operations on a leaf's keys are let in; see set_gate()."""
        (leaf,) = _leaves(leaf)
        answer: int = lib.sk_leaf_gate_of(self._ptr, leaf)
        if answer < 0:
            raise native_error(-answer)
        return GATES[answer]

    def set_gate(self, start: int, stop: int, gate: Gate) -> None:
        """Lets operations on leaves [start, stop) in, or not, while they are handed over.

        "shut": they stay as they are, to be read out with encode_leaf() and pick(); for all other
        calls they are away. "expected": they are absent and on their way, and every call about a
        key, even a blind write, raises UnknownEntryError until decode_leaf(), spread() or install()
        brings something. "open": as they were before. It acts on all of them or, if it raises, on
        none.
        """
        if gate not in GATES:
            raise ArgumentError(f"{shorten(gate)} is no gate. Use one of {GATES}.")
        self._expect(lib.sk_leaf_gate(self._ptr, *_leaves(start, stop), GATES.index(gate)))

    def heat(self) -> "array[int]":
        """About how many operations each leaf has seen: calls about one key, records of batches."""
        heat = array("Q", bytes(8 * self.leaves))
        self._expect(lib.sk_leaf_heat(self._ptr, ffi.from_buffer("uint64_t[]", heat)))
        return heat

    def leaf_sizes(self) -> "array[int]":
        """How many bytes the entries of each leaf take, also of leaves that are shut."""
        sizes = array("Q", bytes(8 * self.leaves))
        out = ffi.from_buffer("uint64_t[]", sizes)
        self._expect(lib.sk_leaf_sizes(self._ptr, _id(None), ffi.NULL, out))
        return sizes

    def leaf_entries(self, state: State) -> "array[int]":
        """How many entries of a state each leaf has, also of leaves that are shut."""
        entries = array("Q", bytes(8 * self.leaves))
        out = ffi.from_buffer("uint64_t[]", entries)
        self._expect(lib.sk_leaf_sizes(self._ptr, _id(state), out, ffi.NULL))
        return entries

    def clear(
        self, state: State, start: int = 0, stop: int | None = None, *, blind: bool = False
    ) -> None:
        """Drops all entries of a state in leaves [start, stop).

        blind: where a leaf is not whole, drop what is here and do not ask for the rest.
        """
        stop = self.leaves if stop is None else stop
        flags = lib.SK_BLIND if blind else 0
        status = lib.sk_clear(self._ptr, state._id, *_leaves(start, stop), flags)
        if status == lib.SK_UNKNOWN:
            raise _not_whole(state, f"some of leaves {start} to {stop} are not whole")
        self._expect(status)

    def encode_leaf(self, leaf: int, state: State | None = None, since: int = 0) -> bytes:
        """One block per state that has entries. since: only what changed after that epoch."""
        (leaf,) = _leaves(leaf)
        buffer = empty_buffer()
        length = lib.sk_leaf_encode(self._ptr, leaf, _id(state), since, buffer.ptr)
        return self._taken(length, buffer)

    def encode_bound(
        self, leaf: int, state: State | None, since: int, pack_id: bytes, offset: int
    ) -> bytes:
        """encode_leaf() with checksums that are bound as by frames.bind(): for sending it."""
        (leaf,) = _leaves(leaf)
        buffer = empty_buffer()
        length = lib.sk_leaf_encode(self._ptr, leaf, _id(state), since, buffer.ptr)
        if length > 0:
            data = buffer.ptr.data
            status = lib.sk_frames_seal(data, length) or lib.sk_frames_bind(
                data, length, pack_id, offset
            )
            assert status == 0, f"frames that were just made cannot be sealed: {status}"
        return self._taken(length, buffer)

    def pick(self, leaf: int, state: State, keys: Sequence[bytes]) -> bytes:
        """A delta block with the entries of some encoded keys of a leaf, which must be whole.

        A key without an entry is in the block as a deletion: where the block is decoded "under",
        the key is then known to be missing. Without keys there is no block.
        """
        (leaf,) = _leaves(leaf)
        col = column(keys, "b", f"the keys of state {state.name!r}")
        native = ffi.new("sk_column *")
        col.fill(native)
        buffer = empty_buffer()
        length = lib.sk_leaf_pick(self._ptr, leaf, state._id, native, col.n, buffer.ptr)
        if length == -lib.SK_UNKNOWN:
            push_buffer(buffer)
            raise _not_whole(state, f"leaf {leaf} is not whole")
        return self._taken(length, buffer)

    def pick_many(
        self, state: State, keys: Sequence[bytes], marks: bytearray | None = None
    ) -> bytes:
        """pick() for keys of any leaves: one block, for spread() elsewhere.

        marks: a byte for each leaf, 0 to leave its keys out. Keys of leaves that are away or not
        whole are left out, too. Without entries there is no block. The leaves are locked together,
        so ask for thousands of keys at once, not for millions.
        """
        assert marks is None or len(marks) == self.leaves
        only = ffi.NULL if marks is None else ffi.from_buffer("uint8_t[]", marks)
        col = column(keys, "b", f"the keys of state {state.name!r}")
        native = ffi.new("sk_column *")
        col.fill(native)
        buffer = empty_buffer()
        length = lib.sk_pick(self._ptr, state._id, native, col.n, only, buffer.ptr)
        return self._taken(length, buffer)

    def spread(
        self, blocks: bytes | bytearray | memoryview, leaves: Iterable[int] | None = None
    ) -> tuple[list[int], StateKitError | None]:
        """Fills the entries of blocks from pick_many() in "under" what is here, each in its leaf.

        leaves: only these; all if None. Leaves that are whole, away or shut are passed over.
        Returns the other leaves that the blocks have entries of, ascending, and the error that
        stopped it if memory was short: then the returned leaves have taken their entries in. All
        blocks are checked first: if one is bad, that is raised and nothing has changed.
        """
        touched = bytearray(self.leaves)
        if leaves is not None:
            touched = bytearray(b"\2") * self.leaves
            for leaf in leaves:
                touched[leaf] = 0
        native = readable(blocks)
        out = ffi.from_buffer("uint8_t[]", touched)
        entries = lib.sk_spread(self._ptr, native, len(native), out)
        error = native_error(-entries) if entries < 0 else None
        if entries in (-lib.SK_CORRUPT, -lib.SK_SCHEMA):
            assert error is not None
            raise error
        return [*compress(count(), touched.translate(_IS_TOUCHED))], error

    def decode_leaf(
        self, leaf: int, blocks: bytes | BufferSlice, mode: DecodeMode = "replace"
    ) -> None:
        """Reads blocks of a leaf into it.

        "replace": the leaf gets exactly their entries, and is whole. "under": they come from the
        home and fill in only what is not here. "under_all": the same, and they are all that the
        home has. "over": they are a later delta. States not yet declared are declared from the
        blocks.
        """
        if mode not in _MODES:
            raise ArgumentError(f"{shorten(mode)} is no mode. Use one of {', '.join(_MODES)}.")
        (leaf,) = _leaves(leaf)
        native, length = (blocks, len(blocks)) if blocks.__class__ is bytes else span(blocks)
        self._expect(lib.sk_leaf_decode(self._ptr, leaf, native, length, _MODES[mode]))

    def decode_fitting(self, leaf: int, blocks: bytes | BufferSlice, mode: DecodeMode) -> None:
        """decode_leaf() of blocks whose states may have had other types when they were made."""
        try:
            self.decode_leaf(leaf, blocks, mode)
        except SchemaError:
            # The types differ, which is rare. C has taken nothing in. Looking at the types first
            # is not worth it: that would take a fifth of the time of a restore.
            self.decode_leaf(leaf, fit_blocks(bytes(blocks), self.types()), mode)
            # What is here now differs from the checkpoint: entries have got stamps, for example,
            # and must not get new ones with every restore. So the next checkpoint writes the leaf
            # anew.
            self.forget(leaf)

    def decode_chain(self, leaf: int, steps: Sequence[bytes | BufferSlice]) -> None:
        """Fills a chain in under what a leaf has, newest step first. The leaf is whole then."""
        for blocks in steps[:-1]:
            self.decode_fitting(leaf, blocks, "under")
        self.decode_fitting(leaf, steps[-1] if steps else b"", "under_all")

    def decode_run(self, data: bytes, pack_id: bytes, offset: int, places: "array[int]") -> int:
        """decode_chain() of leaves of one step each, verified, in one native call.

        data: bytes of a pack, which begin at `offset` there. places: for each leaf its number,
        where its frames begin in data, and their size. How many of them were taken in: the next
        one was not, and decode_chain() will tell why. No block may be compressed.
        """
        done = ffi.new("uint64_t *")
        native = ffi.from_buffer("uint64_t[]", places)
        count = len(places) // 3
        lib.sk_frames_load(self._ptr, data, len(data), pack_id, offset, native, count, done)
        return int(done[0])

    def types(self) -> dict[str, tuple[str, bool]]:
        """Kind of each state, and whether it is timed."""
        return {raw.name: (raw.kind, raw.timed) for raw in self.states()}

    def detach(self, start: int, stop: int) -> Leaves:
        """Takes leaves [start, stop) out, with their entries; in this store they are away then.

        NotOwnedError if one of them is away already.
        """
        # The cell owns what C puts into it, so that nothing leaks if a signal interrupts us.
        cell = ffi.gc(ffi.new("sk_leaves **"), _free_leaves)
        self._expect(lib.sk_detach(self._ptr, *_leaves(start, stop), cell))
        return Leaves(cell, start, stop)

    def attach(self, leaves: Leaves) -> None:
        """Puts detached leaves in. OccupiedError if one of these leaves has entries here."""
        ptr = self._ptr
        try:
            cell = leaves._held.pop()  # atomic: only one of two threads gets it
        except IndexError:
            raise ClosedError(f"{leaves!r} were attached before. Detach them again.") from None
        native, cell[0] = cell[0], ffi.NULL  # from here on C owns them
        status = lib.sk_attach(ptr, native)
        if status:
            error = native_error(status)
            cell[0] = native
            leaves._held.append(cell)
            raise error

    def move(self, target: "Store", start: int, stop: int) -> None:
        """Moves leaves [start, stop) to another store: detach() and attach() in one step.

        If it fails they are here as before. (If there is no memory even for putting them back,
        the exception has them as `leaves`.)
        """
        cell = ffi.gc(ffi.new("sk_leaves **"), _free_leaves)
        status = lib.sk_move(self._ptr, target._ptr, *_leaves(start, stop), cell)
        if status:
            error = native_error(status)
            if cell[0] != ffi.NULL:
                error.leaves = Leaves(cell, start, stop)  # type: ignore[attr-defined]
            raise error

    # ---- Homes

    def write_back(self, on: bool = True) -> None:
        """Whether changes are written home. Until a deletion is written, it is remembered, even in
        whole leaves.

        To be called while no other thread uses the store.
        """
        self._expect(lib.sk_write_back(self._ptr, on))

    def rows_take(
        self,
        leaf: int,
        numbers: Mapping[str, int],
        rows_max: int,
        bytes_max: int,
        cold: bool = False,
    ) -> tuple[list[bytes | None], int, dict[str, int], int]:
        """Changes that were not written home yet, as rows, from a leaf on; rows_done() must follow.

        Returns the rows as a list [name, row, name, row, ...], with None for the row of a deletion
        (csrc/writeback.c says what both are); the leaf to go on from, or `leaves` if these are all
        changes; how many rows each state has; and how many bytes the rows take. Leaves are taken as
        a whole, until there are rows_max rows or about bytes_max bytes. Clean leaves are not looked
        at.

        numbers: the numbers of the states at home. cold: only entries that were not used since
        evict() last passed them, and deletions.

        There may be one caller at a time, until its rows_done(). If a caller is interrupted before
        rows_done(), the changes are dirty for the next caller, as if nothing had happened.
        """
        flags = lib.SK_COLD if cold else 0
        return self._rows(leaf, numbers, rows_max, bytes_max, flags)

    def rows_moment(
        self, numbers: Mapping[str, int], bytes_max: int
    ) -> tuple[list[bytes | None], dict[str, int]] | None:
        """All changes that were not written home yet, at one moment; otherwise like rows_take().

        None if they take more than bytes_max: then nothing is taken.
        """
        rows, leaf, counts, _ = self._rows(0, numbers, 0, bytes_max, lib.SK_MOMENT)
        return (rows, counts) if leaf else None

    def _rows(
        self, leaf: int, numbers: Mapping[str, int], rows_max: int, bytes_max: int, flags: int
    ) -> tuple[list[bytes | None], int, dict[str, int], int]:
        ptr = self._ptr
        form = self._numbering
        count = lib.sk_state_count(ptr)
        if form is None or form.count != count or form.numbers != numbers:
            form = self._numbering = _Numbering([state.name for state in self.states()], numbers)
        (form.leaf[0],) = _leaves(leaf)
        buffer = empty_buffer()
        rows = lib.sk_rows_take(
            ptr,
            form.leaf,
            flags,
            rows_max,
            bytes_max,
            form.native,
            form.counts,
            form.count,
            buffer.ptr,
        )
        if rows < 0:
            push_buffer(buffer)
            raise native_error(-rows)
        counts = ffi.unpack(form.counts, form.count) if rows else ()
        taken = {name: n for name, n in zip(form.names, counts, strict=False) if n}
        size = buffer.length
        data = buffer.take(size)
        return unpackb(data) if rows else [], form.leaf[0], taken, size

    def rows_done(self, start: int, stop: int, written: bool) -> None:
        """Ends rows_take() in leaves [start, stop): rows are written, or (False) dirty again."""
        self._expect(lib.sk_rows_done(self._ptr, *_leaves(start, stop), written))

    def home_keys(self, state: State, leaf: int, keys: Sequence[bytes]) -> None:
        """Tells the store all keys that the home has of a leaf and a state: all others are missing.

        No row may be taken between reading the home and this call. The store remembers the keys
        until the leaf is marked, moved or decoded, or until many times as many rows were taken.
        """
        offsets = ffi.new("int64_t[]", [0, *accumulate(map(len, keys))])
        data = b"".join(keys)
        (leaf,) = _leaves(leaf)
        self._expect(
            lib.sk_home_keys(self._ptr, state._id, leaf, ffi.from_buffer(data), offsets, len(keys))
        )

    def dirty_take(self, leaf: int, *, cold: bool = False) -> bytes:
        """The leaf's changes not yet written home, as delta blocks; dirty_done() must follow.

        cold: only entries that were not used since evict() last passed them, and deletions.
        """
        (leaf,) = _leaves(leaf)
        buffer = empty_buffer()
        flags = lib.SK_COLD if cold else 0
        return self._taken(lib.sk_dirty_take(self._ptr, leaf, flags, buffer.ptr), buffer)

    def dirty_done(self, leaf: int, written: bool) -> None:
        """Ends what dirty_take() began: the changes are home, or (False) dirty again."""
        (leaf,) = _leaves(leaf)
        self._expect(lib.sk_dirty_done(self._ptr, leaf, written))

    def evict(self, bytes_wanted: int) -> int:
        """Drops clean entries that were not used lately. Returns the bytes that became free."""
        freed: int = lib.sk_evict(self._ptr, bytes_wanted)
        if freed < 0:
            raise native_error(-freed)
        return freed

    # ---- Snapshots and scans

    @property
    def epoch(self) -> int:
        """The number of the present epoch; changes are marked with it."""
        return int(lib.sk_epoch(self._ptr))

    def advance_epoch(self) -> int:
        """Starts a new epoch, as a snapshot does. Returns the one that ended."""
        return int(lib.sk_epoch_advance(self._ptr))

    def snapshot(self, since: int | Sequence[int] | None = None, bytes_max: int = 0) -> Snapshot:
        """The store as it is now; see Snapshot.

        since: only what changed after that epoch; or one epoch for each leaf (0: all of the leaf).
        bytes_max: how much writers may keep for the reader before they wait; 0 for the default.
        """
        epochs = None
        if isinstance(since, int):
            since = [since] * self.leaves
        if since is not None:
            is_ready = isinstance(since, array) and since.typecode == "I"
            epochs = cast("array[int]", since) if is_ready else array("I", since)
            if len(epochs) != self.leaves:
                raise ArgumentError(
                    f"there are {len(epochs)} epochs for {self.leaves} leaves. Pass one for each."
                )
        return Snapshot(self._ptr, epochs, bytes_max)

    def track(self, epoch: int) -> None:
        """From now on remember deletions, so that deltas since that epoch can be made."""
        self._expect(lib.sk_track(self._ptr, epoch))

    def untrack(self) -> None:
        """Nobody needs deltas: deletions are not remembered for them any more."""
        self._expect(lib.sk_track(self._ptr, _EPOCH_MAX))

    def forget(self, leaf: int) -> None:
        """The leaf counts as changed in a way that no delta can tell: a full block comes next."""
        (leaf,) = _leaves(leaf)
        self._expect(lib.sk_leaf_forget(self._ptr, leaf))

    def changed_leaves(self, since: int) -> bytes:
        """One byte per leaf: 1 if it changed after that epoch."""
        changed = bytearray(self.leaves)
        out = ffi.from_buffer("uint8_t[]", changed)
        self._expect(lib.sk_changed_leaves(self._ptr, since, out))
        return bytes(changed)

    def scan(
        self, state: State, start: int = 0, stop: int | None = None, *, partial: bool = False
    ) -> "Scan":
        """Iterates over (encoded key, value) of a state, leaf by leaf; see Scan."""
        return Scan(self, state, start, self.leaves if stop is None else stop, partial)

    # ---- Answers from C

    def _expect(self, status: int) -> None:
        if status:
            raise native_error(status)

    def _taken(self, length: int, buffer: Any) -> bytes:
        if length < 0:
            push_buffer(buffer)
            raise native_error(-length)
        data: bytes = buffer.take(length)
        return data


class Scan:
    """Entries of one state, leaf by leaf, each leaf as it is when it is reached.

    `cursor` is the first leaf that is not done: pass it as `start` to go on, in this process
    or another. A leaf that was interrupted comes again, whole.
    """

    __slots__ = ("_entries", "_partial", "_state", "_stop", "_store", "cursor")

    def __init__(self, store: Store, state: State, start: int, stop: int, partial: bool) -> None:
        self._store = store
        self._state = state
        self._stop = stop
        self._partial = partial
        self._entries: Iterator[tuple[bytes, Any]] | None = None
        self.cursor = start

    def __iter__(self) -> Iterator[tuple[bytes, Any]]:
        return self

    def __next__(self) -> tuple[bytes, Any]:
        while True:
            if self._entries is None:
                if self.cursor >= self._stop:
                    raise StopIteration
                self._entries = self._read(self.cursor)
            entry = next(self._entries, None)
            if entry is not None:
                return entry
            self._entries = None
            self.cursor += 1

    def _read(self, leaf: int) -> Iterator[tuple[bytes, Any]]:
        store = self._store
        was_whole = store.residency(leaf) == "whole"
        data = store.encode_leaf(leaf, self._state)
        # The residency is asked twice, because an eviction may have come in between.
        if not self._partial and not (was_whole and store.residency(leaf) == "whole"):
            raise _not_whole(self._state, f"leaf {leaf} is not whole")
        blocks = tuple(Block.each(data))
        if not self._partial and any(block.is_delta for block in blocks):
            raise _not_whole(self._state, f"leaf {leaf}")
        # Deletions are left out: a leaf that is not whole remembers them.
        return (
            entry
            for block in blocks
            for entry, mark in zip(block, block.marks or repeat(0), strict=False)
            if not mark
        )


class _Numbering:
    """Numbers of states at home, as C takes them, and places for the results of rows_take()."""

    __slots__ = ("count", "counts", "leaf", "names", "native", "numbers")

    def __init__(self, names: Sequence[str], numbers: Mapping[str, int]) -> None:
        self.numbers = dict(numbers)
        self.names = names
        self.count = len(names)
        try:
            self.native = ffi.new("int32_t[]", [numbers.get(name, -1) for name in names])
        except (TypeError, OverflowError):
            raise ArgumentError(
                f"{shorten(numbers)} cannot be the numbers of states at home. Count from 0."
            ) from None
        self.counts = ffi.new("uint64_t[]", len(names))
        self.leaf = ffi.new("uint32_t *")


def _timed(timed: bool) -> str:
    return ", timed," if timed else ""


def _free_leaves(cell: Any) -> None:
    lib.sk_leaves_free(cell[0])


def _not_whole(state: State, what: str) -> UnknownEntryError:
    return UnknownEntryError(
        f"not all entries of state {state.name!r} are here: {what}. "
        "Load the rest from its home first, or ask for what is here only.",
        state=state.name,
        keys=tuple,
    )


def _id(state: State | None) -> int:
    return int(lib.SK_ALL_STATES) if state is None else state._id


def _leaves(*numbers: int) -> tuple[int, ...]:
    """Leaf numbers that C can be asked about; it checks whether they exist."""
    for number in numbers:
        if not isinstance(number, int) or not 0 <= number <= _EPOCH_MAX:
            raise ArgumentError(f"{shorten(number)} is no leaf. Leaves are counted from 0.")
    return numbers


def _native_name(name: str) -> bytes:
    try:
        native = name.encode(errors="surrogateescape")
    except (AttributeError, UnicodeEncodeError):
        native = b""
    if not native or b"\0" in native or len(native) > lib.SK_NAME_BYTES_MAX:
        raise ArgumentError(
            f"{shorten(name)} cannot name a state. "
            f"Use 1 to {lib.SK_NAME_BYTES_MAX} bytes of UTF-8 without a zero byte."
        )
    return native
