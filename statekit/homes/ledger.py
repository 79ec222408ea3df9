"""The ledger: what a home holds and what is not committed yet, read as one.

A home is always exactly one moment, that of the last commit. What must leave memory before the
next one lies beside it in *pending* rows, which count for this process only. A commit moves them
into place, together with what is still in memory; whoever opens the home after a crash drops them.

    row                            holds
    (leaf, state, key)             the value as of the last commit
    (leaf + 2^31, state, key)      pending: token (8 bytes) generation (8) 1 value
                                   or, if the row is deleted:  token  generation  0
    (2^31 - 1, 0, id)              a commit of some key-groups, as JSON: see Commit
    (2^31 - 1, 1, leaf)            this leaf has moved in from a source; see move_in()

Which pending rows count is told by their first bytes, never by whether they are there, so that
rows which could not be deleted do no harm. A pending row counts if and only if

    1. its token is this ledger's, drawn when the home was opened, and
    2. its generation is not below that since which its leaf has pending rows (`_since`), and
    3. not below that in which its leaf and state were cleared (`_cleared`), if they were.

A generation ends with each commit, rollback and clear, so what was written before never counts
after it. `_since` and `_cleared` are in memory only: a crash ends their generation, too.

A commit takes one of two ways:

    one step    if the home can write many rows at once (`is_atomic`) and they fit into a batch:
                clears, rows, the deletion of pending rows and the record of the commit
    two phases  else: everything goes to pending rows first and is made durable. Then one row, the
                record, says that they count (`rolling`): that is the commit. Then they are moved
                into place, each as often as it takes; a crash meanwhile is finished by whoever
                opens the home. What is cleared is cleared before any row moves, and the record
                says when that is done, or else a second try would clear what has been moved.

A write that fails may have happened all the same (a lost answer, an interrupt after it). Then the
record tells, before anything else is read or written (`_doubt`).

Leaves that come from elsewhere were not in the last commit, and whoever gave them deletes its own:
they are written in place at once. A record made before says that what is there of them is `void`;
if it still says so when the home is opened, that is deleted, for its giver has it. The same record
comes before rows of leaves that went elsewhere are deleted: a crash must not leave half of them.

Leaves may also come one by one, while the others are in use (residence/moving_in.py). One whose
content is still at its source is *coming*, and there are no rows of it here, neither pending nor in
place. It moves in as a whole, outside of commits, and a row is made that says so. Whoever opens the
home after a crash takes leaves without that row for coming still, and what is there of them for
the rest of a move that was not finished.
"""

import json
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any

import msgspec

from statekit.assignment import common, group_ranges, leaf_ranges
from statekit.errors import HomeError, SchemaError
from statekit.homes.home import Home, HomeSnapshot, Named, Row, row_name

PENDING = 1 << 31  # added to the number of a row's leaf
_COMMITS = PENDING - 1  # where a leaf would be, the records of commits are, ...
_MOVED_IN = 1  # ... and, as rows of this state, the leaves that have moved in
_TOKEN_BYTES, _HEAD_BYTES = 8, 17
_GENERATION_MAX = 2**64 - 1
_ROLL_ROWS_MAX, _ROLL_BYTES_MAX = 4096, 4 << 20  # that are moved into place at a time

Ranges = tuple[range, ...]
Position = tuple[Ranges, dict[str, Any]]  # key-groups, and what the user committed them with


@dataclass(frozen=True, slots=True)
class _Roll:
    """Pending rows that count, though they are not in place yet."""

    token: bytes
    since: tuple[tuple[int, int], ...]  # leaf, generation
    cleared: tuple[tuple[int, int, int], ...]  # leaf, state, generation
    is_cleared: bool = False  # the committed rows of these are gone already


@lru_cache(maxsize=64)
def _id_of(key_groups: Ranges) -> bytes:
    text = repr([(part.start, part.stop) for part in key_groups])
    return blake2b(text.encode(), digest_size=12).digest()


@dataclass(frozen=True, slots=True)
class Commit:
    """The record of a commit. For each key-group the one with the highest number holds."""

    number: int
    key_groups: Ranges
    positions: tuple[Position, ...] = ()  # of key-groups that have one
    rolling: _Roll | None = None
    void: bool = False  # no commit: rows of these key-groups are just being written, or deleted

    @property
    def id(self) -> bytes:
        return _id_of(self.key_groups)

    @property
    def name(self) -> bytes:
        return row_name(_COMMITS, 0, self.id)

    def encode(self) -> bytes:
        told: dict[str, Any] = {
            "number": self.number,
            "key_groups": [(part.start, part.stop) for part in self.key_groups],
            "positions": [
                ([(part.start, part.stop) for part in groups], metadata)
                for groups, metadata in self.positions
            ],
        }
        if self.void:
            told["void"] = True
        if self.rolling is not None:
            told["rolling"] = {
                "token": self.rolling.token.hex(),
                "since": self.rolling.since,
                "cleared": self.rolling.cleared,
                "is_cleared": self.rolling.is_cleared,
            }
        try:
            return msgspec.json.encode(told)
        except UnicodeEncodeError:  # half a surrogate pair, which json writes as an escape
            return json.dumps(told).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Commit":
        try:
            told = json.loads(data)
            roll = told.get("rolling")
            return cls(
                number=told["number"],
                key_groups=tuple(range(*pair) for pair in told["key_groups"]),
                positions=tuple(
                    (tuple(range(*pair) for pair in groups), metadata)
                    for groups, metadata in told["positions"]
                ),
                rolling=roll
                and _Roll(
                    bytes.fromhex(roll["token"]),
                    tuple((leaf, since) for leaf, since in roll["since"]),
                    tuple((leaf, state, since) for leaf, state, since in roll["cleared"]),
                    roll["is_cleared"],
                ),
                void=told.get("void", False),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SchemaError(
                f"the home holds a record of a commit that cannot be read ({error!r}). "
                "Was it written by a newer statekit, or by another program?"
            ) from None

    def only(self, groups: Iterable[int]) -> "Commit":
        """What it says of some of its key-groups."""
        kept = group_ranges(groups)
        positions = ((common(kept, theirs), metadata) for theirs, metadata in self.positions)
        return replace(self, key_groups=kept, positions=tuple(one for one in positions if one[0]))


@dataclass(slots=True)
class _Doubt:
    """A commit whose write failed: it may have happened."""

    commit: Commit
    leaves: Sequence[int]
    cleared: Sequence[tuple[int, int]]


@dataclass
class Ledger:
    """A home and what is not committed there. Providers that share the home share it.

    Any thread may read. Who writes holds `lock`, and is the only one who changes these leaves.
    """

    home: Home
    subgroups: int
    states: int = 0  # numbers of states are below this
    is_bare: bool = False  # the home is new: no row was ever committed
    lock: Any = field(default_factory=threading.RLock)
    #: Leaves whose rows are to be deleted: others have them. One that comes back is taken out.
    dropping: set[int] = field(default_factory=set)
    #: Leaves that came since: what a sibling still frees of an earlier time is not their rows.
    came: set[int] = field(default_factory=set)
    #: Leaves that another process of the home has since, by its records: their rows are its.
    theirs: set[int] = field(default_factory=set)
    #: Leaves whose content is at a source, and nothing of it here: they are ours, and move in.
    coming: set[int] = field(default_factory=set)
    #: The home's record names sources: what is at home must be told from what is coming.
    has_sources: bool = False
    _token: bytes = field(default_factory=lambda: os.urandom(_TOKEN_BYTES))
    _generation: int = 1
    _since: dict[int, int] = field(default_factory=dict)  # leaf -> generation
    _cleared: dict[tuple[int, int], int] = field(default_factory=dict)  # leaf, state -> generation
    _hidden: set[tuple[int, int]] = field(default_factory=set)  # of these: have rows in place still
    _pending_bytes: int = 0  # about, of all leaves
    _commits: dict[bytes, Commit] = field(default_factory=dict)
    _rolling: Commit | None = None  # is committed, and its rows are not all in place
    _fresh: Named | None = None  # these are all its rows: there is no need to read them
    _doubt: _Doubt | None = None
    _voids: list[Commit] = field(default_factory=list)  # arrivals to be called void again
    _pid: int = field(default_factory=os.getpid)

    # ---- Opening

    def recover(self, key_groups: Ranges) -> None:
        """To be called before anything else is: finishes or undoes what a crash has left.

        Of these key-groups only. Other processes may have opened the home for the others (Redis).
        """
        for _, data in self.home.load(_COMMITS, 0):
            commit = Commit.decode(data)
            self._commits[commit.id] = commit
        for held in self.commits_of(key_groups):
            if held.rolling is not None:
                self._finish(held)
            elif held.void:
                for part in self._leaves(held.key_groups):
                    self.home.clear_leaves(part, self.states)
                self._write_record(replace(held, number=self._next_number(), void=False))
        for part in self._leaves(key_groups):
            self.home.clear_leaves(range(part.start + PENDING, part.stop + PENDING), self.states)

    def _finish(self, held: Commit) -> None:
        """Moves pending rows into place, of the key-groups for which the commit holds."""
        roll, leaves = held.rolling, self._leaves(held.key_groups)
        assert roll is not None
        self._rolling = replace(
            held,
            number=self._next_number(),
            rolling=replace(
                roll,
                since=tuple(one for one in roll.since if _is_in(one[0], leaves)),
                cleared=tuple(one for one in roll.cleared if _is_in(one[0], leaves)),
            ),
        )
        self.settle()

    def _leaves(self, key_groups: Ranges) -> Ranges:
        return leaf_ranges(key_groups, self.subgroups)

    def _write_record(self, commit: Commit) -> None:
        """Writes a record by itself, and forgets those that it supersedes."""
        self.home.write_rows(self._record(commit), durable=True)
        self._note(commit)

    def _note(self, commit: Commit) -> None:
        for other in self._superseded(commit):
            del self._commits[other.id]
        self._commits[commit.id] = commit

    # ---- Reading

    def get(self, rows: Sequence[Row]) -> Sequence[bytes | None]:
        """The values of rows: pending ones before committed ones."""
        if self._doubt is not None:
            self._resolve(is_reader=True)
        since, hidden = self._since, self._hidden
        if not since and not hidden:
            return self.home.get(rows)
        floors = [self._floor(leaf, state) for leaf, state, _ in rows]
        asked: list[Row] = []
        for (leaf, state, key), floor in zip(rows, floors, strict=True):
            if floor is not None:
                asked.append((leaf + PENDING, state, key))
            asked.append((leaf, state, key))
        found = iter(self.home.get(asked))
        values: list[bytes | None] = []
        for (leaf, state, _), floor in zip(rows, floors, strict=True):
            held = None if floor is None else next(found)
            value = next(found)
            if held is not None and self._counts(held, floor):
                value = held[_HEAD_BYTES:] if held[_HEAD_BYTES - 1] else None
            elif (leaf, state) in hidden:
                value = None
            values.append(value)
        return values

    def get_one(self, leaf: int, state: int, key: bytes) -> bytes | None:
        """get() of one row."""
        if self._doubt is not None:
            self._resolve(is_reader=True)
        if leaf not in self._since:
            if self.is_bare or (self._hidden and (leaf, state) in self._hidden):
                return None
            return self.home.get_one(leaf, state, key)
        if not self.is_bare:
            return self.get([(leaf, state, key)])[0]
        held = self.home.get_one(leaf + PENDING, state, key)
        if held is None or not self._counts(held, self._floor(leaf, state)):
            return None
        return held[_HEAD_BYTES:] if held[_HEAD_BYTES - 1] else None

    def _floor(self, leaf: int, state: int) -> int | None:
        """The generation from which on pending rows count; None if there are none."""
        floor = self._since.get(leaf)
        return None if floor is None else max(floor, self._cleared.get((leaf, state), 0))

    def _head(self, generation: int) -> bytes:
        """What pending rows of a generation begin with."""
        return self._token + generation.to_bytes(_HEAD_BYTES - 1 - _TOKEN_BYTES)

    def _counts(self, held: bytes, floor: int | None) -> bool:
        return (
            floor is not None
            and held[:_TOKEN_BYTES] == self._token
            and int.from_bytes(held[_TOKEN_BYTES : _HEAD_BYTES - 1]) >= floor
        )

    def keys(self, leaf: int, state: int, rows_max: int) -> list[bytes] | None:
        """All keys of a leaf and state; None if more than rows_max."""
        if not self.is_bare:
            keys = [key for key, _ in islice(self.load(leaf, state), rows_max + 1)]
        elif (floor := self._floor(leaf, state)) is None:
            keys = []
        else:
            least, most = self._head(floor), self._head(_GENERATION_MAX)
            rows = self.home.load(leaf + PENDING, state)
            counting = (key for key, held in rows if least <= held[: _HEAD_BYTES - 1] <= most)
            keys = [*islice(counting, rows_max + 1)]
        return keys if len(keys) <= rows_max else None

    def load(self, leaf: int, state: int) -> Iterator[tuple[bytes, bytes]]:
        """All (key, value) of a leaf and state."""
        if self._doubt is not None:
            self._resolve(is_reader=True)
        # Pending rows first: a commit moves them to where we look next, never the other way.
        seen: set[bytes] = set()
        yield from self._overlay(self.home, leaf, state, self._floor(leaf, state), seen)
        # Asked now, not before: if it has moved them meanwhile, nothing is hidden any more.
        if self._doubt is not None:
            self._resolve(is_reader=True)
        if (leaf, state) not in self._hidden:
            for key, value in self.home.load(leaf, state):
                if key not in seen:
                    yield key, value

    def _overlay(
        self,
        rows: Home | HomeSnapshot,
        leaf: int,
        state: int,
        floor: int | None,
        seen: set[bytes],
    ) -> Iterator[tuple[bytes, bytes]]:
        """The pending rows that count; `seen` is told their keys, deleted ones too."""
        if floor is None:
            return
        for key, held in rows.load(leaf + PENDING, state):
            if self._counts(held, floor):
                seen.add(key)
                if held[_HEAD_BYTES - 1]:
                    yield key, held[_HEAD_BYTES:]

    def snapshot(self) -> HomeSnapshot | None:
        """All rows as they are now; None if the home has no snapshots."""
        if self._doubt is not None:
            self._resolve(is_reader=True)
        rows = self.home.snapshot()
        return None if rows is None else _Snapshot(self, rows)

    # ---- Changes that the next commit makes count

    def put(self, rows: Named) -> None:
        """Rows that leave memory before the commit."""
        with self.lock:
            self.settle()
            head = self._head(self._generation)
            alive = head + b"\1"
            # Over nothing, a deletion need not be remembered.
            dead = None if self.is_bare else head + b"\0"
            names: Any = rows[::2]
            held: Any = [b""] * len(rows)
            held[::2] = [b"\x80" + name[1:] for name in names]
            held[1::2] = [dead if value is None else alive + value for value in rows[1::2]]
            for leaf in {name[:4] for name in names}:
                self._since.setdefault(int.from_bytes(leaf), self._generation)
            self._pending_bytes += sum(map(len, filter(None, held)))
            self.home.write_rows(held)

    def clear(self, leaf: int, state: int) -> None:
        """All rows of a leaf and state are deleted."""
        with self.lock:
            self.settle()
            self._generation += 1
            self._cleared[leaf, state] = self._generation
            self._hidden.add((leaf, state))

    # ---- Commits

    def commit(
        self,
        key_groups: Ranges,
        leaves: Ranges,
        rows: Named,
        positions: Sequence[Position],
        bytes_max: int,
    ) -> None:
        """Makes everything since the last commit durable at once: pending rows, and these.

        bytes_max: how much may be written in one step.
        """
        with self.lock:
            self.settle()
            commit = Commit(self._next_number(), key_groups, tuple(positions))
            marked = [leaf for leaf in self._since if _is_in(leaf, leaves)]
            cleared = [place for place in self._cleared if _is_in(place[0], leaves)]
            if self.home.is_atomic and (not marked or self._pending_bytes <= bytes_max):
                self._commit_at_once(commit, marked, cleared, rows)
            else:
                self._commit_in_phases(commit, leaves, rows)

    def _next_number(self) -> int:
        return 1 + max((commit.number for commit in self._commits.values()), default=0)

    def _record(self, commit: Commit) -> list[bytes | None]:
        """The record of a commit, and the deletion of those that it supersedes."""
        rows: list[bytes | None] = [commit.name, commit.encode()]
        for other in self._superseded(commit):
            rows += [other.name, None]
        return rows

    def _superseded(self, commit: Commit) -> list[Commit]:
        others = [other for other in self._commits.values() if other.id != commit.id]
        if not others:
            return others
        newest: dict[int, int] = {}
        for one in sorted([*others, commit], key=lambda one: one.number):
            for part in one.key_groups:
                newest |= dict.fromkeys(part, one.number)
        return [
            other
            for other in others
            if all(newest[group] > other.number for part in other.key_groups for group in part)
        ]

    def _commit_at_once(
        self,
        commit: Commit,
        marked: Sequence[int],
        cleared: Sequence[tuple[int, int]],
        rows: Named,
    ) -> None:
        batch: list[bytes | None] = []
        gone: list[bytes | None] = []
        for leaf in marked:
            for name, held, value, counts in self._pending(leaf):
                gone += (held, None)
                if counts:
                    batch += (name, value)
        batch += rows
        batch += gone
        batch += self._record(commit)
        self.is_bare = self.is_bare and not batch[2:]  # the record alone is no row
        self._doubt = _Doubt(commit, marked, cleared)  # before: an interrupt may come after it
        self.home.write_rows(batch, cleared, durable=True)
        self._is_made(self._doubt)

    def _commit_in_phases(self, commit: Commit, leaves: Ranges, rows: Named) -> None:
        is_all = not any(_is_in(leaf, leaves) for leaf in self._since)
        if rows:
            self.put(rows)
        self._fresh = rows if is_all else None
        marked = [leaf for leaf in self._since if _is_in(leaf, leaves)]
        cleared = [place for place in self._cleared if _is_in(place[0], leaves)]
        self.home.flush()  # before the record says that they count
        rolling = _Roll(
            self._token,
            tuple((leaf, self._since[leaf]) for leaf in marked),
            tuple((leaf, state, self._cleared[leaf, state]) for leaf, state in cleared),
        )
        # What it supersedes is deleted afterwards: not all of it may happen.
        is_any = marked or cleared or self._superseded(commit)
        commit = replace(commit, rolling=rolling if is_any else None)
        self.is_bare = self.is_bare and not marked
        self._doubt = _Doubt(commit, marked, cleared)
        self.home.write_rows([commit.name, commit.encode()], durable=True)
        self._is_made(self._doubt)

    def _is_made(self, doubt: _Doubt) -> None:
        """A commit is known to have happened."""
        commit = doubt.commit
        if commit.rolling is None:
            self._note(commit)
            self._end_generation(doubt.leaves, doubt.cleared)
            self._doubt = None
            return
        self._commits[commit.id] = commit
        self._rolling = commit
        self._doubt = None
        self._roll_or_leave()

    def _roll_or_leave(self) -> None:
        """Moves rows into place; if the home fails now, the commit is made all the same."""
        try:
            self.settle()
        except HomeError:
            return  # who writes next tries again, and is told

    def _resolve(self, is_reader: bool = False) -> None:
        """Finds out whether a commit happened whose write failed.

        is_reader: if the home takes no writes yet, it may go on; it reads what the home shows now.
        """
        with self.lock:
            if (doubt := self._doubt) is None:
                return
            is_final = True
            try:
                # A home that failed may be opened again for this, and find in its log what it has
                # not shown before.
                self.home.flush()
            except HomeError:
                if not is_reader:
                    raise
                is_final = False
            (data,) = self.home.get([(_COMMITS, 0, doubt.commit.id)])
            if data == doubt.commit.encode():
                self._is_made(doubt)
            elif is_final:
                self._doubt = None

    def settle(self) -> None:
        """Before anything is written: finishes what an earlier commit has begun."""
        if self._pid != os.getpid():
            raise HomeError(
                f"this home was opened by process {self._pid}, and this one ({os.getpid()}) was "
                "forked from it. Nothing was written. Open providers in the process that uses them."
            )
        if self._doubt is None and self._rolling is None and not self._voids:
            return
        with self.lock:
            while self._voids:
                self._write_record(self._voids[-1])
                self._voids.pop()
            if self._doubt is not None:
                self._resolve()
            if (commit := self._rolling) is None:  # another thread was quicker
                return
            roll = commit.rolling
            assert roll is not None
            if not roll.is_cleared:
                for leaf, state, _ in roll.cleared:
                    self.home.clear(leaf, state)
                roll = replace(roll, is_cleared=True)
                commit = replace(commit, rolling=roll)
                if roll.cleared:
                    self.home.flush()
                    self.home.write_rows([commit.name, commit.encode()], durable=True)
                self._rolling = commit
            # Before any row moves, and also if an interrupt kept the first try from it.
            self._hidden.difference_update(place[:2] for place in roll.cleared)
            self._move(roll)
            self.home.flush()
            self._write_record(replace(commit, rolling=None))
            self._end_generation(
                [leaf for leaf, _ in roll.since], [place[:2] for place in roll.cleared]
            )
            # Last: an interrupt before makes the next one do all of it again, which does no harm.
            # The other way round, the next commit would clear what has just been moved.
            self._rolling = self._fresh = None

    def _move(self, roll: _Roll) -> None:
        """Puts the pending rows of a commit into place."""
        if (rows := self._fresh) is not None:
            gone = [
                part and b"\x80" + part[1:] if at % 2 == 0 else None for at, part in enumerate(rows)
            ]
            self._move_some([*rows], gone)
            return
        puts: list[bytes | None] = []
        gone = []
        size = 0
        for leaf, since in roll.since:
            floors = {state: at for place, state, at in roll.cleared if place == leaf}
            for name, held, value, counts in self._pending(leaf, roll.token, since, floors):
                gone += (held, None)
                if counts:
                    puts += (name, value)
                    size += len(name) + len(value or b"")
                if len(gone) >= 2 * _ROLL_ROWS_MAX or size >= _ROLL_BYTES_MAX:
                    self._move_some(puts, gone)
                    puts, gone, size = [], [], 0
        self._move_some(puts, gone)

    def _move_some(self, puts: list[bytes | None], gone: list[bytes | None]) -> None:
        if not gone:
            return
        if self.home.is_atomic:
            self.home.write_rows(puts + gone)
            return
        self.home.write_rows(puts, durable=True)  # before what they are made of goes
        self.home.write_rows(gone)

    def _pending(
        self,
        leaf: int,
        token: bytes | None = None,
        since: int | None = None,
        floors: Mapping[int, int] | None = None,
    ) -> Iterator[tuple[bytes, bytes, bytes | None, bool]]:
        """The pending rows of a leaf: name in place, own name, value, and whether it counts."""
        token = self._token if token is None else token
        for state in range(self.states):
            if floors is None:
                floor = self._floor(leaf, state) or 0
            else:
                floor = max(since or 0, floors.get(state, 0))
            for key, held in self.home.load(leaf + PENDING, state):
                counts = held[:_TOKEN_BYTES] == token and (
                    int.from_bytes(held[_TOKEN_BYTES : _HEAD_BYTES - 1]) >= floor
                )
                value = held[_HEAD_BYTES:] if held[_HEAD_BYTES - 1 : _HEAD_BYTES] == b"\1" else None
                yield (
                    row_name(leaf, state, key),
                    row_name(leaf + PENDING, state, key),
                    value,
                    counts,
                )

    def _end_generation(
        self, leaves: Iterable[int], cleared: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Nothing that was pending in leaves counts any more."""
        self._generation += 1
        for leaf in leaves:
            self._since.pop(leaf, None)
        for place in cleared:
            self._hidden.discard(place)  # first: what is in no other list would be hidden for ever
            self._cleared.pop(place, None)
        if not self._since:
            self._pending_bytes = 0

    def rollback(self, leaves: Ranges) -> None:
        """Back to the last commit: nothing since then counts."""
        with self.lock:
            self.settle()
            marked = [leaf for leaf in self._since if _is_in(leaf, leaves)]
            cleared = [place for place in self._cleared if _is_in(place[0], leaves)]
            self._end_generation(marked, cleared)
            try:
                for leaf in marked:
                    self.home.clear_leaves(range(leaf + PENDING, leaf + PENDING + 1), self.states)
            except HomeError:
                return  # they count no more, and only take up room until the home is opened again

    def commits_of(self, key_groups: Ranges) -> list[Commit]:
        """The commits that hold for key-groups, each with those of them that it holds for."""
        if self._doubt is not None:
            self._resolve()
        found: dict[bytes, tuple[Commit, list[int]]] = {}
        by_number = sorted(self._commits.values(), key=lambda commit: -commit.number)
        for group in (group for part in key_groups for group in part):
            for commit in by_number:
                if any(group in part for part in commit.key_groups):
                    found.setdefault(commit.id, (commit, []))[1].append(group)
                    break
        return [commit.only(groups) for commit, groups in found.values()]

    def positions_of(self, key_groups: Ranges) -> list[Position]:
        """What key-groups were committed with; those without a position are left out."""
        found: dict[str, Position] = {}
        for commit in self.commits_of(key_groups):
            for groups, metadata in commit.positions:
                text = json.dumps(metadata, sort_keys=True)
                known = found.get(text, ((), metadata))[0]
                found[text] = group_ranges([*known, *groups]), metadata
        return [*found.values()]

    # ---- Outside of commits: leaves that come and go

    def begin_moving_in(self, key_groups: Ranges) -> Commit:
        """Says that rows of key-groups are about to be written that others still have."""
        with self.lock:
            self.settle()
            self._read_records()
            commit = Commit(self._next_number(), key_groups, void=True)
            # Known before it is written: if that fails it may be there, and takes up its number.
            self._commits[commit.id] = commit
            self.home.write_rows([commit.name, commit.encode()], durable=True)
            return commit

    def _read_records(self) -> None:
        """Takes on what other processes have written since (Redis).

        Leaves that are another's by now are not ours to drop, though they once went from here.
        """
        for _, data in self.home.load(_COMMITS, 0):
            found = Commit.decode(data)
            known = self._commits.get(found.id)
            if known is None or known.number < found.number:
                self._commits[found.id] = found
                for part in self._leaves(found.key_groups):
                    self.theirs.update(part)

    def replace(self, leaf: int, rows: Named) -> None:
        """Writes the rows of a leaf that arrives, in place of whatever is there."""
        with self.lock:
            self.is_bare = False
            self.dropping.discard(leaf)
            self.coming.discard(leaf)
            self.came.add(leaf)
            self.theirs.discard(leaf)
            self._end_generation([leaf], [place for place in self._cleared if place[0] == leaf])
            self.home.clear_leaves(range(leaf, leaf + 1), self.states)
            told = [_moved_in_name(leaf), b""] if self.has_sources else []
            self.home.write_rows([*rows, *told])

    def begin_expecting(self, key_groups: Ranges) -> None:
        """Key-groups are about to come from another process, leaf by leaf.

        Whatever is here of them is of an earlier time, and so is the position of its commit.
        """
        with self.lock:
            self.settle()
            self._read_records()
            self._write_record(Commit(self._next_number(), key_groups))

    def go_on_expecting(self, key_groups: Ranges) -> None:
        """The same where an earlier ledger had begun: what it committed of them counts."""
        with self.lock:
            self.settle()
            self.recover(key_groups)

    def expect(self, leaves: Sequence[int], here: Collection[int]) -> None:
        """These leaves are ours, and coming from now on; but not those that are `here`."""
        with self.lock:
            some = {*leaves}
            cleared = [place for place in self._cleared if place[0] in some]
            self._end_generation([leaf for leaf in leaves if leaf in self._since], cleared)
            self.dropping.difference_update(leaves)
            self.came.update(leaves)
            self.theirs.difference_update(leaves)
            self.coming.update(leaf for leaf in leaves if leaf not in here)

    def make_durable(self) -> None:
        """Whatever was written survives a crash."""
        with self.lock:
            self.home.flush()

    def move_in(self, leaf: int, rows: Named) -> None:
        """Writes the rows of a leaf that was coming. From then on it is at home.

        If it fails, or an interrupt comes before the leaf is taken out of `coming`, the leaf is
        coming still: it moves in again, over what was written. Nobody has changed that.
        """
        with self.lock:
            if leaf not in self.coming:
                return
            self.settle()
            self.is_bare = False
            self.home.clear_leaves(range(leaf, leaf + 1), self.states)
            told = [_moved_in_name(leaf), b""]
            if self.home.is_atomic:
                self.home.write_rows([*rows, *told])
            else:
                self.home.write_rows(rows, durable=True)  # before it is said that they are there
                self.home.write_rows(told)
            self.coming.discard(leaf)

    def moved_in(self) -> set[int]:
        """The leaves that have moved in, of sources that are not done."""
        return {int.from_bytes(key) for key, _ in self.home.load(_COMMITS, _MOVED_IN)}

    def forget_moved_in(self, leaves: Ranges) -> None:
        """Their source is done, or of no use any more."""
        with self.lock:
            known = [leaf for leaf in self.moved_in() if _is_in(leaf, leaves)]
            if known:
                rows: list[bytes | None] = []
                for leaf in known:
                    rows += (_moved_in_name(leaf), None)
                self.home.write_rows(rows, durable=True)

    def empty(self, leaves: Ranges) -> None:
        """Deletes all rows of leaves, to make room for what is to move in."""
        with self.lock:
            self.settle()
            for part in leaves:
                marked = [leaf for leaf in self._since if leaf in part]
                self._end_generation(marked, [one for one in self._cleared if one[0] in part])
                for at in (0, PENDING):
                    self.home.clear_leaves(range(part.start + at, part.stop + at), self.states)
            self.forget_moved_in(leaves)
            self.home.flush()

    def end_moving_in(self, commit: Commit) -> None:
        """Everything is there: from now on it is this home's."""
        with self.lock:
            self.home.flush()
            self._write_record(replace(commit, void=False))

    def first_held(self, key_groups: Ranges) -> int | None:
        """A key-group that has rows which nobody is about to drop; None if there is none."""
        with self.lock:
            self._read_records()
            void = {
                group
                for commit in self.commits_of(key_groups)
                if commit.void
                for part in commit.key_groups
                for group in part
            }
            for leaf in (leaf for part in self._leaves(key_groups) for leaf in part):
                if leaf in self.dropping or leaf // self.subgroups in void:
                    continue
                for state in range(self.states):
                    if next(iter(self.home.load(leaf, state)), None) is not None:
                        return leaf // self.subgroups
        return None

    def void_moving_in(self, commit: Commit) -> None:
        """It counts for nothing, and its giver has it all."""
        with self.lock:
            self._voids.append(replace(commit, void=True))  # again and again, until it is written
            self.settle()

    def drop(self) -> None:
        """Deletes the rows of leaves that others have, or reopening would bring them back."""
        with self.lock:
            if not self.dropping:
                return
            self.settle()
            self._read_records()
            self.dropping -= self.theirs
            # Of a key-group that is handed over leaf by leaf, the rest may still be here.
            whole = [
                group
                for group in {leaf // self.subgroups for leaf in self.dropping}
                if self.dropping.issuperset(
                    range(group * self.subgroups, (group + 1) * self.subgroups)
                )
            ]
            gone = self.begin_moving_in(group_ranges(whole)) if whole else None
            self.settle()
            for leaf in sorted(self.dropping):
                self._end_generation([leaf], [place for place in self._cleared if place[0] == leaf])
                for place in (leaf, leaf + PENDING):
                    self.home.clear_leaves(range(place, place + 1), self.states)
            if gone is None:
                self.home.flush()
            else:
                self.end_moving_in(gone)
            self.dropping.clear()


class _Snapshot(HomeSnapshot):
    """A home's snapshot, with what counted of the pending rows at that moment."""

    def __init__(self, ledger: Ledger, rows: HomeSnapshot) -> None:
        self._ledger = ledger
        self._rows = rows
        self._since = dict(ledger._since)
        self._cleared = dict(ledger._cleared)
        self._hidden = set(ledger._hidden)

    def load(self, leaf: int, state: int) -> Iterator[tuple[bytes, bytes]]:
        floor = self._since.get(leaf)
        if floor is not None:
            floor = max(floor, self._cleared.get((leaf, state), 0))
        seen: set[bytes] = set()
        yield from self._ledger._overlay(self._rows, leaf, state, floor, seen)
        if (leaf, state) not in self._hidden:
            for key, value in self._rows.load(leaf, state):
                if key not in seen:
                    yield key, value

    def close(self) -> None:
        self._rows.close()


def _moved_in_name(leaf: int) -> bytes:
    return row_name(_COMMITS, _MOVED_IN, leaf.to_bytes(4))


def _is_in(leaf: int, leaves: Ranges) -> bool:
    return any(leaf in part for part in leaves)
