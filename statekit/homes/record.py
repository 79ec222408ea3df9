"""What a provider keeps about itself at home, and the home that several providers share."""

import json
import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import uuid4

from statekit.assignment import common, group_ranges, leaf_ranges, subtract
from statekit.errors import ArgumentError, SchemaError
from statekit.homes import Home
from statekit.homes.ledger import Ledger
from statekit.protocol.messages import Leases, cut_leases, renew_leases
from statekit.schema import StateSchema

#: 2: homes have pending rows and records of commits (homes/ledger.py), which version 1 would
#: not see. A home of version 1 is one that was never committed.
#: 3: a source has leaves that are not at home yet. Version 2 would take them for empty. It is
#: written only while there is such a source.
#: 4: another process has leaves that are not at home yet. The same, while there is such a process.
META_VERSION, META_VERSION_MIN, _META_VERSION_PLAIN = 4, 1, 2
_META_VERSION_SOURCES = 3

_KEY_GROUPS, _SUBGROUPS = 128, 16  # unless told
_ARRIVALS_KEPT = 64  # of which only the source does not know that they are over


class HomeSource(NamedTuple):
    """Checkpoints that a home is still being filled from: see residence/moving_in.py."""

    key_groups: tuple[range, ...]  # of which leaves may be coming
    checkpoints: tuple[tuple[str, int, str], ...]  # place, number, digest of the manifest
    background: bool  # whether leaves come also if nobody touches them

    def told(self) -> dict[str, Any]:
        return {
            "key_groups": [(part.start, part.stop) for part in self.key_groups],
            "checkpoints": self.checkpoints,
            "background": self.background,
        }

    @classmethod
    def heard(cls, told: dict[str, Any]) -> "HomeSource":
        checkpoints = [(str(url), int(at), str(digest)) for url, at, digest in told["checkpoints"]]
        groups = tuple(range(*pair) for pair in told["key_groups"])
        return cls(groups, tuple(checkpoints), bool(told["background"]))


class HomeArrival(NamedTuple):
    """A hand-over in which key-groups come into a home: what must be known to go on with it.

    Its leaves move in one by one (homes/ledger.py says which have). The process that hands them
    over keeps each until it was told that the leaf is at home.
    """

    key_groups: tuple[range, ...]  # that are not owned here, unless all their leaves are at home
    migration: str
    target: str  # the participant that asked for them: of an earlier life of this provider
    source: str  # the participant that hands them over: of one life of a process
    address: str  # where that was reached
    leases: Leases = ()  # at which they were offered; (): whether it has begun is not known
    #: Key-groups that are owned here since: only their source may not know it.
    held: tuple[range, ...] = ()
    #: Leases that were given back, before anything of their key-groups had come: nothing ever comes
    #: at these epochs, and the source may not know it.
    returned: Leases = ()
    base: str = ""  # the digest of the checkpoint that changes are to; "" if all of it comes
    base_shown: str = ""

    @property
    def every(self) -> tuple[range, ...]:
        return group_ranges((*self.held, *subtract(self.key_groups, self.held)))

    def told(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "key_groups": [(part.start, part.stop) for part in self.key_groups],
            "held": [(part.start, part.stop) for part in self.held],
            "leases": [(run.start, run.stop, epoch) for run, epoch in self.leases],
            "returned": [(run.start, run.stop, epoch) for run, epoch in self.returned],
        }

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to be remembered."""
        return not (self.key_groups or self.held or self.returned)

    @classmethod
    def heard(cls, told: dict[str, Any]) -> "HomeArrival":
        return cls(
            key_groups=tuple(range(*pair) for pair in told["key_groups"]),
            migration=str(told["migration"]),
            target=str(told["target"]),
            source=str(told["source"]),
            address=str(told["address"]),
            held=tuple(range(*pair) for pair in told["held"]),
            leases=[(range(*pair), int(epoch)) for *pair, epoch in told["leases"]],
            returned=[(range(*pair), int(epoch)) for *pair, epoch in told["returned"]],
            base=str(told["base"]),
            base_shown=str(told["base_shown"]),
        )


class HomeRecord:
    """What a provider keeps about itself at home: geometry and schemas, as JSON."""

    def __init__(
        self, key_groups: int | None, subgroups: int | None, schemas: list[StateSchema]
    ) -> None:
        self.key_groups = key_groups
        self.subgroups = subgroups
        self.schemas = schemas  # a state's number at home is its place in this list
        self.id = ""  # of the home, drawn when it is made: tells whether two are one
        self.is_current = False  # what is stored has our version, and our geometry
        #: Key-groups that are being restored into the home. If one is still here when the home is
        #: opened, a restore was interrupted: its rows are there only in part.
        self.restoring: tuple[range, ...] = ()
        #: Key-groups that were handed over to another process: a provider that is opened has them
        #: no more. Written before the new owner may use them.
        self.given: tuple[range, ...] = ()
        #: Of these: what the home had was deleted, or overwritten, at least a part of it.
        self.deleted: tuple[range, ...] = ()
        #: Of leaves that were ever handed over: others may remember these epochs.
        self.leases: Leases = ()
        #: Where leaves come from that are not at home yet.
        self.sources: tuple[HomeSource, ...] = ()
        #: Hand-overs that bring leaves into the home, and are not over.
        self.arrivals: tuple[HomeArrival, ...] = ()

    @classmethod
    def read(cls, home: Home | None, url: str = "") -> "HomeRecord":
        data = None if home is None else home.read_meta()
        return cls(None, None, []) if data is None else cls.decode(data, url)

    @classmethod
    def decode(cls, data: bytes, url: str) -> "HomeRecord":
        try:
            found = json.loads(data)
            if not META_VERSION_MIN <= found["statekit"] <= META_VERSION:
                raise SchemaError(
                    f"{url!r} was written by a statekit whose homes have version "
                    f"{found['statekit']}; this one reads versions {META_VERSION_MIN} to "
                    f"{META_VERSION}. Update statekit."
                )
            schemas = [StateSchema(**schema) for schema in found["states"]]
            record = cls(found["key_groups"], found["subgroups"], schemas)
            record.restoring = tuple(range(*pair) for pair in found.get("restoring", ()))
            record.id = found.get("id", "")
            record.is_current = found["statekit"] >= _META_VERSION_PLAIN and bool(record.id)
            record.given = tuple(range(*pair) for pair in found.get("given", ()))
            record.deleted = tuple(range(*pair) for pair in found.get("deleted", ()))
            record.leases = [(range(*pair), epoch) for *pair, epoch in found.get("leases", ())]
            record.sources = tuple(map(HomeSource.heard, found.get("sources", ())))
            record.arrivals = tuple(map(HomeArrival.heard, found.get("arrivals", ())))
            return record
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, SchemaError):
                raise
            raise SchemaError(
                f"{url!r} holds a description of its states that cannot be read ({error!r}). "
                "Is it a home of statekit?"
            ) from None

    def encode(self) -> bytes:
        version = _META_VERSION_SOURCES if self.sources else _META_VERSION_PLAIN
        described: dict[str, object] = {
            "statekit": META_VERSION if self.arriving else version,
            "id": self.id,
            "key_groups": self.key_groups,
            "subgroups": self.subgroups,
            "states": [schema._asdict() for schema in self.schemas],
        }
        for name in ("restoring", "given", "deleted"):
            if parts := getattr(self, name):
                described[name] = [(part.start, part.stop) for part in parts]
        if self.leases:
            described["leases"] = [(run.start, run.stop, epoch) for run, epoch in self.leases]
        if self.sources:
            described["sources"] = [source.told() for source in self.sources]
        if self.arrivals:
            described["arrivals"] = [arrival.told() for arrival in self.arrivals]
        return json.dumps(described).encode()

    def refresh(self, stored: "HomeRecord") -> None:
        """Takes on what other providers may have changed in the home's record."""
        self.id = stored.id or self.id
        self.schemas, self.restoring = stored.schemas, stored.restoring
        self.given, self.deleted, self.leases = stored.given, stored.deleted, stored.leases
        self.sources, self.arrivals = stored.sources, stored.arrivals

    def give(self, groups: tuple[range, ...], leases: Leases) -> None:
        """Key-groups are another process's, at these epochs."""
        self.end_arrivals(groups)
        self.given = group_ranges((*subtract(self.given, groups), *groups))
        self.leases = renew_leases(self.leases, [one for one in leases if one[1]])

    def take(self, groups: tuple[range, ...], leases: Leases = ()) -> None:
        """Key-groups are owned here (again)."""
        self.end_arrivals(groups)
        self.given, self.deleted = subtract(self.given, groups), subtract(self.deleted, groups)
        self.leases = renew_leases(self.leases, [one for one in leases if one[1]])

    def delete(self, groups: tuple[range, ...]) -> None:
        """Of key-groups that are another process's, rows are deleted from now on."""
        gone = subtract(groups, subtract(groups, self.given))
        self.deleted = group_ranges((*subtract(self.deleted, gone), *gone))

    @property
    def filling(self) -> tuple[range, ...]:
        """Key-groups of which leaves may still be at a source."""
        return group_ranges([part for one in self.sources for part in one.key_groups])

    def end_sources(self, groups: tuple[range, ...]) -> None:
        """All leaves of key-groups are at home, or what is at their sources is not wanted."""
        left = (one._replace(key_groups=subtract(one.key_groups, groups)) for one in self.sources)
        self.sources = tuple(one for one in left if one.key_groups)

    @property
    def arriving(self) -> tuple[range, ...]:
        """Key-groups that come from other processes: not owned, unless all their leaves are here.

        They may be among those that are `given`: then they went earlier, and are coming back.
        """
        return group_ranges([part for one in self.arrivals for part in one.key_groups])

    def arrive(self, arrival: HomeArrival) -> None:
        """Key-groups are to come in this hand-over, whatever was begun to bring them before."""
        others = [one for one in self.arrivals if one.migration != arrival.migration]
        for old in [one for one in others if not one.key_groups][:-_ARRIVALS_KEPT]:
            others.remove(old)  # its source will hardly be there any more
        self.arrivals = tuple(others)
        self.end_arrivals(arrival.key_groups)
        self.end_sources(arrival.key_groups)
        self.arrivals += (arrival,)

    def hold(self, groups: tuple[range, ...]) -> None:
        """All leaves of key-groups are at home, and they are owned here from now on."""
        found = []
        for one in self.arrivals:
            mine = common(one.key_groups, groups)
            held = group_ranges((*mine, *subtract(one.held, mine)))
            found.append(one._replace(key_groups=subtract(one.key_groups, mine), held=held))
            leases = [lease for lease in one.leases if lease[1]]
            if mine:
                self.given, self.deleted = subtract(self.given, mine), subtract(self.deleted, mine)
                cut = cut_leases(leases, leaf_ranges(mine, self.subgroups or 1))
                self.leases = renew_leases(self.leases, cut)
        self.arrivals = tuple(found)

    def lose(self, groups: tuple[range, ...]) -> None:
        """Key-groups will never be complete: what is at home of them is of no use."""
        if groups:
            self.give(groups, ())
            self.delete(groups)

    def end_arrivals(self, groups: tuple[range, ...]) -> None:
        """Key-groups do not come any more, in whatever way that ended."""
        left = (one._replace(key_groups=subtract(one.key_groups, groups)) for one in self.arrivals)
        self.arrivals = tuple(one for one in left if not one.is_over)

    def return_leases(self, migration: str, groups: tuple[range, ...], leases: Leases) -> None:
        """Key-groups of which nothing has come are about to be given back."""
        for one in self.arrivals:
            if one.migration == migration:
                returned = renew_leases(one.returned, leases)
                left = one._replace(key_groups=subtract(one.key_groups, groups), returned=returned)
                self.arrivals = tuple(left if two is one else two for two in self.arrivals)
        self.give(groups, ())  # nobody is to take them for empty here

    def leases_returned(self, migration: str) -> None:
        """The source knows it."""
        found = (
            one._replace(returned=()) if one.migration == migration else one
            for one in self.arrivals
        )
        self.arrivals = tuple(one for one in found if not one.is_over)

    def finish_arrival(self, migration: str, whole: tuple[range, ...]) -> None:
        """A hand-over is over, and its source knows it. These have come; the rest never will."""
        for one in self.arrivals:
            if one.migration == migration:
                done = common(one.key_groups, whole)
                lost = subtract(one.key_groups, done)
                self.take(done, cut_leases([*one.leases], leaf_ranges(done, self.subgroups or 1)))
                self.lose(lost)
        self.forget_arrival(migration)

    def forget_arrival(self, migration: str) -> None:
        """Nothing came of a hand-over, or its source knows that all has come."""
        self.arrivals = tuple(one for one in self.arrivals if one.migration != migration)

    def find(self, name: str) -> StateSchema | None:
        return next((schema for schema in self.schemas if schema.name == name), None)


class HomeShare:
    """A home, and how many providers use it: the last one closes it."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.ledger = ledger
        self.participants: set[str] = set()  # names, of providers that are open
        self._users = 1
        self._lock = threading.Lock()

    def share(self) -> "HomeShare":
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self.ledger is None:
                return
        self.ledger.home.close()


def change_record(
    home: Home, url: str, record: HomeRecord, change: Callable[[HomeRecord], None]
) -> bool:
    """Changes the home's record, which others may be changing too; whether there was none."""
    while True:
        expected = home.read_meta()
        if expected is not None:
            stored = HomeRecord.decode(expected, url)
            theirs = (stored.key_groups, stored.subgroups)
            if theirs != (record.key_groups, record.subgroups):  # it was new a moment ago
                raise ArgumentError(
                    f"{url!r} was just made by another process with {theirs[0]} key-groups x "
                    f"{theirs[1]} sub-groups; asked for was {record.key_groups} x "
                    f"{record.subgroups}. Open it with the same numbers everywhere."
                )
            record.refresh(stored)
        record.id = record.id or uuid4().hex
        change(record)
        if home.write_meta(record.encode(), expected):
            record.is_current = True
            return expected is None


def update_record(home: Home, url: str, change: Callable[[HomeRecord], None]) -> None:
    """change_record() for a thread that may not touch the provider's own copy of the record."""
    while True:
        expected = home.read_meta()
        assert expected is not None, "a home without a record"
        stored = HomeRecord.decode(expected, url)
        change(stored)
        if home.write_meta(stored.encode(), expected):
            return


def fix_geometry(
    record: HomeRecord, url: str, key_groups: int | None, subgroups: int | None
) -> tuple[int, int]:
    """Key-groups and sub-groups of a home: those it has, those asked for, or the usual ones."""
    geometry = []
    for name, asked, stored, default in (
        ("key_groups", key_groups, record.key_groups, _KEY_GROUPS),
        ("subgroups", subgroups, record.subgroups, _SUBGROUPS),
    ):
        if asked is not None and stored is not None and asked != stored:
            raise ArgumentError(
                f"{url!r} was made with {name}={stored}; asked for was {name}={asked}. "
                "Leave it out, or copy the state into a new home."
            )
        known = default if stored is None else stored
        geometry.append(known if asked is None else asked)
    record.key_groups, record.subgroups = geometry
    return geometry[0], geometry[1]
