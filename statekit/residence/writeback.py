"""WriteBack: a store, its budget of memory and its home; how what is here leaves memory.

    write back changes go home in batches, when memory is short or a commit is near
    evict      clean entries that were not used lately leave memory

Invariant: an entry that is not here and whose leaf is not whole is at home, in its newest
version. It holds because only clean entries are evicted, and an entry is clean only after the
home has confirmed it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

from statekit.errors import HomeError, MemoryLimitError
from statekit.homes.home import Named, row_name
from statekit.homes.ledger import Ledger
from statekit.homes.rows import block_rows
from statekit.metrics import StateCounters
from statekit.native import Block, Store
from statekit.residence.assemble import Assembly, RowsByKey
from statekit.residence.freeze import Frozen, Guard
from statekit.residence.loading import Loading
from statekit.residence.tracking import Tracking
from statekit.schema import StateSchema

_BUDGET_MIN = 16 << 10  # of bytes, however often a budget was split: an entry must fit
_EVICT_SHARE = 16  # a sixteenth of the budget is freed at a time
_WRITE_ROWS_MAX = 8192  # rows that are written home at a time
_WRITE_BYTES_MAX = 8 << 20
_FAILED_SECONDS = 1.0  # after which a read tries again to write to a home that failed


class WriteBack:
    """The part of a Residence (residence.py) that leaves memory. It has the fields of all parts."""

    def __init__(self, store: Store, ledger: Ledger | None, budget: int | None) -> None:
        self.store = store
        self.ledger = ledger  # of the home, which siblings share; None without a home
        self.home = None if ledger is None else ledger.home  # has what is not here; None: all is
        self.tracking = Tracking(store)
        self.budget = budget  # bytes of memory; None for no limit
        self.whole_budget = budget  # before it was split: an entry that fits into it is taken
        self.keeper: object = None  # the provider, which lives as long as one of its states
        self.loading: Loading | None = None  # while a source has what is not here
        self.schemas: Sequence[StateSchema] = ()  # of all states that are stored
        self.numbers: dict[str, int] = {}  # of the states, at home
        self.counters: dict[str, StateCounters] = {}
        self.lock = self._lock = threading.RLock()  # before the ledger's
        self._frozen: list[Frozen] = []  # that must be told before rows change
        self.shut_leaves: set[int] = set()  # that are being handed over to another process
        self._handed_over: set[int] = set()  # of these: another process has them, memory may go
        self._assembly: tuple[Any, Assembly] | None = None  # for it, and of which types it is
        self._fold_locks: dict[str, Any] = {}
        self._timerless: set[int] = set()  # leaves whose timers are at home and must be here
        self._on_moved_in: Callable[[], None] = lambda: None  # when no leaf is coming any more
        self._ending = threading.RLock()  # held while that is called
        self._evictions = 0
        self._hand = 0  # the next leaf to be written back
        self.failures = 0  # of the home, when it was to be written to and nobody was waiting
        self._vain: dict[int, int] = {}  # leaf << 16 | state -> entries asked of the home in vain
        self._failed_at = -_FAILED_SECONDS  # when it last refused to take what was to go
        self._limit()
        if ledger is not None:
            store.write_back(True)

    @property
    def locks(self) -> list[Any]:
        """The locks that whoever changes what is at home may hold."""
        return [self._lock, self._ending, *([] if self.ledger is None else [self.ledger.lock])]

    def register(self, schemas: Sequence[StateSchema]) -> None:
        """Says what is stored; a state's number at home is its place in this list."""
        self.schemas = schemas
        self.numbers = {schema.name: at for at, schema in enumerate(schemas)}
        if self.ledger is not None:
            self.ledger.states = max(self.ledger.states, len(schemas))

    def note_timerless(self, leaf: int) -> None:
        """The home has timers of a leaf: they must be here before timers fire."""
        self._timerless.add(leaf)

    def open_moved_in(self, leaf: int) -> None:
        """Lets calls in, if a leaf is at home and not shut. No leaf moves in meanwhile."""
        assert self.ledger is not None
        if leaf not in self.ledger.coming and self.store.gate(leaf) == "expected":
            self.store.set_gate(leaf, leaf + 1, "open")

    # ---- Memory

    def set_budget(self, budget: int) -> None:
        """Changes how much memory may hold."""
        with self._lock:
            self.budget = budget
            self.whole_budget = max(budget, self.whole_budget or 0)
            self._limit()
            self._trim()

    def _limit(self) -> None:
        self.store.limit(0 if self.budget is None else self._bytes_max)

    @property
    def _bytes_max(self) -> int:
        """What memory may hold: the budget, or what works at all if that is less."""
        return max(self.budget or 0, _BUDGET_MIN)

    def _trim(self) -> None:
        """Makes room if memory is above the budget, after something that succeeded.

        If the home fails now, that must not look as if what was done had failed; whoever needs
        room next will be told.
        """
        if self.budget is None or self.ledger is None or self.store.bytes_used <= self._bytes_max:
            return
        try:
            self.make_room(None)
        except HomeError:
            self.failures += 1

    # ---- Making room

    def make_room(self, limit: MemoryLimitError | None) -> None:
        """Frees a part of the budget, writing home what must be; raises if nothing can go."""
        if self.ledger is None:
            assert limit is not None
            raise limit
        with self._lock:
            budget = self._bytes_max
            wanted = max(budget // _EVICT_SHARE, 1, self.store.bytes_used - budget)
            freed = self._evict(wanted)
            for is_cold in (True, False):
                # Cold entries first: hot ones would be written again and again.
                while freed < wanted:
                    written = self._write_back(wanted - freed, is_cold)
                    freed += self._evict(wanted - freed)
                    if not written:
                        break
            if freed == 0 and limit is not None:
                raise limit

    def _make_room_to_read(self, limit: MemoryLimitError | None) -> None:
        """make_room(), but a home that has just failed is not asked again for every read."""
        if monotonic() - self._failed_at < _FAILED_SECONDS:
            with self._lock:
                if not self._evict(self._bytes_max // _EVICT_SHARE) and limit is not None:
                    raise limit
            return
        try:
            self.make_room(limit)
        except HomeError:
            self.failures += 1
            self._failed_at = monotonic()
            raise

    def _evict(self, wanted: int) -> int:
        self._evictions += 1  # before: an answer asked for earlier must not be installed after
        return self.store.evict(wanted)

    def _write_back(self, bytes_wanted: int, cold: bool) -> int:
        """Writes changes home ahead of the commit, from where it last stopped; how many rows."""
        store = self.store
        written = 0
        while bytes_wanted > 0:
            start = self._hand
            rows, self._hand, counts, size = store.rows_take(
                start, self.numbers, _WRITE_ROWS_MAX, _WRITE_BYTES_MAX, cold=cold
            )
            self._send(rows, counts, start, self._hand)
            written += len(rows) // 2
            bytes_wanted -= size
            if self._hand >= store.leaves:
                self._hand = 0
                break
        return written

    def _send(self, rows: Named, counts: dict[str, int], start: int, stop: int) -> None:
        """Writes rows of leaves home that were taken, ahead of the commit."""
        is_written = False
        try:
            self._put(rows)
            is_written = True
        finally:
            # If an interrupt keeps us from it, rows_take() does it: they are dirty again.
            self.store.rows_done(start, stop, is_written)
        for name, count in counts.items():
            self.counters[name].written_back(count)

    def _put(self, rows: Named) -> None:
        """Writes rows home that the next commit is to make count."""
        assert self.ledger is not None
        if rows:
            self._protect_rows(rows)
            self.ledger.put(rows)

    def _protect_rows(self, rows: Named) -> None:
        if self._frozen:
            self._protect({int.from_bytes(name[:4]) for name in rows[::2] if name is not None})

    def _protect(self, leaves: Iterable[int]) -> None:
        """Tells who has frozen the state that rows of leaves are about to change, or to go."""
        guards: list[Guard] = [one.guard for one in self._frozen if one.guard is not None]
        if guards:
            for leaf in leaves:
                for guard in guards:
                    guard.protect(leaf)

    def rows_of_whole(self, leaf: int, blocks: bytes) -> list[bytes | None]:
        """The rows of a leaf, from blocks that have all of it: as homes write them (Named)."""
        named: list[bytes | None] = []
        for block in Block.each(blocks):
            prefix = row_name(leaf, self.numbers[block.name], b"")
            for key, row in zip(block.key_list(), block_rows(block), strict=True):
                named += (prefix + key, row)
        return named

    def _rows_of(self, blocks: bytes) -> RowsByKey:
        """The rows of a leaf's blocks, by the number of their state and their key."""
        rows: RowsByKey = {}
        for block in Block.each(blocks):
            number = self.numbers[block.name]
            for key, row in zip(block.key_list(), block_rows(block), strict=True):
                rows[number, key] = row
        return rows
