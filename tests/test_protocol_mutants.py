"""The simulator finds bugs: it finds each of these, put into the protocol on purpose, within a few
seeds.

A mutant is the module with one piece of its text replaced. If a mutant survives, the simulator is
too weak, or the line is not needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from simulator import run_of

from statekit.protocol import (
    coordinator,
    handover,
    machine,
    new_owner,
    old_owner,
    participant,
)

SEEDS_MAX = 5000


class Mutant(NamedTuple):
    module: Any
    old: str
    new: str
    first: int = 0  # the first seed: for a bug that needs a rare order of events, one that finds it


MUTANTS = {
    # ---- Leases
    "content of any epoch is let in": Mutant(
        new_owner,
        "if known is None or known.epoch != here.epoch or known.state is OFFERED:",
        "if known is None or known.state is OFFERED:",
    ),
    "an old offer is taken for a new one": Mutant(
        new_owner, "if known is not None and epoch <= known.epoch:", "if False:"
    ),
    "old generations are listened to": Mutant(
        participant, "if message.generation < self.generation:", "if False:"
    ),
    "what was sent is reopened": Mutant(
        old_owner, "known.migration == migration and not known.is_sent", "True"
    ),
    "a fetched leaf does not count as sent": Mutant(
        old_owner,
        "        self._mark_sent(leaf, known)\n        if not fetch.keys:",
        "        if not fetch.keys:",
    ),
    "a streamed leaf does not count as sent": Mutant(
        old_owner,
        "        self._mark_sent(leaf, known)\n        outgoing.streamed.add(leaf)",
        "        outgoing.streamed.add(leaf)",
    ),
    "leaves are offered without being shut": Mutant(
        old_owner,
        "return [Shut(leaves), self._offer(migration)]",
        "return [self._offer(migration)]",
    ),
    "an epoch is used again": Mutant(
        old_owner, "state=RETURNED, epoch=known.epoch + 1,", "state=RETURNED, epoch=known.epoch,"
    ),
    "what was given back is let in": Mutant(
        new_owner,
        "        if known.state is NONE:\n            return [self._to(sender, GiveBack,",
        "        if known.state is NONE and not here.is_whole:\n"
        "            return [self._to(sender, GiveBack,",
    ),
    "a part of a leaf is taken for all of it": Mutant(
        new_owner,
        "        if here.is_whole:\n            new = new",
        "        if True:\n            new = new",
    ),
    "a leaf travels on before its source has let go": Mutant(
        participant,
        "if known.state is OWNED and known.is_closed and known.version <= self.version:",
        "if known.state is OWNED and known.version <= self.version:\n"
        "                self._leaves.put((leaf,), known._replace(is_closed=True))",
    ),
    "a leaf goes to and fro between two tables": Mutant(
        participant, " and known.version <= self.version:", ":"
    ),
    "a late Installed frees another lease": Mutant(
        old_owner,
        "if epoch != known.epoch or known.peer != sender:\n                # Only",
        "if known.peer != sender:\n                # Only",
    ),
    "a late Released closes another lease": Mutant(
        new_owner, " or known.epoch != released.epoch", ""
    ),
    "a late GiveBack takes back another lease": Mutant(
        old_owner, "            and known.epoch == epoch\n", ""
    ),
    # ---- Checkpoints
    "an offer does not tell what checkpoints have the leaf": Mutant(
        old_owner, "Grant(run, known.epoch, known.covered)", "Grant(run, known.epoch, 0)"
    ),
    "a leaf that comes late is not added to the part": Mutant(
        machine, "[AddToPart(n, tuple(leaves)) for n in self._parts if n > known.covered]", "[]"
    ),
    "a leaf that was taken back is not added to the part": Mutant(
        old_owner, "actions += self._add_to_parts(some, known)", "pass"
    ),
    "a checkpoint has offered leaves, too": Mutant(
        participant,
        "if (known.state is OWNED or known.state is PARTIAL) and known.covered < number:",
        "if known.state not in (NONE, EXPECTED) and known.covered < number:",
    ),
    "partial leaves are frozen as if they were whole": Mutant(
        participant,
        "if known.state is PARTIAL:\n                    unfinished",
        "if False:\n                    unfinished",
    ),
    "what is here when a checkpoint is over may go into it elsewhere": Mutant(
        participant, "            if known.covered < number:\n", "            if False:\n"
    ),
    "what comes when a checkpoint is over may go into it elsewhere": Mutant(
        new_owner, "covered = max(covered, self.ended)", "pass"
    ),
    # ---- Beginning
    "a Begin is asked once": Mutant(
        participant, "[self._begin(migration) for migration in self._asks]", "[]"
    ),
    "a late Begin begins": Mutant(old_owner, "if at >= number and", "if at > number + 99 and"),
    "what is not wanted any more is taken": Mutant(
        new_owner, "is_wanted = migration not in self._unwanted", "is_wanted = True"
    ),
    "what is not wanted any more is forgotten": Mutant(
        new_owner,
        "self._unwanted[migration] = None\n        if",
        "del self._asks[migration]\n        return []\n        if",
    ),
    # ---- Reporting
    "that a leaf is here is said once": Mutant(
        new_owner, "for leaf in islice(incoming.installed, most)", "for leaf in ()"
    ),
    "what is here counts as reported at once": Mutant(
        handover, "        self.installed[leaf] = None\n", ""
    ),
    "an answer about one leaf counts for all": Mutant(
        new_owner,
        "            incoming.drop(leaf)\n            self._forget_if_over",
        "            incoming.installed.clear()\n            self._forget_if_over",
    ),
    # ---- Giving back
    "what was given back is said once": Mutant(
        new_owner, "if incoming is None or not incoming.returned:", "if True:"
    ),
    "what was given back counts as heard": Mutant(
        handover, "        self.returned[leaf] = epoch\n", ""
    ),
    "half of a key-group is given back": Mutant(
        new_owner,
        "incoming.missing, lambda known: known is not None and known.state is EXPECTED",
        "[m for m in incoming.missing if self.state_of(m) is EXPECTED], lambda known: True",
    ),
    "half of a key-group is taken back": Mutant(
        old_owner,
        "self._whole_groups(outgoing.leaves, is_unsent)",
        "[leaf for leaf in sorted(outgoing.leaves) if is_unsent(self._leaves[leaf])]",
    ),
    "leaves that are back are opened before that is recorded": Mutant(
        old_owner,
        "return [*actions, TakeBack(tuple(openable))] if openable else actions",
        "return [*actions, Reopen(tuple(openable))] if openable else actions",
    ),
    "leaves that could not be opened are forgotten": Mutant(
        participant, "if back := self.waiting_back():", "if back := []:"
    ),
    # ---- Asking again
    "who waits for a leaf is never told that no answer came": Mutant(
        new_owner, "            incoming.asked.discard(leaf)\n\n    def _fetch", "\n    def _fetch"
    ),
    "the rest of a leaf is not asked for": Mutant(
        new_owner, "            for leaf in incoming.partial\n", "            for leaf in ()\n"
    ),
    "a stream that broke off is not opened again": Mutant(
        new_owner, "return self.open_stream(migration) if is_tried_again else []", "return []"
    ),
    "a new stream does not send again what was lost": Mutant(
        old_owner, "                outgoing.streamed.clear()\n", ""
    ),
    # ---- Credit
    "the stream takes no heed of credit": Mutant(
        old_owner, "and outgoing.sent < outgoing.credit", ""
    ),
    "what the stream sends is not counted": Mutant(
        old_owner, "            outgoing.sent += size", "            pass"
    ),
    "credit of an earlier stream counts": Mutant(
        old_owner,
        "outgoing.stream, outgoing.sent, outgoing.credit = accept.stream, 0, 0",
        "outgoing.stream, outgoing.sent = accept.stream, 0",
        first=7000,
    ),
    "credit is given once": Mutant(
        new_owner,
        "return [self._to(incoming.source, Credit, migration, stream, incoming.granted)]",
        "incoming.granted = self.window\n        return []",
    ),
    # ---- Fencing
    "a message of a later generation is not believed": Mutant(
        participant, "return self._fence(message.generation)", "return []"
    ),
    "who is fenced goes on with what it had": Mutant(
        participant, "        self._leaves.clear()\n        self._outgoing.clear()\n", ""
    ),
    "who is fenced answers": Mutant(
        participant, " or (self.is_fenced and kind is not Recover)", ""
    ),
    # ---- The coordinator
    "what is not stored is sent": Mutant(
        coordinator,
        "        return Persist(expected, self._writing)",
        "        self.record = self._writing\n        return Persist(expected, self._writing)",
    ),
    "a checkpoint is complete without one leaf": Mutant(
        coordinator, "len(self._parts) < self.leaves", "len(self._parts) < self.leaves - 1"
    ),
    "leaves of another life are restored again": Mutant(
        coordinator, "restored=wanted.complete,", "restored=wanted.restored,"
    ),
    "parts of an old generation count": Mutant(
        coordinator,
        "        self.cancel()\n        owners = tuple(owners)",
        "        owners = tuple(owners)",
    ),
    "latecomers restore by the newest table": Mutant(
        coordinator,
        "Recover(record.generation, 1, record.start, record.restored)",
        "Recover(record.generation, record.version, record.owners, record.restored)",
    ),
    "a coordinator ignores that it was deposed": Mutant(
        coordinator,
        "        self.is_leading = False\n        self.is_deposed = True\n"
        "        self._writing = self._next = None\n        return []",
        "        return self.persisted(self._writing.revision) if self._writing else []",
    ),
    "a worker that has leaves is dropped as if it had none": Mutant(
        coordinator, " and not any(member in wanted.owners for member in dead)", ""
    ),
    "sources are not told of a complete checkpoint": Mutant(
        coordinator,
        "            if self.taking == new.complete:\n                self.taking = 0\n"
        "            orders.append(Completed(new.complete))",
        "            if self.taking == new.complete:\n                self.taking = 0",
    ),
    "who was left out goes on working": Mutant(
        coordinator, "orders.append(Send(name, Fenced(self.record.generation)))", "pass"
    ),
    "a worker that has begun another life is taken for the old one": Mutant(
        coordinator, " or self._seen.get(worker, incarnation) > incarnation", ""
    ),
    "a number of a checkpoint is used again": Mutant(
        coordinator,
        "return self._change(next_number=self.taking + 1)",
        "return self._tell(wanted.members)",
    ),
}


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Meanwhile, the classes of the module have the methods of the mutated text."""
    module = mutant.module
    with open(module.__file__) as file:
        source = file.read()
    assert source.count(mutant.old) == 1, "say what is to be replaced: the code has changed"
    scope: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(mutant.old, mutant.new), module.__file__, "exec"), scope)
    kept: list[tuple[type, str, Any]] = []
    try:
        for name, made in scope.items():
            real = getattr(module, name, None)
            if not isinstance(made, type) or made.__module__ != module.__name__ or real is made:
                continue
            for method, function in vars(made).items():
                if callable(function) and hasattr(function, "__code__"):
                    if "__class__" in function.__code__.co_freevars:
                        continue  # calls super(): bound to the other class, and not mutated
                    kept.append((real, method, vars(real)[method]))
                    setattr(real, method, function)
        yield
    finally:
        for real, method, function in kept:
            setattr(real, method, function)


def seeds_until_caught(name: str) -> tuple[int, str]:
    """How many runs it takes to find the mutant (0: it survives), and what is wrong then."""
    first = MUTANTS[name].first
    with mutated(MUTANTS[name]):
        for seed in range(first, first + SEEDS_MAX):
            try:
                run_of(seed).play()
            except Exception as error:
                return seed + 1 - first, f"{type(error).__name__}: {error}"
    return 0, ""


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    runs, _ = seeds_until_caught(name)
    assert runs, f"{name!r} survives {SEEDS_MAX} seeds"
