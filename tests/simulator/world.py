"""World: what is true, kept outside the machines under test, and the checks against it.

Every leaf has a few keys, and the only operation is to count one of them up. `done` says how far
the counting has come in the newest generation; a participant that accepts an operation must have
exactly that number (I3, I4). `opener` is the one participant that may accept operations for a leaf
(I2). A checkpoint must hold what the source had emitted when its barrier passed (I5).

Each check happens when something changes, and only for that one leaf, so checks cost little.
"""

from typing import Any

from statekit.protocol.messages import Completed, Record, Recover, Table, Take


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    def __init__(self, leaves: int, keys: int) -> None:
        self.leaves = leaves
        self.keys = keys
        self.stored: Record | None = None
        self.generation = 0
        self.tables: dict[tuple[int, int], tuple[str, ...]] = {}  # all that were ever stored
        self.opener: list[Any] = [None] * leaves
        self.done = [[0] * keys for _ in range(leaves)]
        self.emitted = [[0] * keys for _ in range(leaves)]
        self.pending: list[list[tuple[int, int]]] = [[] for _ in range(leaves)]  # key, era
        self.pending_of: dict[int, int] = {}  # era: how many records of it are not done
        self.waiting = 0  # records that are not done
        self.era = 0  # the last barrier that the source has emitted
        self.barriers: dict[int, list[list[int]]] = {0: [[0] * keys for _ in range(leaves)]}
        self.disk: dict[int, dict[int, dict[str, list[int]]]] = {}  # checkpoint, leaf, whose: what
        self.at: list[str] = [""] * leaves  # where the records of a leaf arrive
        self.acknowledged = 0  # the last checkpoint that sources were told of
        self.log: list[list[tuple[int, int]]] = [[] for _ in range(leaves)]  # done: key, era
        self.base = [0] * leaves  # how many were done before the log begins
        self.abandoned = 0  # checkpoints up to this one may be incomplete, or wrong

    # ---- The source of records

    def emit(self, leaf: int, key: int) -> None:
        self.emitted[leaf][key] += 1
        self.pending[leaf].append((key, self.era))
        self.pending_of[self.era] = self.pending_of.get(self.era, 0) + 1
        self.waiting += 1

    def barrier(self, number: int, generation: int = 0) -> None:
        """What the source does: it ignores what a deposed coordinator still asks for."""
        if number > self.era and generation == self.generation:
            self.era = number
            self.barriers[number] = [list(counts) for counts in self.emitted]

    def is_aligned(self, number: int) -> bool:
        """What the engine does: a barrier has passed when all records before it are done."""
        if number not in self.barriers:
            return False
        return not any(count for era, count in self.pending_of.items() if era < number and count)

    # ---- Leases

    def opened(self, worker: Any, leaf: int, content: dict[int, int], is_whole: bool) -> None:
        if worker.participant.generation != self.generation:
            return
        other = self.opener[leaf]
        if other is not None and other is not worker:
            raise Violation(f"I2: leaf {leaf} is open at {other.name} and at {worker.name}")
        self.opener[leaf] = worker
        self.compare(worker, leaf, content, is_whole)

    def compare(self, worker: Any, leaf: int, content: dict[int, int], is_whole: bool) -> None:
        done = self.done[leaf]
        if is_whole and len(content) != self.keys:
            raise Violation(f"I1: leaf {leaf} at {worker.name} has keys {sorted(content)} only")
        for key, count in content.items():
            if count != done[key]:
                raise Violation(
                    f"I4: key {key} of leaf {leaf} is {count} at {worker.name}, not {done[key]}"
                )

    def shut(self, worker: Any, leaf: int) -> None:
        if worker.participant.generation == self.generation and self.opener[leaf] is worker:
            self.opener[leaf] = None

    def dropped(self, worker: Any, leaf: int) -> None:
        """An old owner forgets the leaf: a new one must have all of it, or have died with it."""
        if worker.participant.generation != self.generation:
            return
        other = self.opener[leaf]
        if other is None or other is worker:
            raise Violation(f"I1: {worker.name} forgets leaf {leaf}, which nobody else has")
        copy = other.copies.get(leaf)
        if other.is_alive and (copy is None or not copy.is_whole):
            raise Violation(
                f"I1: {worker.name} forgets leaf {leaf}; {other.name} has not all of it"
            )

    def unexpected(self, worker: Any, leaf: int) -> None:
        if worker.participant.generation == self.generation and self.opener[leaf] is worker:
            raise Violation(f"I1: {worker.name} forgets leaf {leaf}, which it owns")

    def fenced(self, worker: Any, leaves: Any) -> None:
        for leaf in leaves:
            if self.opener[leaf] is worker:
                self.opener[leaf] = None

    def count(self, worker: Any, leaf: int, key: int, content: dict[int, int]) -> None:
        """The worker accepts the leaf's next record."""
        if self.opener[leaf] is not worker:
            raise Violation(f"I2: {worker.name} accepts a record for leaf {leaf}, not its owner")
        done = self.done[leaf]
        if content.get(key) != done[key]:
            raise Violation(
                f"I4: key {key} of leaf {leaf} goes on from {content.get(key)} at {worker.name}, "
                f"not from {done[key]}"
            )
        record = self.pending[leaf].pop(0)
        self.log[leaf].append(record)
        era = record[1]
        covered = worker.participant.covered_of(leaf)
        if covered > max(era, self.abandoned):
            raise Violation(
                f"I5: {worker.name} accepts a record for leaf {leaf} from before barrier "
                f"{covered}, and has passed it"
            )
        self.pending_of[era] -= 1
        self.waiting -= 1
        done[key] += 1
        content[key] = done[key]

    # ---- Checkpoints and the record

    def written(self, number: int, leaf: int, worker: Any, content: list[int]) -> None:
        """A leaf is in the worker's part of a checkpoint, durably."""
        copies = self.disk.setdefault(number, {}).setdefault(leaf, {})
        copies[worker.name] = content
        if number <= self.abandoned or worker.participant.generation != self.generation:
            return
        if len(copies) > 1:
            raise Violation(f"I5: leaf {leaf} is in parts of checkpoint {number} of {list(copies)}")
        if content != self.barriers[number][leaf]:
            raise Violation(
                f"I5: leaf {leaf} is {content} in {worker.name}'s part of checkpoint {number}, "
                f"not {self.barriers[number][leaf]}"
            )

    def roll_back(self, leaf: int, content: dict[int, int]) -> None:
        """The leaf's owner has died and an earlier one takes it back: the source goes back, too."""
        at = sum(content.values()) - self.base[leaf]
        again = self.log[leaf][at:]
        del self.log[leaf][at:]
        self.pending[leaf][:0] = again
        for _, era in again:
            self.pending_of[era] += 1
        self.waiting += len(again)
        self.done[leaf] = [content[key] for key in range(self.keys)]
        self.opener[leaf] = None

    def store(self, expected: int, record: Record) -> bool:
        """Compare-and-set. What it changes is true from here on, even if nobody knows it yet."""
        old = self.stored
        if (old.revision if old else 0) != expected:
            return record == old
        self.stored = record
        complete = old.complete if old else 0
        if record.complete != complete:
            self._check_complete(complete, record)
        if record.generation != self.generation:
            self._begin(record, complete)
        for version, owners in ((1, record.start), (record.version, record.owners)):
            if self.tables.setdefault((record.generation, version), owners) != owners:
                raise Violation(f"two tables have version {record.generation}/{version}")
        return True

    def _check_complete(self, before: int, record: Record) -> None:
        number = record.complete
        if number < before:
            raise Violation(f"I5: checkpoint {number} was recorded after {before}")
        parts = self.disk.get(number, {})
        expected = self.barriers[number]
        for leaf in range(self.leaves):
            copies = parts.get(leaf, {})
            if len(copies) != 1:
                raise Violation(
                    f"I5: leaf {leaf} is {len(copies)} times in complete checkpoint {number} "
                    f"({', '.join(copies)})"
                )
            (content,) = copies.values()
            if content != expected[leaf]:
                raise Violation(
                    f"I5: leaf {leaf} is {content} in checkpoint {number}, not {expected[leaf]}"
                )

    def _begin(self, record: Record, complete: int) -> None:
        if record.restored < max(self.acknowledged, complete):
            raise Violation(
                f"I5: generation {record.generation} restores checkpoint {record.restored}, "
                f"but {max(self.acknowledged, complete)} is complete"
            )
        self.generation = record.generation
        state = self.barriers[record.restored]
        self.done = [list(counts) for counts in state]
        self.emitted = [list(counts) for counts in state]
        self.pending = [[] for _ in range(self.leaves)]
        self.pending_of = {}
        self.waiting = 0
        self.era = record.restored
        self.opener = [None] * self.leaves
        self.at = list(record.owners)
        self.log = [[] for _ in range(self.leaves)]
        self.base = [sum(counts) for counts in state]

    def restored(self, generation: int, number: int, leaf: int) -> dict[int, int]:
        """What a restore of checkpoint n gives: what is on the disk, not what should be there."""
        if number == 0:
            return dict.fromkeys(range(self.keys), 0)
        copies = self.disk.get(number, {}).get(leaf, {})
        if not copies:
            raise Violation(f"I5: leaf {leaf} is not in checkpoint {number}, which is restored")
        return dict(enumerate(next(iter(copies.values()))))

    def told(self, message: Any) -> None:
        """A coordinator says this: it must be stored."""
        kind, stored = type(message), self.stored
        if kind not in (Table, Recover, Take):
            return
        if stored is None or message.generation > stored.generation:
            raise Violation(f"{message} was sent and not stored")
        if kind is Take:
            if message.number >= stored.next_number:
                raise Violation(f"{message} was sent and not stored")
        elif self.tables.get((message.generation, message.version)) != message.owners:
            raise Violation(f"{message} was sent and not stored")

    def completed(self, order: Completed) -> None:
        if self.stored is None or order.number > self.stored.complete:
            raise Violation(f"I5: checkpoint {order.number} was acknowledged and not recorded")
        self.acknowledged = max(self.acknowledged, order.number)
