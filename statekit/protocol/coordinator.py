"""Coordinator: who is to own what, checkpoints, and recovery. A pure state machine.

Messages and calls come in, orders go out; there is no clock, socket, thread or randomness in here.
Whether a worker is dead, and when to take a checkpoint, is decided outside: suspect(),
checkpoint().

All that matters is in one stored Record, which is replaced by compare-and-set on its revision:

    asked for  ->  Persist  ->  persisted()  ->  sent

1. Nothing is sent before the record that says so is stored. So a successor knows everything that
   any participant has heard of, and numbers of generations, tables and checkpoints are never used
   twice.
2. One write is under way at a time, and it is repeated until it is answered. The next one expects
   its revision. So a write that was delayed anywhere finds a greater revision, and fails.
3. A coordinator that takes over begins with a write. From then on every write of its predecessor
   fails, which is all that fencing needs: what the predecessor still sends was stored before that
   write, so the successor knows it.
4. A generation restores one checkpoint with one table, both fixed in the record (restored, start).
   A participant that joins late, or hears of it late, is told the same as all others. Leaves that
   later tables give it come by migration.
5. A checkpoint is complete when each leaf is in one part, all parts of one generation. Once a
   new generation is asked for, parts of the old one are refused: it begins from a checkpoint
   that is already fixed.

docs/protocol.md has every transition as a table.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from statekit.errors import ArgumentError
from statekit.protocol.messages import (
    OUTSIDE,
    Completed,
    Fenced,
    Hello,
    Order,
    PartFailed,
    PartWritten,
    Persist,
    Record,
    Recover,
    Recovered,
    Send,
    Settled,
    Table,
    Take,
    instance,
    life_of,
)

_NOTHING = Record(0, 0, "", 0, (), 0, (), (), 0, 0, 1)


class Coordinator:
    """One of possibly several processes; not thread safe. Call take_over() first."""

    def __init__(self, name: str, leaves: int) -> None:
        self.name = name
        self.leaves = leaves
        self.record = _NOTHING  # as it is stored, as far as is known
        self.is_leading = False  # our first write was stored
        self.is_deposed = False  # another coordinator has taken over: this one can do nothing more
        self.taking = 0  # the checkpoint that is under way; 0: none
        self._writing: Record | None = None
        self._next: Record | None = None  # to be written after that
        self._parts: dict[int, str] = {}  # of the checkpoint under way: leaf, worker of its part
        self._seen: dict[str, int] = {}  # worker: the incarnation that lives, as far as is known
        self._suspects: dict[str, None] = {}  # participants that are said to be dead
        self._recovered: dict[str, None] = {}  # members that are in the record's generation
        self._settled: dict[str, int] = {}  # member: the version that it has settled for

    # ---- What is known

    @property
    def wanted(self) -> Record:
        """What the record will be when all that was asked for is stored."""
        return self._next or self._writing or self.record

    @property
    def is_settled(self) -> bool:
        """Every member has what the newest table gives it, and nothing else."""
        return not self.is_stranded and self._has_settled()

    @property
    def is_recovered(self) -> bool:
        """Every member is in the newest generation."""
        if self.is_stranded or self.wanted.generation != self.record.generation:
            return False
        return all(member in self._recovered for member in self.record.members)

    @property
    def is_stranded(self) -> bool:
        """A generation must begin, and nobody is there to be in it."""
        return any(self._is_dead(member) for member in self.wanted.members)

    def workers(self) -> list[str]:
        """Workers that can be given leaves."""
        return [
            worker
            for worker, incarnation in self._seen.items()
            if instance(worker, incarnation) not in self._suspects
        ]

    # ---- Calls

    def take_over(self, stored: Record | None) -> list[Order]:
        """Once, at the start, with the stored record. We lead when our first write is stored."""
        self.record = stored or _NOTHING
        self._seen = {}
        for member in self.record.members:
            worker, incarnation = life_of(member)
            self._seen[worker] = incarnation
        return self._change(term=self.record.term + 1, coordinator=self.name)

    def rescale(self, owners: Sequence[str]) -> list[Order]:
        """Gives each leaf a new owner; `owners` names one worker per leaf.

        This may be called while an earlier rescale runs: leaves move on from where they are. The
        first call begins the first generation, with all leaves empty.
        """
        self._check_leading()
        wanted = self.wanted
        alive = self.workers()
        if len(owners) != self.leaves:
            raise ArgumentError(f"{len(owners)} owners for {self.leaves} leaves. Name one a leaf.")
        for worker in dict.fromkeys(owners):
            if worker not in alive:
                raise ArgumentError(
                    f"{worker!r} cannot be given leaves: it has not said Hello, or is said to be "
                    f"dead. These can: {', '.join(alive) or 'none'}."
                )
        names = tuple(instance(worker, self._seen[worker]) for worker in owners)
        members = tuple(dict.fromkeys((*wanted.members, *names)))
        if not wanted.owners:
            return self._begin_generation(members, names)
        if names == wanted.owners:
            return []
        return self._change(version=wanted.version + 1, owners=names, members=members)

    def checkpoint(self) -> list[Order]:
        """Begins the next checkpoint; [] if one is under way, or there is nothing to take yet."""
        self._check_leading()
        wanted = self.wanted
        if self.taking or self.is_stranded or not wanted.owners:
            return []
        self.taking = wanted.next_number
        self._parts = {}
        return self._change(next_number=self.taking + 1)

    def cancel(self) -> None:
        """Gives up the checkpoint under way, if it is not being recorded as complete already."""
        if self.wanted.complete != self.taking:
            self.taking = 0

    def suspect(self, worker: str) -> list[Order]:
        """The worker is dead, or as good as dead. Begins a new generation if it may own leaves."""
        self._check_leading()
        if worker not in self._seen:
            return []
        name = instance(worker, self._seen[worker])
        if name in self._suspects:
            return []
        self._suspects[name] = None
        return self._replace_dead()

    def persisted(self, revision: int) -> list[Order]:
        """The record with this revision is stored."""
        if self._writing is None or self._writing.revision != revision or self.is_deposed:
            return []
        old, new = self.record, self._writing
        self.record, self._writing = new, None
        orders: list[Order] = []
        if self._next is not None:
            orders.append(self._write(self._next))
        if new.generation != old.generation:
            self._recovered.clear()
            self._settled.clear()
        if not self.is_leading:
            self.is_leading = True
            # Our predecessor may have stored that it is complete, and died before it told anybody.
            if new.complete:
                orders.append(Completed(new.complete))
        elif new.complete != old.complete:
            if self.taking == new.complete:
                self.taking = 0
            orders.append(Completed(new.complete))
        return orders + self._tell(new.members)

    def conflicted(self) -> list[Order]:
        """The record was not stored because another one was: the other's writer has taken over."""
        self.is_leading = False
        self.is_deposed = True
        self._writing = self._next = None
        return []

    def resend(self) -> list[Order]:
        """Repeats everything that was not acknowledged. To be called now and then."""
        if self.is_deposed:
            return []
        orders: list[Order] = []
        if self._writing is not None:
            orders.append(Persist(self.record.revision, self._writing))
        if self.is_leading:
            orders += self._tell(self.record.members)
        return orders

    # ---- Messages

    def on(self, sender: str, message: Any) -> list[Order]:
        """A message has come: at any time, in any order, any number of times."""
        if isinstance(message, Fenced):
            # Somebody is in a generation that we have not stored: another coordinator has done so.
            return self.conflicted() if message.generation > self.record.generation else []
        if not self.is_leading:
            return []  # the sender will say it again
        handler: Callable[..., list[Order]] = _HANDLERS[type(message)]
        return handler(self, message)

    def _on_hello(self, hello: Hello) -> list[Order]:
        worker, incarnation = hello.worker, hello.incarnation
        if incarnation < self._seen.get(worker, 0):
            return []  # a message from an earlier life of this worker
        self._seen[worker] = incarnation
        name = instance(worker, incarnation)
        self._suspects.pop(name, None)
        if hello.generation > self.record.generation:
            return self.conflicted()
        orders = self._replace_dead()
        if hello.generation < self.record.generation:
            if name in self.record.members:
                self._recovered.pop(name, None)
                orders += self._tell((name,))
            elif hello.generation != OUTSIDE:
                orders.append(Send(name, Fenced(self.record.generation)))
        return orders

    def _on_recovered(self, recovered: Recovered) -> list[Order]:
        name = recovered.worker
        record = self.record
        if recovered.generation != record.generation or name not in record.members:
            return []
        if name in self._recovered:
            return []
        self._recovered[name] = None
        return self._tell((name,))

    def _on_settled(self, settled: Settled) -> list[Order]:
        if settled.generation == self.record.generation:
            known = self._settled.get(settled.worker, 0)
            self._settled[settled.worker] = max(known, settled.version)
        return []

    def _on_part(self, part: PartWritten) -> list[Order]:
        if part.number != self.taking or part.generation != self.wanted.generation:
            return []
        for leaf in part.leaves:
            is_twice = self._parts.setdefault(leaf, part.worker) != part.worker
            if is_twice or not 0 <= leaf < self.leaves:
                self.cancel()  # two workers claim one leaf: nobody can say which of them is right
                return []
        if len(self._parts) < self.leaves or self.wanted.complete == part.number:
            return []
        return self._change(complete=part.number)

    def _on_part_failed(self, failed: PartFailed) -> list[Order]:
        if failed.number == self.taking and failed.generation == self.wanted.generation:
            self.cancel()
        return []

    # ---- Steps that several calls and messages share

    def _replace_dead(self) -> list[Order]:
        """Replaces members that are dead or have begun another life: what they had is restored."""
        wanted = self.wanted
        dead = [member for member in wanted.members if self._is_dead(member)]
        if not dead:
            return []
        if self._has_settled() and not any(member in wanted.owners for member in dead):
            # The dead have no leaves, none is on its way to or from them, and they will get none.
            # But we may still wait for their parts of the checkpoint under way.
            self.cancel()
            return self._change(members=tuple(m for m in wanted.members if m not in dead))
        alive = [instance(worker, self._seen[worker]) for worker in self.workers()]
        members = [member for member in wanted.members if member not in dead]
        heirs: dict[str, str] = {}
        for member in dead:
            worker, _ = life_of(member)
            heir = instance(worker, self._seen[worker])
            if heir in alive:
                heirs[member] = heir
                members.append(heir)
        members = members or alive
        if not members:
            return []  # until somebody says Hello
        owners = list(wanted.owners)
        for member in dead:
            theirs = [leaf for leaf, owner in enumerate(owners) if owner == member]
            for index, leaf in enumerate(theirs):
                spread = members[index * len(members) // len(theirs)]
                owners[leaf] = heirs.get(member, spread)
        return self._begin_generation(members, owners)

    def _has_settled(self) -> bool:
        version = self.record.version
        return self.wanted is self.record and all(
            self._settled.get(member) == version for member in self.record.members
        )

    def _is_dead(self, member: str) -> bool:
        worker, incarnation = life_of(member)
        return member in self._suspects or self._seen.get(worker, incarnation) > incarnation

    def _begin_generation(self, members: Iterable[str], owners: Iterable[str]) -> list[Order]:
        wanted = self.wanted
        self.cancel()
        owners = tuple(owners)
        return self._change(
            generation=wanted.generation + 1,
            members=tuple(members),
            version=1,
            owners=owners,
            start=owners,
            restored=wanted.complete,
        )

    def _change(self, **fields: Any) -> list[Order]:
        new = self.wanted._replace(**fields)
        if self._writing is not None:
            self._next = new
            return []
        return [self._write(new)]

    def _write(self, record: Record) -> Persist:
        expected = self.record.revision
        self._next = None
        self._writing = record._replace(revision=expected + 1)
        return Persist(expected, self._writing)

    def _tell(self, members: Iterable[str]) -> list[Order]:
        """Sends these members what the record says and they have not acknowledged."""
        record = self.record
        if not record.owners:
            return []
        is_taking = (
            self.taking and self.taking < record.next_number and self.taking != record.complete
        )
        orders: list[Order] = []
        for member in members:
            if member not in self._recovered:
                recover = Recover(record.generation, 1, record.start, record.restored)
                orders.append(Send(member, recover))
                continue
            if self._settled.get(member) != record.version:
                table = Table(record.generation, record.version, record.owners)
                orders.append(Send(member, table))
            if is_taking:
                orders.append(Send(member, Take(record.generation, self.taking)))
        return orders

    def _check_leading(self) -> None:
        if not self.is_leading:
            state = "was deposed" if self.is_deposed else "has not taken over yet"
            raise ArgumentError(f"coordinator {self.name!r} {state}. Ask the one that leads.")


_HANDLERS: dict[type, Callable[..., list[Order]]] = {
    Hello: Coordinator._on_hello,
    Recovered: Coordinator._on_recovered,
    Settled: Coordinator._on_settled,
    PartWritten: Coordinator._on_part,
    PartFailed: Coordinator._on_part_failed,
}
