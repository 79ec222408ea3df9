"""The simulator finds bugs: each of these, put into the protocol on purpose, within a few seeds.

A mutant is the module with one piece of its text replaced. One that survives says that the
simulator is too weak, or that the line is not needed.
"""

from typing import Any, NamedTuple

import pytest
from simulator import run_of

from statekit.protocol import coordinator, participant

SEEDS_MAX = 5000


class Mutant(NamedTuple):
    module: Any
    old: str
    new: str
    first: int = 0  # seed: a bug that takes a rare order of events is looked for where it shows


MUTANTS = {
    "content of any epoch is let in": Mutant(
        participant,
        "if known is None or known.epoch != here.epoch or known.state is OFFERED:",
        "if known is None or known.state is OFFERED:",
    ),
    "an old offer is taken for a new one": Mutant(
        participant, "if known is not None and epoch <= known.epoch:", "if False:"
    ),
    "old generations are listened to": Mutant(
        participant, "if message.generation < self.generation:", "if False:"
    ),
    "what was sent is reopened": Mutant(
        participant, "if not self._leaves[leaf].is_sent]", "if self._leaves[leaf]]"
    ),
    "a fetched leaf does not count as sent": Mutant(
        participant,
        "        self._mark_sent(leaf, known)\n        if not fetch.keys:",
        "        if not fetch.keys:",
    ),
    "leaves are offered without being shut": Mutant(
        participant,
        "return [Shut(leaves), self._offer(migration)]",
        "return [self._offer(migration)]",
    ),
    "an offer does not tell what checkpoints have the leaf": Mutant(
        participant, "Grant(run, known.epoch, known.covered)", "Grant(run, known.epoch, 0)"
    ),
    "a leaf that comes late is not added to the part": Mutant(
        participant, "[AddToPart(n, leaf) for n in self._parts if n > known.covered]", "[]"
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
    "a leaf travels on before its source has let go": Mutant(
        participant,
        "if known.state is OWNED and known.is_closed and known.version <= self.version:",
        "if known.state is OWNED and known.version <= self.version:\n"
        "                self._leaves.put((leaf,), known._replace(is_closed=True))",
    ),
    "an epoch is used again": Mutant(
        participant, "state=OWNED, epoch=known.epoch + 1,", "state=OWNED, epoch=known.epoch,"
    ),
    "what was given back is let in": Mutant(
        participant,
        "        if known.state is NONE:\n            return [self._to(sender, GiveBack,",
        "        if known.state is NONE and not here.is_whole:\n"
        "            return [self._to(sender, GiveBack,",
    ),
    "a part of a leaf is taken for all of it": Mutant(
        participant,
        "        if here.is_whole:\n            new = new",
        "        if True:\n            new = new",
    ),
    "a leaf goes to and fro between two tables": Mutant(
        participant, " and known.version <= self.version:", ":"
    ),
    "a refusal is said once": Mutant(participant, "arrival.returned.update(refused)", "pass"),
    "lost content is not sent again": Mutant(
        participant, "departure.streamed.discard(leaf)  # if it was", "pass  #"
    ),
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
    "a message of a later generation is not believed": Mutant(
        participant, "return self._fence(message.generation)", "return []"
    ),
    "a late Installed frees another lease": Mutant(
        participant,
        "if epoch != known.epoch or known.peer != sender:\n                # Only",
        "if known.peer != sender:\n                # Only",
    ),
    "a late Released closes another lease": Mutant(
        participant, " or known.epoch != released.epoch", "", first=10_000
    ),
    "a late GiveBack takes back another lease": Mutant(
        participant,
        "                and known.epoch == epoch\n                and known.peer == sender",
        "                and known.peer == sender",
    ),
    "a number of a checkpoint is used again": Mutant(
        coordinator,
        "return self._change(next_number=self.taking + 1)",
        "return self._tell(wanted.members)",
    ),
}


def mutated(mutant: Mutant) -> dict[str, Any]:
    with open(mutant.module.__file__) as file:
        source = file.read()
    assert source.count(mutant.old) == 1, "say what is to be replaced: the code has changed"
    scope: dict[str, Any] = {"__name__": mutant.module.__name__}
    exec(compile(source.replace(mutant.old, mutant.new), mutant.module.__file__, "exec"), scope)
    return scope


def seeds_until_caught(name: str) -> tuple[int, str]:
    """How many runs it takes, and what is wrong then; 0 if it survives."""
    scope = mutated(MUTANTS[name])
    first = MUTANTS[name].first
    for seed in range(first, first + SEEDS_MAX):
        run = run_of(
            seed,
            participant_class=scope.get("Participant", participant.Participant),
            coordinator_class=scope.get("Coordinator", coordinator.Coordinator),
        )
        try:
            run.play()
        except Exception as error:
            return seed + 1 - first, f"{type(error).__name__}: {error}"
    return 0, ""


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    runs, _ = seeds_until_caught(name)
    assert runs, f"{name!r} survives {SEEDS_MAX} seeds"
