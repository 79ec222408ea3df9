"""Scanning: whole states, leaf by leaf: what is here over what is at home."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

from statekit.homes.home import row_name
from statekit.homes.ledger import Ledger
from statekit.homes.rows import native_read, read_value, split_stamp
from statekit.native import Block
from statekit.native.states import State
from statekit.residence.commits import Committing


class Scanning(Committing):
    """The part of a Residence (residence.py) that goes through whole states."""

    def clear(self, raw: State) -> None:
        """Drops all entries of a state in the leaves that are this provider's."""
        self.load_leaves(self.leaves())
        with self._lock:
            self._evictions += 1  # answers on their way are of the time before
            for leaf in self.leaves():
                self.load_leaves((leaf,))
                if self.ledger is not None:
                    self._protect((leaf,))
                    self.ledger.clear(leaf, self.numbers[raw.name])
                self.store.clear(raw, leaf, leaf + 1, blind=True)
            self._evictions += 1  # and those asked for meanwhile

    def leaves(self) -> Iterator[int]:
        """The leaves that are this provider's."""
        store, shut = self.store, self.shut_leaves
        # In this order: one that was handed over is marked as away before it is no longer shut.
        return (
            leaf
            for leaf in range(store.leaves)
            if leaf not in shut and store.residency(leaf) != "away"
        )

    def scan(self, raw: State) -> Iterator[tuple[bytes, Any]]:
        """All entries of a state as (encoded key, value), each leaf as it is when reached."""
        for leaf in self.leaves():
            yield from self.scan_leaf(raw, leaf)

    def scan_leaf(self, raw: State, leaf: int) -> Iterator[tuple[bytes, Any]]:
        # First what is here, then what is at home. The other way round, an entry that is written
        # home and evicted in between would be in neither.
        self.load_leaves((leaf,))
        was_whole = self.store.residency(leaf) == "whole"
        seen: set[bytes] = set()
        blocks = self.store.encode_leaf(leaf, raw)
        if self.store.residency(leaf) == "away":
            return  # it was handed over meanwhile: what is still at home is of the past
        for block in Block.each(blocks):
            for (key, value), gone in zip(block, block.marks or repeat(0), strict=False):
                seen.add(key)
                if not gone:
                    yield key, value
        # Asked before and after: an eviction may have come in between.
        if self.ledger is None or (was_whole and self.store.residency(leaf) == "whole"):
            return
        for key, row in self.ledger.load(leaf, self.numbers[raw.name]):
            if key in seen:
                continue
            value, stamp = split_stamp(raw.kind, row)
            if raw.timed and stamp is None:
                # Memory may know that it has expired: ask for it as anybody would.
                found = self.call_when_here(raw, raw.get_encoded, raw.codec.decode(key))
                if found is not None:
                    yield key, native_read(raw.kind, found)
            elif not self._is_expired(raw, stamp):
                yield key, read_value(raw.kind, value)

    def sweep(self) -> int:
        """Removes all expired entries, at home too; how many."""
        self.load_leaves(self.leaves())
        removed = self.store.sweep(1 << 62)
        home = self.ledger
        for raw in self.store.states():
            if home is None or not raw.timed or raw.name not in self.numbers:
                continue
            for leaf in self.leaves():
                removed += self._sweep_home(home, raw, leaf)
        return removed

    def _sweep_home(self, home: Ledger, raw: State, leaf: int) -> int:
        # Memory may have a younger version of such a row, but then it is yet to be written.
        number = self.numbers[raw.name]
        with self._lock:
            expired = [
                row_name(leaf, number, key)
                for key, row in home.load(leaf, number)
                if self._is_expired(raw, split_stamp(raw.kind, row)[1])
            ]
            self._put([part for name in expired for part in (name, None)])
        return len(expired)

    def _is_expired(self, raw: State, stamp: int | None) -> bool:
        return stamp is not None and raw.timed and raw.is_expired(stamp)
