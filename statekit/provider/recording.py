"""Recording: what the home's record says of who owns what. Siblings share it, and so may processes.

Key-groups that change hands between processes are written down there before anybody may act on it:

    that go    "given" before the new owner may use them, "deleted" before the first row is deleted
               (migration/old_owner.py)
    that come  the hand-over is named before it is asked for, and with its leases before a leaf can
               move in. A key-group is owned at home when all its leaves are, and the name goes when
               the old owner knows that. Before the old owner is told that it may go on with a
               key-group of which nothing has come, that is written down too; or a provider that is
               opened after a crash would take it in once more (migration/new_owner.py)
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from statekit.assignment import common, group_ranges, leaf_ranges, show_groups, subtract
from statekit.errors import ArgumentError, HomeError
from statekit.homes.record import HomeArrival, HomeRecord
from statekit.protocol.messages import Leases, runs_of
from statekit.provider.split import Splitting

_log = logging.getLogger("statekit")


class Recording(Splitting):
    """See KVProvider."""

    _recorded: HomeRecord
    url: str
    _lock: Any
    _is_closed: bool
    #: Key-groups that are ours, though the home's record may say that they are another's.
    _unrecorded: tuple[range, ...]

    def _record(self, change: Callable[[HomeRecord], None]) -> None:
        """Changes the home's record, durably. The provider's lock is held."""
        home = self._residence.home
        while home is not None:
            expected = home.read_meta()
            stored = self._recorded.encode() if expected is None else expected
            record = HomeRecord.decode(stored, self.url)
            record.take(self._unrecorded)
            change(record)
            data = record.encode()
            if data == expected or home.write_meta(data, expected):
                self._recorded.refresh(record)
                break
        self._unrecorded = ()

    def _settle_record(self) -> None:
        """What could not be written before must be there when a flush is done."""
        if self._unrecorded:
            self._record(lambda record: None)

    # ---- Key-groups that go

    def _record_given(self, part: tuple[range, ...], leases: Leases) -> None:
        self._record(lambda record: record.give(part, leases))

    def _record_taken(self, part: tuple[range, ...], leases: Leases) -> None:
        self._unrecorded = (*subtract(self._unrecorded, part), *part)
        self._record(lambda record: record.take(part, leases))

    def _record_deleted(self, part: tuple[range, ...]) -> None:
        self._record(lambda record: record.delete(part))

    def _record_overwritten(self, part: tuple[range, ...]) -> None:
        """What the home has of key-groups, if anything, is about to be overwritten by a merge."""

        def change(record: HomeRecord) -> None:
            record.lose(common(part, record.arriving))
            record.delete(part)

        self._record(change)

    # ---- Key-groups that come

    def _check_stranger(self, name: str) -> None:
        ledger = self._residence.ledger
        for other in self._family.members():
            peer = other._peer
            is_one = ledger is not None and other._residence.ledger is ledger
            if is_one and peer is not None and peer.name == name:
                raise ArgumentError(
                    f"that is {other!r} of this process, which has the same home: its rows would "
                    "be written over themselves. Use split() and merge()."
                )

    def _interrupted(self) -> tuple[HomeArrival, ...]:
        owners = self._family.owners
        mine = "" if self._peer is None else self._peer.name
        siblings = self._home.participants - {mine}
        found = []
        for one in self._recorded.arrivals:
            if one.target in siblings:
                continue  # which goes on with it by itself
            here = [group for part in one.key_groups for group in part if group in owners]
            rest = subtract(one.key_groups, tuple(range(group, group + 1) for group in here))
            found.append(one._replace(key_groups=rest))
        return tuple(found)

    def _record_asked(self, arrival: HomeArrival) -> None:
        ledger = self._residence.ledger
        if ledger is not None:
            # First: of an earlier hand-over, they would seem to be of this one.
            ledger.forget_moved_in(leaf_ranges(arrival.key_groups, self.subgroups))
            self._record(lambda record: record.arrive(arrival))

    def _record_arriving(self, arrival: HomeArrival) -> None:
        def change(record: HomeRecord) -> None:
            record.delete(arrival.key_groups)  # what was given away before is overwritten
            record.arrive(arrival)

        ledger = self._residence.ledger
        if ledger is not None:
            ledger.begin_expecting(arrival.key_groups)
            self._record(change)  # after it: who goes on with this finds all of it

    def _record_returned(self, migration: str, leases: Iterable[tuple[int, int]]) -> None:
        if not self._recorded.arrivals:
            return
        by_epoch: dict[int, list[int]] = {}
        for leaf, epoch in sorted(leases):
            by_epoch.setdefault(epoch, []).append(leaf)
        runs = [(run, epoch) for epoch, some in by_epoch.items() for run in runs_of(some)]
        runs.sort(key=lambda lease: lease[0].start)
        groups = group_ranges(
            {leaf // self.subgroups for some in by_epoch.values() for leaf in some}
        )
        with self._lock:
            if any(one.migration == migration for one in self._recorded.arrivals):
                self._record(lambda record: record.return_leases(migration, groups, runs))

    def _record_told(self, migration: str) -> None:
        if not self._recorded.arrivals:
            return
        with self._lock:
            if any(one.migration == migration for one in self._recorded.arrivals):
                self._note(lambda: self._record(lambda record: record.leases_returned(migration)))

    def _record_ended(self, part: tuple[range, ...]) -> None:
        if common(part, self._recorded.arriving):
            self._note(lambda: self._record(lambda record: record.give(part, ())))

    def _record_lost(self, part: tuple[range, ...]) -> None:
        if self._residence.ledger is None:
            return
        with self._lock:
            self._note(lambda: self._record(lambda record: record.lose(part)))

    def _record_over(self, migration: str) -> None:
        ledger = self._residence.ledger
        if ledger is None:
            return
        with self._lock:
            if self._is_closed:
                return
            try:
                entry = next(
                    (one for one in self._recorded.arrivals if one.migration == migration), None
                )
                if entry is None:
                    return
                whole = whole_groups(entry.key_groups, ledger.moved_in(), self.subgroups)
                self._record(lambda record: record.finish_arrival(migration, whole))
                ledger.forget_moved_in(leaf_ranges(whole, self.subgroups))
            except HomeError as error:
                # All of it is there. Whoever opens the home next tells the source once more.
                _log.warning("the home does not say yet that a hand-over is done: %s", error)

    def _forget_recorded(self, migration: str) -> None:
        if not self._recorded.arrivals:
            return
        with self._lock:
            if any(one.migration == migration for one in self._recorded.arrivals):
                self._note(lambda: self._record(lambda record: record.forget_arrival(migration)))


def whole_groups(groups: tuple[range, ...], here: "set[int]", subgroups: int) -> tuple[range, ...]:
    """Those of these key-groups of which all leaves have moved in."""
    torn = [
        range(group, group + 1)
        for part in groups
        for group in part
        if not here.issuperset(range(group * subgroups, (group + 1) * subgroups))
    ]
    return subtract(groups, tuple(torn))


def show_arrivals(arrivals: tuple[HomeArrival, ...]) -> str:
    """What comes from where, in words."""
    return "; ".join(f"{show_groups(one.key_groups)} from {one.address}" for one in arrivals)
